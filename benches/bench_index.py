"""From a suite on disk to the `Dataset`: ours against the integration it replaces, plain Python, and reading the files.

    python benches/bench_index.py [--tasks 10000] [--rounds 5]

Prints a markdown table; every figure is the best of the rounds, which take turns. All rows find the files in the page
cache and may use all cores. Imports are in no row: each contestant runs once before. The floor is a process of its own
(it needs cargo): its CPU includes the start of the process, about a millisecond, its wall time does not.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset
from task_toml import task_toml

from harbor_trl import HarborSpec
from harbor_trl.suite import index_suite


class Cost(NamedTuple):
    wall: float
    cpu: float


def write_suite(root: Path, tasks: int) -> None:
    for i in range(tasks):
        task = root / "tasks" / f"task-{i:06}"
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "instruction.md").write_text("Do it.\n")
        (task / "tests" / "test.sh").write_text("exit 0\n")
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
        (task / "task.toml").write_text(task_toml(i))


def upstream(root: Path) -> int:
    from trl.experimental.harbor import HarborSpec as Upstream

    return len(Upstream(str(root)).train_dataset)


def plain_python(root: Path) -> int:
    rows = []
    for entry in sorted(os.scandir(root / "tasks"), key=lambda entry: entry.name):
        with open(f"{entry.path}/task.toml", "rb") as file:
            rows.append(tomllib.load(file)["metadata"] | {"task_dir": entry.path})
    return len(Dataset.from_list(rows))


def to_table(root: Path) -> int:
    return len(index_suite(root).table)


def to_dataset(root: Path) -> int:
    return len(HarborSpec(root).train_dataset)


def measure(contestant: Callable[[Path], int], root: Path, tasks: int) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    count = contestant(root)
    cost = Cost(time.perf_counter() - wall, time.process_time() - cpu)
    assert count == tasks
    return cost


def build_floor() -> Path:
    repository = Path(__file__).parents[1]
    command = ["cargo", "build", "--release", "--quiet", "-p", "harbor-trl-core", "--example", "read_floor"]
    subprocess.run(command, cwd=repository, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", repository / "target"))
    return target / "release" / "examples" / "read_floor"


def measure_floor(binary: Path, root: Path) -> Cost:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.check_output([binary, root / "tasks"], text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(float(out.split()[0]), cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    contestants = {
        "`trl.experimental.harbor`, to the Dataset": upstream,
        "Python: scandir, tomllib, `Dataset.from_list`": plain_python,
        "harbor_trl, to the Arrow table": to_table,
        "harbor_trl, to the Dataset": to_dataset,
    }
    floor_name = "floor: find and read the files in Rust"
    costs: dict[str, list[Cost]] = {name: [] for name in (*contestants, floor_name)}
    floor = build_floor()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_suite(root, arguments.tasks)
        for contestant in contestants.values():
            contestant(root)
        for _ in range(arguments.rounds):
            for name, contestant in contestants.items():
                costs[name].append(measure(contestant, root, arguments.tasks))
            costs[floor_name].append(measure_floor(floor, root))
    best = {name: Cost(min(c.wall for c in cs), min(c.cpu for c in cs)) for name, cs in costs.items()}
    first, last = best[next(iter(contestants))], best[floor_name]
    print(f"{arguments.tasks:,} tasks, {os.cpu_count()} cores, best of {arguments.rounds}\n")
    print("| | wall | faster than upstream | CPU | less CPU than upstream | wall / floor | CPU / floor |")
    print("|---|---|---|---|---|---|---|")
    for name, cost in best.items():
        wall, cpu = first.wall / cost.wall, first.cpu / cost.cpu
        print(
            f"| {name} | {cost.wall:.3f} s | {wall:.1f} x | {cost.cpu:.3f} s | {cpu:.1f} x | "
            f"{cost.wall / last.wall:.2f} | {cost.cpu / last.cpu:.2f} |"
        )


if __name__ == "__main__":
    main()
