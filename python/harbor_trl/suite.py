"""Find the tasks of a suite and read their metadata into typed columns.

A task is a directory with a file `task.toml`, at any depth below the suite's root, or the root itself; below a task
there are no further tasks. Tasks are ordered by path, component by component, as `sorted()` orders `pathlib.Path`.
Hidden directories are skipped; a link to a directory is followed unless the directory is searched already.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import time
import tomllib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harbor_trl import _native
from harbor_trl.errors import SuiteError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

#: Python's `tomllib`, with which Harbor reads a task, reads TOML 1.1 from here on.
_TOML_1_1 = sys.version_info >= (3, 15)

#: Columns that every task has, and their place in `[metadata]`; null where a task has no such key.
ALIASES = {
    "gold_answer": "gold_answer",
    "reward_mode": "reward_mode_initial",
    "difficulty_level": "difficulty_level",
    "kaggle_dataset": "kaggle_dataset_name",
}

#: Names that mean something to this package or to TRL: a metadata key of this name gets the prefix `metadata_`.
RESERVED_COLUMNS = frozenset(
    {
        # The columns that are always there.
        "prompt",
        "task_dir",
        "task_index",
        "task_id",
        "task_name",
        # `reset(self, **row)`.
        "self",
        # GRPOTrainer gives reward functions these beside the dataset's columns.
        "prompts",
        "completions",
        "completion",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "environment_reward",
        # Columns that TRL's trainers and their data helpers read themselves.
        "environment",
        "image",
        "images",
        "tools",
        "chat_template_kwargs",
        "messages",
        "chosen",
        "rejected",
        # A column without a name.
        "",
    }
)
_PREFIX = "metadata_"

#: What could be a hub repo's id: not a path such as ./suite, ~/suite, /data/suite or data/suites/train.
REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+")

#: Above this many steps `tomllib` takes minutes: its time grows with the square of a key's parts.
_TOMLLIB_STEPS = 200_000_000


class BrokenTask(NamedTuple):
    """A task that cannot be used, and why. Line and column count from 1; `None` where there is none."""

    task_id: str
    file: Path
    line: int | None
    column: int | None
    reason: str

    def __str__(self) -> str:
        where = "".join(f":{number}" for number in (self.line, self.column) if number)
        return f"{printable(os.fspath(self.file))}{where}: {self.reason}"


class ScanProblem(NamedTuple):
    """Something in a suite's tree that is no task and deserves a look; `detail` is where a link leads."""

    path: Path
    kind: str
    detail: str

    def __str__(self) -> str:
        path, detail = printable(os.fspath(self.path)), printable(self.detail)
        match self.kind:
            case "loop":
                return f"{path}: link to {detail}, a directory above it: not followed"
            case "outside":
                return f"{path}: link to {detail}, outside the suite: followed"
            case "again":
                return f"{path}: link to {detail}, which is searched already: not followed"
            case "broken-link":
                return f"{path}: link to {detail}, which does not exist"
            case _:
                return f"{path}: not searched: {detail}"


@dataclass(frozen=True)
class TaskTable:
    """The chosen tasks of a suite that can be used.

    Attributes:
        table: One row a task: `task_dir` (absolute), `task_index` (position in the suite), `task_id` (path below the
            suite's root), `task_name` (`[task] name`), the four `ALIASES`, and each key of `[metadata]`.
        broken: Chosen tasks that cannot be used; they have no row.
        json_columns: Columns of JSON text, because their values have no common type.
        renamed: Metadata keys whose column has another name, and that name.
    """

    table: pa.Table
    broken: list[BrokenTask]
    json_columns: list[str]
    renamed: dict[str, str]


class Suite:
    """A suite whose tasks are found; `tasks()` reads them.

    Args:
        root: Directory below which the tasks lie.
        task_ids: The tasks' paths below `root`, if they are known: then nothing is searched.
        read: Read each task while searching, which is faster than reading all of them afterwards.
        progress: Show a progress bar when searching or reading takes more than a second.

    Raises:
        SuiteError: `root` is no directory that can be listed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        task_ids: Sequence[str] | None = None,
        read: bool = False,
        progress: bool = True,
    ) -> None:
        self.root = _absolute(root)
        self.shows_progress = progress
        try:
            os.fspath(self.root).encode()
        except UnicodeEncodeError:
            raise SuiteError(
                f"{printable(os.fspath(self.root))}: not UTF-8, which a dataset cannot hold: rename it"
            ) from None
        if task_ids is not None:
            self._index = _native.SuiteIndex.of(self.root, ["" if task_id == "." else task_id for task_id in task_ids])
            return
        try:
            with Progress("Searching tasks", enabled=progress) as bar:
                self._index = _native.SuiteIndex.scan(self.root, read=read, toml_1_1=_TOML_1_1, watch=bar.found)
        except OSError as error:
            raise SuiteError(f"{self.root}: no suite: {str(error).partition(' (os error')[0]}") from error

    def __len__(self) -> int:
        return len(self._index)

    @property
    def task_ids(self) -> list[str]:
        """Path of each task below the root; `.` if the root itself is the task."""
        return [printable(path) or "." for path in self._index.paths()]

    def paths(self, positions: Sequence[int]) -> list[str]:
        """Path of each of these tasks below the root, as `os.fsdecode` gives it; empty if the root is the task."""
        return self._index.paths(positions)

    @property
    def problems(self) -> list[ScanProblem]:
        """What the search came across that is no task and deserves a look."""
        return [ScanProblem(self.root / path, kind, detail) for path, kind, detail in self._index.problems()]

    def tasks(self, positions: Sequence[int] | None = None) -> TaskTable:
        """Read the tasks at these positions of the suite, in this order, repeats allowed; by default all."""
        import pyarrow as pa

        with Progress("Reading tasks", enabled=self.shows_progress) as bar:
            self._index.read(positions, toml_1_1=_TOML_1_1, watch=bar.read)
            broken = self._broken(positions, bar)
        if broken:
            positions = [i for i in (range(len(self)) if positions is None else positions) if i not in broken]
        stream, json_keys = self._index.columns(positions)
        table, renamed = _name_columns(pa.table(stream))
        json_columns = [renamed.get(key, key) for key in json_keys]
        return TaskTable(table, list(broken.values()), json_columns, renamed)

    def _broken(self, positions: Sequence[int] | None, bar: Progress) -> dict[int, BrokenTask]:
        """The refused among the chosen tasks, each with the verdict of the real `tomllib`."""
        refused = self._index.refused()
        if not refused:
            return {}
        chosen = None if positions is None else set(positions)
        paths = self._index.paths([refusal[0] for refusal in refused])
        broken = {}
        for done, (path, (position, kind, message, line, column)) in enumerate(zip(paths, refused, strict=True)):
            if chosen is not None and position not in chosen:
                continue
            bar.read(0, done)
            file = self.root / path / "task.toml"
            task_id = printable(path) or "."
            verdict = Refusal(message, line or None, column or None)
            if kind in ("syntax", "limit"):
                read = read_with_tomllib(file, verdict)
                if isinstance(read, dict):
                    supplied = self._supply(position, read, verdict)
                    if supplied is None:
                        if kind == "syntax":
                            warnings.warn(
                                f"{file}: Python's tomllib reads this file, harbor-trl's own parser does not "
                                f"(line {line}, column {column}: {message}). This is a bug of harbor-trl: please "
                                "report it with the file. tomllib's values are used.",
                                stacklevel=2,
                            )
                        continue
                    read = supplied
                verdict = read
            broken[position] = BrokenTask(task_id, file, verdict.line, verdict.column, verdict.reason)
        return broken

    def _supply(self, position: int, document: dict[str, Any], verdict: Refusal) -> Refusal | None:
        metadata = document.get("metadata", {})
        if not isinstance(metadata, dict):
            return Refusal("metadata is not a table", None, None)
        task = document.get("task")
        name = task.get("name") if isinstance(task, dict) else None
        try:
            self._index.supply(position, name if isinstance(name, str) else None, metadata)
        except ValueError as error:
            return verdict._replace(reason=str(error))
        return None


def index_suite(
    path: str | os.PathLike[str], positions: Sequence[int] | None = None, *, progress: bool = True
) -> TaskTable:
    """Find and read the tasks of the suite at `path`.

    Args:
        path: The suite; see `suite_root` for where its tasks are looked for.
        positions: Positions of the tasks to read, in the order of the suite; by default all.
        progress: Show a progress bar when it takes more than a second.

    Raises:
        SuiteError: There is no such directory.
        IndexError: A position is beyond the suite.
    """
    suite = open_suite(path, read=positions is None, progress=progress)
    return suite.tasks(positions)


def open_suite(path: str | os.PathLike[str], *, read: bool = False, progress: bool = True) -> Suite:
    """The suite at `path`: its tasks lie below `path/tasks` if there are any there, else below `path`.

    Args:
        path: A directory. If it is a task itself, that is its only task.
        read: Read each task while searching.
        progress: Show a progress bar when it takes more than a second.

    Raises:
        SuiteError: There is no such directory.
    """
    root = _absolute(path)
    if root.exists() and not root.is_dir():
        task = f": the directory of that task is {root.parent}" if root.name == "task.toml" else ""
        raise SuiteError(f"{root} is a file; a suite is a directory, and so is a task{task}")
    if not os.path.lexists(root):
        raise SuiteError(f"{root}: there is no such directory{_hub_hint(os.fspath(path), root)}")
    inner = root / "tasks"
    if inner.is_dir() and not (root / "task.toml").is_file():
        suite = Suite(inner, read=read, progress=progress)
        if len(suite):
            return suite
    return Suite(root, read=read, progress=progress)


def _hub_hint(path: str, root: Path) -> str:
    if not REPO_ID.fullmatch(path) or root.parent.exists():
        return ""
    name = path.partition("/")[2]
    return (
        f'. If {path} is a dataset repo on the Hugging Face hub: HarborSpec("{path}") downloads the tasks that it '
        f"chooses, and checks them; to have all of it here: hf download {path} --repo-type dataset --local-dir {name}"
    )


class Refusal(NamedTuple):
    """Why a `task.toml` is refused, and where."""

    reason: str
    line: int | None
    column: int | None


def read_with_tomllib(file: Path, ours: Refusal) -> dict[str, Any] | Refusal:
    """The document as Harbor reads it, or why Harbor refuses it.

    Args:
        file: A `task.toml`.
        ours: What our own parser says, for the cases in which `tomllib` gives no position.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Refusal(f"not UTF-8: byte {error.object[error.start]:#04x} ({error.reason})", line, column)
    except OSError as error:
        return Refusal(f"cannot be read: {error.strerror or error}", None, None)
    if takes_minutes(text):
        return ours._replace(
            reason=f"{ours.reason}; Python's tomllib, which Harbor uses, would take minutes to read it"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        if found := re.search(r" \(at line (\d+), column (\d+)\)$", reason):
            return Refusal(reason[: found.start()], int(found[1]), int(found[2]))
        line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
        return Refusal(reason.removesuffix(" (at end of document)") + " at the end of the file", line, column)
    except RecursionError:
        return ours._replace(reason="nested too deeply for Python's tomllib, which Harbor uses")
    except ValueError as error:
        # An integer of more digits than Python converts.
        return ours._replace(reason=str(error))


def takes_minutes(text: str) -> bool:
    """Whether `tomllib` would take minutes to read a document."""
    return _tomllib_steps(text) > _TOMLLIB_STEPS


def _tomllib_steps(text: str) -> int:
    """An upper bound, roughly, of the dict look-ups that `tomllib` does for the keys of a document."""
    steps = header = 0
    for line in text.splitlines():
        parts = line.count(".") + 1
        if line.lstrip().startswith("["):
            header = parts
        steps += parts * (parts + header)
    return steps


def _name_columns(table: pa.Table) -> tuple[pa.Table, dict[str, str]]:
    """Put the fixed columns and the aliases first, and give a new name to what would collide."""
    import pyarrow as pa

    fixed, keys = table.column_names[:4], table.column_names[4:]
    position = {key: 4 + i for i, key in enumerate(keys)}
    names = list(fixed)
    columns = list(table.columns[:4])
    for alias, key in ALIASES.items():
        names.append(alias)
        columns.append(table.column(position[key]) if key in position else pa.chunked_array([pa.nulls(len(table))]))
    taken = RESERVED_COLUMNS | ALIASES.keys()
    renamed = {}
    used = set(keys)
    for key in keys:
        if ALIASES.get(key) == key:
            continue
        name = key
        if key in taken:
            name = _PREFIX + key
            while name in used or name in taken:
                name = _PREFIX + name
            used.add(name)
            renamed[key] = name
        names.append(name)
        columns.append(table.column(position[key]))
    return pa.table(columns, names=names), renamed


class Progress:
    """A progress bar that appears when the work takes more than a second."""

    def __init__(self, title: str, *, enabled: bool) -> None:
        self._title = title
        self._due = time.monotonic() + 1 if enabled else float("inf")
        self._bar: Any = None

    def found(self, found: int, read: int) -> None:
        self._show(found)

    def read(self, found: int, read: int) -> None:
        self._show(read)

    def _show(self, count: int) -> None:
        if self._bar is None:
            if time.monotonic() < self._due:
                return
            # This bar heeds HF_HUB_DISABLE_PROGRESS_BARS; for mypy its module does not export it.
            self._bar = importlib.import_module("huggingface_hub.utils").tqdm(desc=self._title, unit=" tasks")
        self._bar.update(count - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _absolute(path: str | os.PathLike[str]) -> Path:
    absolute = Path(path).expanduser().absolute()
    # Only the file system knows what `..` behind a link means.
    return absolute.resolve() if ".." in absolute.parts else absolute


def printable(text: str) -> str:
    """`text` with bytes that are not UTF-8 as `\\xNN`."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def listed(things: Iterable[object], limit: int = 20) -> str:
    """The first `limit` things, one a line, and how many more there are."""
    lines = [f"  {thing}" for thing in things]
    more = [f"  … and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)
