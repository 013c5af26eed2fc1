"""Small Harbor tasks, written for one test each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Scores 1 when the policy wrote 42 into the answer file of `HarborBashEnv`, else 0.
ANSWER_42 = """#!/bin/bash
if [ "$(cat /workdir/answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_reward(text: str, file: str = "reward.txt") -> str:
    """A verifier that writes `text` whatever the policy did."""
    return f"#!/bin/bash\ncat > /logs/verifier/{file} <<'END'\n{text}\nEND\n"


def make_task(
    directory: Path,
    *,
    test: str = ANSWER_42,
    toml: str = "",
    dockerfile: str = "FROM debian:bookworm-slim\nWORKDIR /app\n",
    instruction: str = "Write 42.\n",
    files: Mapping[str, str] | None = None,
) -> str:
    """Write a task into `directory` and return its path, as a dataset row has it.

    Args:
        directory: Created; its name is the task's.
        test: `tests/test.sh`.
        toml: `task.toml`.
        dockerfile: `environment/Dockerfile`.
        instruction: `instruction.md`.
        files: More files by path below the task.
    """
    contents = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        **(files or {}),
    }
    for name, text in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(directory)
