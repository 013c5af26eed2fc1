"""`harbor_trl.check` against Harbor's own loading, on tasks of realistic size: ratios of one run.

    python benches/bench_check.py [TASKS]

Harbor only loads a task and says whether it is valid; the check also follows its Dockerfile and looks for warnings.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from task_toml import task_toml

DOCKERFILE = """FROM ubuntu:24.04

# Base system packages
RUN apt-get update && apt-get install -y \\
    git \\
    curl \\
    ca-certificates \\
    patch \\
    build-essential \\
    && rm -rf /var/lib/apt/lists/*

RUN curl -fsSL https://example.com/go1.25.0.linux-amd64.tar.gz | tar -C /usr/local -xzf - && \\
    ln -s /usr/local/go/bin/go /usr/local/bin/go

ENV PATH="/usr/local/go/bin:${PATH}"
WORKDIR /app
RUN git clone https://example.com/project.git src && cd src && git checkout --detach FETCH_HEAD
WORKDIR /app/src
RUN go mod download
RUN git reset --hard

COPY bug.patch /tmp/bug.patch
RUN patch -p1 < /tmp/bug.patch && rm /tmp/bug.patch
RUN rm -rf /app/src/.git
"""

TEST = """#!/bin/bash
cd /app/src
{copies}
go test -v ./internal/...
test_status=$?
if [ $test_status -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def write_suite(root: Path, count: int) -> None:
    """Tasks like those of public suites: a patch, a handful of test files in directories of their own."""
    chance = random.Random(0)
    for number in range(count):
        task = root / f"project__name-{number:05}"
        names = [f"internal/package{i}/file{i}_test.go" for i in range(chance.choice((1, 2, 2, 3, 4, 8)))]
        files = {
            "task.toml": task_toml(number),
            "instruction.md": f"Fix issue {number}.\n" * 40,
            "environment/Dockerfile": DOCKERFILE,
            "environment/bug.patch": "-line\n+line\n" * 200,
            "solution/fix.patch": "+line\n-line\n" * 200,
            "solution/solve.sh": "#!/bin/bash\npatch -p1 < /solution/fix.patch\n",
            "tests/test.sh": TEST.format(copies="\n".join(f'cp "/tests/{name}" "{name}"' for name in names)),
            **{f"tests/{name}": "package x\n" * 300 for name in names},
        }
        for name, text in files.items():
            path = task / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    from harbor.models.task.task import Task

    import harbor_trl
    from harbor_trl.checks import errors_of
    from harbor_trl.suite import open_suite

    warnings.simplefilter("ignore")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_suite(root, count)
        assert harbor_trl.check(root) == []
        tasks = sorted(root.iterdir())
        sample = tasks[:: max(1, count // 500)]
        share = count / len(sample)

        def load() -> None:
            for task in sample:
                Task(task)

        def is_valid() -> None:
            assert all(Task.is_valid_dir(task) for task in sample)

        rows = [
            (name, *(share * spent for spent in measure(work)))
            for name, work in (("Task()", load), ("Task.is_valid_dir()", is_valid))
        ]
        ours: list[tuple[str, Callable[[], object]]] = [
            ("harbor_trl.check", lambda: harbor_trl.check(root)),
            ("errors only (HarborSpec)", lambda: errors_of(open_suite(root), range(count))),
        ]
        for name, work in ours:
            rows.append((name, *(min(spent) for spent in zip(*(measure(work) for _ in range(5)), strict=True))))
        _, cpu, wall = rows[0]
        print(f"{count} tasks; Harbor measured on {len(sample)} of them, and scaled")
        print(f"{'':28}{'CPU s':>10}{'wall s':>10}{'CPU x':>10}{'wall x':>10}")
        for name, own_cpu, own_wall in rows:
            print(f"{name:28}{own_cpu:10.3f}{own_wall:10.3f}{cpu / own_cpu:10.1f}{wall / own_wall:10.1f}")


if __name__ == "__main__":
    main()
