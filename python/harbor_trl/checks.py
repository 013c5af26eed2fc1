"""Find what is wrong with the tasks of a suite before anything is built or run.

    for finding in harbor_trl.check("path/to/suite"):
        print(finding)

An error keeps a task from ever giving a reward: Harbor refuses it, or its image cannot be built. What Harbor refuses is
Harbor's own verdict: where the answer is not plain, Harbor is asked. A warning is worth a look; a false one is a bug.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harbor_trl import _native
from harbor_trl.errors import SandboxUnavailableError, SuiteError, UnsupportedTaskError
from harbor_trl.suite import BrokenTask, Progress, Suite, TaskTable, open_suite, printable, read_with_tomllib
from harbor_trl.suite import Refusal as TomlRefusal

#: Tasks that are checked between two looks at what was found.
_BATCH = 512
_TOML_1_1 = sys.version_info >= (3, 15)

_NOT_IN_CONTEXT = re.compile(r'"([^"\\]+)" is not in the build context')

#: What a task needs whose image no Dockerfile makes alone.
_NO_DOCKERFILE = ("needs-compose", "needs-image")

Severity = Literal["error", "warning"]


class Code(NamedTuple):
    """What a kind of finding means for the task, and what to do about it."""

    severity: Severity
    remedy: str


CODES: dict[str, Code] = {
    "toml-syntax": Code("error", "Correct the TOML; Harbor reads it with Python's tomllib."),
    "toml-unreadable": Code("error", "Make task.toml a regular file that can be read."),
    "config-value": Code("error", "Give the key a value that Harbor's task configuration takes."),
    "missing-instruction": Code("error", "Add the file: it is what the agent is told to do."),
    "instruction-unreadable": Code("error", "Make the instruction a regular file of UTF-8 text, of 64 MiB at most."),
    "missing-tests": Code("error", "Add the verifier's script, tests/test.sh (test.bat for Windows)."),
    "tests-unreadable": Code("error", "Make the verifier's script a regular file."),
    "missing-environment": Code("error", "Add environment/ with a Dockerfile, or set [environment].docker_image."),
    "missing-dockerfile": Code(
        "error", "Add environment/Dockerfile or environment/docker-compose.yaml, or set [environment].docker_image."
    ),
    "path-forbidden": Code(
        "error", "Keep tests, solution and steps inside the task: no links that leave it or form a cycle, no odd names."
    ),
    "unreadable": Code("error", "Make the file readable for the user who trains."),
    "dockerfile-unreadable": Code("error", "Make the Dockerfile a file that can be read."),
    "dockerfile-invalid": Code("error", "Correct the instruction: no build accepts it."),
    "copy-missing": Code(
        "error",
        "Put the file below environment/, which is the build context, or correct its path there (not from the task's "
        "root).",
    ),
    "copy-ignored": Code("error", "Remove the line of .dockerignore that hides the file, or except it with '!'."),
    "needs-windows": Code("error", "Use a backend that runs Windows containers."),
    "answer-copied": Code("warning", "Don't copy it, or remove it with a RUN that comes after its last use."),
    "no-reward": Code("warning", "Write a number to /logs/verifier/reward.txt at the end of the script."),
    "instruction-empty": Code("warning", "Say in instruction.md what the agent is to do."),
    "no-timeout": Code("warning", "Set [agent].timeout_sec, in seconds."),
    "duplicate": Code("warning", "Remove one of them, or train on it twice knowingly."),
    "nested-task": Code("warning", "Move it out of the task if it is to be one of the suite."),
    "needs-gpu": Code("warning", "Use a backend that gives GPUs, or set [environment].gpus = 0."),
    "needs-tpu": Code("warning", "Use a backend that gives TPUs."),
    "needs-compose": Code("warning", "Use a backend that runs compose services, such as docker."),
    "needs-image": Code("warning", "Use a backend that runs images, such as docker."),
    "needs-network-policy": Code("warning", "Use a backend that can restrict the network as the task asks."),
    "needs-variable": Code(
        "warning", "Set the variable where the tasks are to run, or give it a default: ${NAME:-...}."
    ),
    "backend-refuses": Code("warning", "Use another backend for this task, such as docker."),
    "suite-tree": Code("warning", "Repair or remove it if tasks are missing from the suite."),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with one task.

    Attributes:
        task_id: The task's path below the suite; None for something in the tree that is no task.
        severity: `"error"`: the task can never give a reward. `"warning"`: worth a look.
        code: Short and stable, a key of `CODES`.
        file: The file that it is about, absolute.
        line: Counted from 1; None where there is none.
        column: Counted from 1, in characters; None where there is none.
        message: What is wrong.
        remedy: What to do about it.
    """

    task_id: str | None
    severity: Severity
    code: str
    file: str
    line: int | None
    column: int | None
    message: str
    remedy: str

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number)
        return f"{self.file}{place}: {self.severity}: {self.message} [{self.code}]"


def check(path: str | os.PathLike[str], *, backend: str | None = None) -> list[Finding]:
    """What is wrong with the tasks of the suite at `path`, in the order of the tasks.

    Args:
        path: A suite, or a single task.
        backend: The `environment_type` that the tasks are to run on, to hear also of what it cannot do for them.

    Raises:
        SuiteError: There is no such directory, or no task in it.
        SandboxUnavailableError: There is no such backend.
    """
    suite = open_suite(path)
    require_tasks(suite)
    return list(iter_findings(suite, backend=backend))


def require_tasks(suite: Suite) -> None:
    """Raise a `SuiteError` for a suite without a task."""
    if not len(suite):
        raise SuiteError(
            f"{suite.root}: no task in it. A task is a directory with a task.toml; hidden directories are not searched."
        )


def iter_findings(
    suite: Suite, *, backend: str | None = None, progress: Callable[[int], object] | None = None
) -> Iterator[Finding]:
    """The findings of all tasks as they are found; duplicates and what is no task come last.

    Args:
        suite: The suite.
        backend: As for `check`.
        progress: Called now and then with the number of tasks that are done.
    """
    lacks = _lacks(backend)
    keys: dict[int, list[int]] = defaultdict(list)
    task_ids = suite.task_ids
    for position, findings, key in _checked(suite, range(len(suite)), lacks, only_errors=False, progress=progress):
        if backend == "bubblewrap" and not any(
            finding.severity == "error" or finding.code in _NO_DOCKERFILE for finding in findings
        ):
            refusal = _bubblewrap(suite, position)
            findings = findings if refusal is None else [*findings, refusal]
        yield from findings
        if key:
            keys[key].append(position)
    yield from _duplicates(suite, keys, task_ids)
    for problem in suite.problems:
        if problem.kind in ("unreadable", "broken-link", "loop"):
            message = str(problem).removeprefix(f"{printable(os.fspath(problem.path))}: ")
            yield _finding(None, "suite-tree", printable(os.fspath(problem.path)), 0, 0, message)


def errors_of(
    suite: Suite,
    positions: Sequence[int],
    *,
    backend: str | None = None,
    environment_kwargs: Mapping[str, Any] | None = None,
) -> dict[int, Finding]:
    """The chosen tasks that can never give a reward, by position, each with its first error.

    Args:
        suite: The suite.
        positions: Which of its tasks; repeats do not matter.
        backend: As for `check`. Tasks count too that it refuses, or that this machine lacks a variable for; one that
            cannot run on this machine is not asked.
        environment_kwargs: Its options.
    """
    refusals = None if backend is None else _Refusals(backend, environment_kwargs or {})
    lacks = [] if refusals is None else refusals.lacks
    errors = {}
    with Progress("Checking tasks", enabled=suite.shows_progress) as bar:
        found = _checked(
            suite, sorted(set(positions)), lacks, only_errors=True, progress=functools.partial(bar.read, 0)
        )
        for position, findings, _ in found:
            error = next((finding for finding in findings if finding.severity == "error"), None)
            if error is None and refusals is not None:
                error = next((finding for finding in findings if finding.code == "needs-variable"), None)
                error = error or refusals.of(suite, position, findings)
            if error is not None:
                errors[position] = error
    return errors


class _Refusals:
    """The tasks that a backend refuses at each reset."""

    def __init__(self, backend: str, environment_kwargs: Mapping[str, Any]) -> None:
        self._backend = backend
        self._kwargs = environment_kwargs
        self._taken: set[frozenset[str]] = set()
        self.lacks = _lacks(backend)
        if backend == "docker":
            # Depends on the kernel of its engine.
            self.lacks += ["network_allowlist", "dynamic_network_policy"]

    def of(self, suite: Suite, position: int, needs: Sequence[Finding]) -> Finding | None:
        """Why the backend refuses a task, if it does.

        Args:
            suite: Its suite.
            position: Its position there.
            needs: What the task needs of all that the backend may lack.
        """
        if not self._is_here:
            return None
        if self._backend == "bubblewrap":
            if image := next((need for need in needs if need.code in _NO_DOCKERFILE), None):
                return replace(image, message=f"{image.message}: a bubblewrap sandbox runs none")
            accept_images = self._kwargs.get("kwargs", {}).get("accept_images")
            if refusal := _bubblewrap(suite, position, accept_images, many_users=self._many_users):
                return refusal
        # Only Harbor knows what becomes of a need with these options. One task that is taken speaks for all others with
        # the same needs; one without any says that the options themselves are taken.
        kind = frozenset(need.message for need in needs)
        if kind in self._taken:
            return None
        from harbor_trl.verdict import trial_refusal

        [path] = suite.paths([position])
        message = trial_refusal(suite.root / path, self._backend, self._kwargs)
        if message is None:
            self._taken.add(kind)
            return None
        if needs:
            return replace(needs[0], message=f"{needs[0].message}: {printable(message)}")
        return _finding(printable(path) or ".", "backend-refuses", _path(suite.root, path), 0, 0, message)

    @functools.cached_property
    def _is_here(self) -> bool:
        from harbor_trl.rollout import preflight

        try:
            preflight(self._backend, self._kwargs)
        except (SandboxUnavailableError, ValueError):
            return False
        return True

    @functools.cached_property
    def _many_users(self) -> bool:
        from harbor_trl.environments._sandbox import current_launcher

        return current_launcher().many_users


def unusable_tasks(
    suite: Suite,
    positions: Sequence[int] | None,
    backend: str | None,
    environment_kwargs: Mapping[str, Any] | None = None,
) -> dict[int, BrokenTask]:
    """The chosen tasks that can never give a reward, by position, but for those whose task.toml says so itself.

    Args:
        suite: The suite.
        positions: Which of its tasks; None for all.
        backend: As for `errors_of`.
        environment_kwargs: As for `errors_of`.
    """
    errors = errors_of(
        suite,
        range(len(suite)) if positions is None else positions,
        backend=backend,
        environment_kwargs=environment_kwargs,
    )
    return {
        position: BrokenTask(error.task_id or ".", Path(error.file), error.line, error.column, error.message)
        for position, error in errors.items()
        if not error.code.startswith("toml-")  # has no row anyway, and is named there
    }


def usable_tasks(
    suite: Suite,
    positions: Sequence[int] | None,
    backend: str | None,
    environment_kwargs: Mapping[str, Any] | None = None,
) -> TaskTable:
    """The chosen tasks that can give a reward; all others are `broken`. The arguments are those of `unusable_tasks`."""
    unusable = unusable_tasks(suite, positions, backend, environment_kwargs)
    if not unusable:
        return suite.tasks(positions)
    chosen = range(len(suite)) if positions is None else positions
    usable = suite.tasks([position for position in chosen if position not in unusable])
    broken = sorted([*usable.broken, *unusable.values()], key=lambda task: task.file)
    return replace(usable, broken=broken)


def _checked(
    suite: Suite,
    positions: Sequence[int],
    lacks: list[str],
    *,
    only_errors: bool,
    progress: Callable[[int], object] | None = None,
) -> Iterator[tuple[int, list[Finding], int]]:
    done = 0

    def watch(_: int, read: int) -> None:
        if progress is not None:
            progress(done + read)

    for start in range(0, len(positions), _BATCH):
        batch = positions[start : start + _BATCH]
        paths = suite.paths(batch)
        reports = _native.check_tasks(
            suite.root, paths, lacks=lacks, only_errors=only_errors, toml_1_1=_TOML_1_1, watch=watch
        )
        for position, path, (found, ask, key) in zip(batch, paths, reports, strict=True):
            yield position, list(_explained(suite.root, path, found, ask)) if found or ask else [], key
            done += 1
            if progress is not None and (found or ask):
                progress(done)


def _explained(root: Path, path: str, found: Iterable[tuple[str, str, int, int, str]], ask: bool) -> Iterator[Finding]:
    """The findings of one task, with Harbor's own verdict where only Harbor knows."""
    task_dir = root / path
    task_id = printable(path) or "."
    for code, file, line, column, message in found:
        if code == "toml-syntax":
            verdict = read_with_tomllib(task_dir / file, TomlRefusal(message, line or None, column or None))
            if isinstance(verdict, dict):
                ask = True
                continue
            message, line, column = verdict.reason, verdict.line or 0, verdict.column or 0
        elif code == "needs-variable":
            if message in os.environ:
                continue
            message = f"needs the environment variable {message}, which is not set on this machine"
        elif code == "copy-missing":
            code, message = _why_missing(task_dir, message)
        yield _finding(task_id, code, _path(task_dir, file), line, column, message)
    if ask:
        from harbor_trl.verdict import refusal

        refused = refusal(task_dir)
        if refused is not None:
            line = column = 0
            if refused.key:
                text = (task_dir / refused.file).read_text(encoding="utf-8")
                line, column = _native.locate_key(text, list(refused.key), toml_1_1=_TOML_1_1) or (0, 0)
            yield _finding(task_id, refused.code, _path(task_dir, refused.file), line, column, refused.message)


def _why_missing(task_dir: Path, message: str) -> tuple[str, str]:
    """Code and message for a COPY source that the build context does not have."""
    if (found := _NOT_IN_CONTEXT.match(message)) is None:
        return "copy-missing", message
    source = found[1]
    if os.path.lexists(task_dir / "environment" / source):
        return "copy-ignored", f'"{source}" is in environment/, but its .dockerignore hides it from the build'
    if os.path.lexists(task_dir / source):
        return "copy-missing", f'"{source}" is in the task\'s root, but the build context is environment/'
    return "copy-missing", f'"{source}" is not in the build context, environment/'


def _finding(task_id: str | None, code: str, file: str, line: int, column: int, message: str) -> Finding:
    severity, remedy = CODES[code]
    return Finding(task_id, severity, code, file, line or None, column or None, printable(message), remedy)


def _path(directory: Path, file: str) -> str:
    return printable(os.fspath(directory / file if file else directory))


def _duplicates(suite: Suite, keys: dict[int, list[int]], task_ids: list[str]) -> Iterator[Finding]:
    found: list[tuple[int, int]] = []
    for positions in keys.values():
        if len(positions) < 2:
            continue
        firsts = _native.same_content(suite.root, suite.paths(positions))
        found += [(at, positions[first]) for at, first in zip(positions, firsts, strict=True) if at != positions[first]]
    for position, original in sorted(found):
        file = _path(suite.root / suite.paths([position])[0], "")
        yield _finding(task_ids[position], "duplicate", file, 0, 0, f"the same content as {task_ids[original]}")


def _lacks(backend: str | None) -> list[str]:
    """What a backend cannot do, as far as it says so without being started."""
    if backend is None:
        return []
    from harbor_trl.environments import missing_capabilities

    return missing_capabilities(backend)


def _bubblewrap(
    suite: Suite, position: int, accept_images: Iterable[str] | None = None, *, many_users: bool = True
) -> Finding | None:
    """What that sandbox, which builds no image, refuses of a Dockerfile."""
    from harbor_trl.environments.bubblewrap import check_users
    from harbor_trl.environments.dockerfile_subset import STAND_IN_IMAGES, plan_image

    [path] = suite.paths([position])
    context = suite.root / path / "environment"
    dockerfile = context / "Dockerfile"
    try:
        plan = plan_image(dockerfile, context, tuple(accept_images or STAND_IN_IMAGES))
        check_users(context, plan, many_users=many_users)
    except UnsupportedTaskError as error:
        file = _path(Path(error.file or dockerfile), "")
        return _finding(printable(path) or ".", "backend-refuses", file, error.line, 0, error.reason)
    except OSError as error:
        file = _path(Path(error.filename or dockerfile), "")
        return _finding(printable(path) or ".", "unreadable", file, 0, 0, error.strerror or str(error))
    return None
