"""COPY plans per second, native against the plain Python reference, on Dockerfiles as task suites have them.

    python benches/bench_copy_plan.py [SUITE]

Without SUITE, 300 generated tasks: a Dockerfile of about 40 lines, a context of a few files, some with a .dockerignore.
Prints the native rate, the reference's, their ratio, and the floor: reading the Dockerfile and listing the context.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from harbor_trl import _native
from harbor_trl.dockerfile import copy_plan
from reference import dockerfile_copy

TEMPLATE = """FROM ubuntu:24.04

# Packages
RUN apt-get update && apt-get install -y \\
    git \\
    curl \\
    ca-certificates \\
    && rm -rf /var/lib/apt/lists/*

ENV GOPATH=/go
ENV PATH="/usr/local/go/bin:${{PATH}}"
WORKDIR ${{GOPATH}}/src/project{index}
RUN git clone https://host/project.git src && \\
    cd src && \\
    git checkout --detach abc
COPY data /data
COPY *.json setup.sh /opt/task/
{more}
COPY bug.patch /tmp/bug.patch
RUN patch -p1 < /tmp/bug.patch && rm /tmp/bug.patch
WORKDIR /app
"""


def generate(root: Path, count: int) -> list[Path]:
    rng = random.Random(0)
    dockerfiles = []
    for index in range(count):
        task = root / f"task-{index}" / "environment"
        (task / "data" / "nested").mkdir(parents=True)
        more = "\n".join(f"RUN echo {n} > /etc/step{n} && pip install package{n}" for n in range(rng.randint(5, 20)))
        (task / "Dockerfile").write_text(TEMPLATE.format(index=index, more=more))
        for name in [
            "bug.patch",
            "setup.sh",
            "a.json",
            "b.json",
            *[f"data/{n}.csv" for n in range(8)],
            "data/nested/x",
        ]:
            (task / name).write_text("x")
        if index % 3 == 0:
            (task / ".dockerignore").write_text("**/*.pyc\n.git\n!data\n")
        dockerfiles.append(task / "Dockerfile")
    return dockerfiles


def rate(work: Callable[[Path], object], dockerfiles: list[Path]) -> float:
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for path in dockerfiles:
            work(path)
        rounds.append(len(dockerfiles) / (time.perf_counter() - start))
    return statistics.median(rounds)


def read(path: Path) -> None:
    path.read_bytes()
    for _, _, _ in os.walk(path.parent):
        pass


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        if len(sys.argv) > 1:
            dockerfiles = sorted(Path(sys.argv[1]).rglob("environment/Dockerfile"))
        else:
            dockerfiles = generate(Path(directory), 300)
        rows = {
            "native": rate(lambda path: _native.copy_plan(path, path.parent), dockerfiles),
            "native, as dataclasses": rate(lambda path: copy_plan(path, path.parent), dockerfiles),
            "Python reference": rate(lambda path: dockerfile_copy.copy_plan(path, path.parent), dockerfiles),
            "floor: read and list": rate(read, dockerfiles),
        }
    print(f"{len(dockerfiles)} Dockerfiles")
    for name, value in rows.items():
        print(f"{name:24} {value:10.0f} plans/s {rows['native'] / value:8.2f} x")


if __name__ == "__main__":
    main()
