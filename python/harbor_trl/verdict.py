"""What Harbor itself says about a task directory, with the place of what it refuses."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harbor_trl.suite import takes_minutes

#: Directories that Harbor's walk may visit, links followed: a few links can make it visit 2**n.
_MAX_VISITS = 100_000
#: Its time grows with the fourth power of the depth: ten seconds at 60, minutes beyond this.
_MAX_DEPTH = 80


class Verdict(NamedTuple):
    """Why Harbor refuses a task: a code of `harbor_trl.checks`, and where."""

    code: str
    file: str
    """Below the task's directory."""
    key: tuple[str | int, ...]
    """Of `task.toml`, if that is the file."""
    message: str


def refusal(task_dir: Path) -> Verdict | None:
    """Why Harbor refuses a task; None if it takes it.

    Args:
        task_dir: A task whose `task.toml` is TOML.
    """
    from pydantic import ValidationError

    if takes_minutes((task_dir / "task.toml").read_text(encoding="utf-8")):
        return Verdict("toml-unreadable", "task.toml", (), "Python's tomllib would take minutes to read it")
    try:
        visits = _visits(task_dir)
    except RecursionError:
        message = f"directories are nested more than {_MAX_DEPTH} deep, which takes Harbor minutes"
        return Verdict("path-forbidden", "", (), message)
    if visits > _MAX_VISITS:
        return Verdict("path-forbidden", "", (), f"links to directories make Harbor visit {visits:,} of them")
    from harbor.models.task.task import Task

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Task(task_dir)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            return Verdict("config-value", "task.toml", first["loc"], _what(first["loc"], first["msg"]) + more)
        except FileNotFoundError as error:
            return _missing(task_dir, str(error))
        except UnicodeDecodeError as error:
            return Verdict("instruction-unreadable", "instruction.md", (), f"not UTF-8: {error.reason}")
        except OSError as error:
            file = os.path.relpath(error.filename, task_dir.resolve()) if isinstance(error.filename, str) else ""
            return Verdict("unreadable", file, (), error.strerror or str(error))
        except RecursionError:
            return Verdict("path-forbidden", "", (), "directories are nested too deeply for Harbor")
        except (ValueError, RuntimeError, TypeError, OverflowError) as error:
            return Verdict("path-forbidden", _path_in(str(error), task_dir), (), str(error))
        if not Task.is_valid_dir(task_dir):
            return Verdict(
                "missing-environment", "environment", (), "there is no such directory, and no docker_image is set"
            )
    return None


def trial_refusal(task_dir: Path, environment_type: str, environment_kwargs: Mapping[str, Any]) -> str | None:
    """Why each rollout of a task would be `task_refused`, in Harbor's or the backend's words; starts no sandbox.

    Args:
        task_dir: A task that Harbor takes.
        environment_type: A backend that can run on this machine.
        environment_kwargs: Its options.
    """
    from harbor.trial.trial import Trial

    from harbor_trl.engine import engine
    from harbor_trl.rollout import one_line, trial_config

    with tempfile.TemporaryDirectory(prefix="harbor-trl-") as directory:
        trial_dir = Path(directory, "trial")
        config = trial_config(task_dir, environment_type, environment_kwargs, trial_dir=trial_dir, rollout_id=None)
        try:
            trial = engine().run(Trial.create(config))
        except Exception as error:
            return one_line(error)
        trial._close_logger_handler()
    return None


def _what(location: tuple[str | int, ...], message: str) -> str:
    name = ".".join(map(str, location))
    return f"{name}: {message}" if name else message


def _missing(task_dir: Path, message: str) -> Verdict:
    if "nstruction" in message and "test script" not in message:
        return Verdict("missing-instruction", _path_in(message, task_dir) or "instruction.md", (), message)
    if "Step directory" in message:
        return Verdict("missing-instruction", _path_in(message, task_dir), (), message)
    return Verdict("missing-tests", "tests", (), message)


def _path_in(message: str, task_dir: Path) -> str:
    """The path below the task that ends a message of Harbor's."""
    for root in (task_dir.resolve(), task_dir):
        _, found, path = message.rpartition(f"{root}{os.sep}")
        if found:
            return path
    path = message.rpartition(": ")[2]
    return path if path and os.path.lexists(task_dir / path) and not path.startswith("/") else ""


def _visits(task_dir: Path) -> int:
    """How many directories Harbor visits in a task's inputs; a `RecursionError` where they are nested too deeply."""
    counts: dict[str, int] = {}
    root = os.path.realpath(task_dir)

    def count(directory: str, ancestors: tuple[str, ...]) -> int:
        real = os.path.realpath(directory)
        if real in counts:
            return counts[real]
        if real in ancestors or not f"{real}/".startswith(f"{root}/"):
            return 1
        if len(ancestors) > _MAX_DEPTH:
            raise RecursionError
        total = 1
        try:
            with os.scandir(real) as entries:
                for entry in entries:
                    if entry.is_dir():
                        total += count(entry.path, (*ancestors, real))
        except OSError:
            pass
        counts[real] = total
        return total

    return sum(count(os.path.join(root, name), ()) for name in ("tests", "solution", "steps"))
