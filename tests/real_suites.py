"""Do the Rust halves say of real suites what the references, BuildKit's parser and Harbor say?

    python tests/real_suites.py SUITE ...

For each task: `check`'s verdict beside Harbor's own `Task`, and `task.toml` beside `tomllib`; for each Dockerfile: the
parse beside the Python reference and BuildKit's parser (the package `dockerfile`), and the copy plan beside the
reference's. Prints the counts and each difference; exits 1 where there is one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harbor.models.task.task import Task

import harbor_trl
from harbor_trl.suite import open_suite
from test_dockerfile_parse import assert_oracle_agrees, native, plain
from test_dockerfile_properties import plans
from test_task_toml import agrees

#: Errors of the build, of which Harbor says nothing when it loads a task.
BUILD = ("copy-", "dockerfile-")


def differences(root: Path, counts: Counter[str]) -> Iterator[tuple[Path, str]]:
    suite = open_suite(root)
    refused = set()
    for finding in harbor_trl.check(root):
        counts[f"{finding.severity} {finding.code}"] += 1
        if finding.severity == "error" and not finding.code.startswith(BUILD):
            refused.add(finding.task_id)
    for task_id in suite.task_ids:
        task = suite.root / task_id
        counts["tasks"] += 1
        if harbor_refuses(task) != (task_id in refused):
            yield task, "check and Harbor disagree"
        yield from ((task / "task.toml", what) for what in toml_differences(task / "task.toml"))
        dockerfile = task / "environment" / "Dockerfile"
        if dockerfile.is_file():
            counts["Dockerfiles"] += 1
            yield from ((dockerfile, what) for what in dockerfile_differences(dockerfile, counts))


def harbor_refuses(task: Path) -> bool:
    try:
        Task(task)
    except (Exception, SystemExit):
        return True
    return False


def toml_differences(path: Path) -> Iterator[str]:
    try:
        agrees(path.read_text())
    except AssertionError:
        yield "parse_toml and tomllib disagree"


def dockerfile_differences(path: Path, counts: Counter[str]) -> Iterator[str]:
    source = path.read_bytes()
    if native(source) != plain(source):
        yield "the parse is not the reference's"
    try:
        assert_oracle_agrees(source.decode(errors="replace"))
    except AssertionError as error:
        yield f"the parse is not BuildKit's: {error}"
    found, expected = plans(path, path.parent)
    counts["planned files and directories"] += len(found["entries"])
    counts["instructions that were not worked out"] += len(found["unknowns"])
    if found != expected:
        yield "the copy plan is not the reference's"


def main() -> int:
    total: Counter[str] = Counter()
    wrong = 0
    for name in sys.argv[1:]:
        counts: Counter[str] = Counter()
        for path, what in differences(Path(name), counts):
            wrong += 1
            print(f"{path}: {what}")
        print(f"{name}: {dict(counts)}", flush=True)
        total += counts
    print(f"all: {dict(total)}; differences: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
