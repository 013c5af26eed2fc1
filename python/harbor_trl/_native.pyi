import os
from collections.abc import Callable, Sequence
from typing import Any, final

__version__: str

@final
class ArrowStream:
    """One record batch, for whatever takes the Arrow PyCapsule interface, such as `pyarrow.table`."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...

@final
class SuiteIndex:
    """The tasks of a suite: found, and read where asked for.

    `watch(found, read)` is called about every 50 ms with the number of tasks so far; what it raises ends the work.
    """

    @staticmethod
    def scan(
        root: str | os.PathLike[str],
        *,
        read: bool,
        toml_1_1: bool = False,
        watch: Callable[[int, int], object] | None = None,
    ) -> SuiteIndex:
        """Find every task below `root`, and with `read` also read each.

        Raises:
            OSError: `root` is no directory that can be listed.
        """

    @staticmethod
    def of(root: str | os.PathLike[str], paths: Sequence[str | os.PathLike[str]]) -> SuiteIndex:
        """A suite whose tasks, as paths below `root`, are known already; none is read."""

    def __len__(self) -> int: ...
    def read(
        self,
        positions: Sequence[int] | None = None,
        *,
        toml_1_1: bool = False,
        watch: Callable[[int, int], object] | None = None,
    ) -> None:
        """Read the tasks at these positions (all by default) that are not read yet."""

    def paths(self, positions: Sequence[int] | None = None) -> list[str]:
        """Paths below the root, as `os.fsdecode` gives them; the root itself is the empty string."""

    def problems(self) -> list[tuple[str, str, str]]:
        """Path below the root, kind, and where a link leads or what the system says."""

    def refused(self) -> list[tuple[int, str, str, int, int]]:
        """Position, kind, message, line and column (0: none) of each task that was read and refused."""

    def supply(self, position: int, name: str | None, metadata: dict[str, Any]) -> None:
        """Take the values of a task that Python read itself.

        Raises:
            ValueError: A value is nested too deeply for a column.
        """

    def columns(self, positions: Sequence[int] | None = None) -> tuple[ArrowStream, list[str]]:
        """Columns `task_dir`, `task_index`, `task_id`, `task_name`, each metadata key; and which keys are JSON text."""

def parse_toml(text: str, *, toml_1_1: bool = False) -> dict[str, Any] | tuple[str, str, int, int]:
    """Parse TOML as the index does: the document, or `(kind, message, line, column)` of a refusal."""

@final
class OutputBuffer:
    """Keeps the first and the last part of a stream of bytes as text; see `docs/output.md`.

    The text depends on the bytes alone, not on how they were cut into chunks. Memory follows `limit`, not the input.

    Args:
        limit: Characters to keep. The line that says what is missing comes on top.
        head: How many of them are kept from the beginning; default: half.
        fold: Keep only the last draw of a line drawn several times, and drop escape sequences (colours, titles).

    Raises:
        ValueError: `limit` is negative, or `head` is not between 0 and `limit`.
    """

    def __new__(cls, limit: int, *, head: int | None = None, fold: bool = True) -> OutputBuffer: ...
    def feed(self, data: bytes, /) -> None:
        """Take the next bytes. What is not UTF-8 becomes U+FFFD, as in `bytes.decode(errors="replace")`."""

    def skip(self, bytes: int, lines: int) -> None:
        """Note that the source left out `bytes` bytes with `lines` line ends here. The head ends at this point."""

    def text(self, note: str = "") -> str:
        """The text if the stream ended here, with `note` in the line that says what is missing."""

    @property
    def dropped_bytes(self) -> int:
        """UTF-8 bytes that `text` leaves out."""

    @property
    def dropped_lines(self) -> int:
        """Line ends that `text` leaves out."""

def copy_plan(
    dockerfile: str | os.PathLike[str],
    context: str | os.PathLike[str],
    target: str | None = None,
    build_args: dict[str, str] = ...,
    base_env: dict[str, str] = ...,
    base_workdir: str | None = None,
    base_user: str | None = None,
) -> dict[str, Any]:
    """The fields of `harbor_trl.dockerfile.CopyPlan`, its entries, errors and unknowns as dicts of theirs.

    Raises:
        OSError: The Dockerfile or its ignore file cannot be read.
    """

def parse_dockerfile(source: bytes) -> dict[str, Any]:
    """`instructions` and heredocs, as dicts of the fields in `harbor_trl.dockerfile`; `escape`, `syntax` and `error`.

    `error` is None, or what the parser refuses, as a dict of the fields of `harbor_trl.dockerfile.BuildProblem`.
    """

def expand_word(word: str, env: dict[str, str | None], escape: str = "\\") -> str | None: ...
def match_path(pattern: str, name: str) -> bool | None: ...
def match_ignore(ignore_file: bytes, paths: list[str]) -> list[bool] | None: ...
def check_tasks(
    root: str | os.PathLike[str],
    tasks: Sequence[str | os.PathLike[str]],
    *,
    lacks: Sequence[str] = ...,
    only_errors: bool = False,
    toml_1_1: bool = False,
    watch: Callable[[int, int], object] | None = None,
) -> list[tuple[list[tuple[str, str, int, int, str]], bool, int]]:
    """For each task its findings, whether Harbor must be asked, and a key that tasks of the same content share.

    A finding is `(code, file below the task, line, column, message)`, with 0 for no line or column.

    Args:
        lacks: What the backend cannot do, in the names of Harbor's `EnvironmentCapabilities`, and `images`.
        only_errors: Look for nothing that is only worth a warning.
    """

def same_content(root: str | os.PathLike[str], tasks: Sequence[str | os.PathLike[str]]) -> list[int]:
    """For each task the place of the first one with the same content, or its own.

    Hidden files and `task.toml` aside. A task of more than 64 MiB or 20,000 files is compared with none.
    """

def locate_key(text: str, path: Sequence[str | int], *, toml_1_1: bool = False) -> tuple[int, int] | None:
    """Line and column of a key of a TOML document, as far down as it is there."""
