"""What `import harbor_trl` costs above starting Python.

    python benches/bench_import.py [--rounds 20]

Prints a markdown table; every figure is the median of the rounds, which take turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

STATEMENTS = {
    "bare Python": "pass",
    "`import harbor_trl`": "import harbor_trl",
    "`from harbor_trl import HarborSpec`": "from harbor_trl import HarborSpec",
    "`from trl.experimental.harbor import HarborSpec`": "from trl.experimental.harbor import HarborSpec",
}


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for statement in STATEMENTS.values():
        seconds(statement)
    times = [{name: seconds(statement) for name, statement in STATEMENTS.items()} for _ in range(rounds)]
    median = {name: statistics.median(round_[name] for round_ in times) for name in STATEMENTS}
    bare = median["bare Python"]
    print("| | median | above bare Python |")
    print("|---|---|---|")
    for name, value in median.items():
        print(f"| {name} | {value * 1000:.0f} ms | {(value - bare) * 1000:.0f} ms |")


if __name__ == "__main__":
    main()
