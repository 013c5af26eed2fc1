"""What a Dockerfile's COPY and ADD put into an image, worked out without building it.

>>> plan = copy_plan("task/environment/Dockerfile", "task/environment")  # doctest: +SKIP
>>> [entry.destination for entry in plan.entries if entry.touched is None]  # doctest: +SKIP
['/app/data.csv']

The rules are BuildKit's: parsing, variables, stages, `.dockerignore`, wildcards, links, modes and owners. Names and
metadata of the build context are read, not contents (but for the first 512 bytes of a file that ADD may unpack), and
nothing outside the context is ever looked at. What depends on a base image, a URL or the machine is reported in
`CopyPlan.unknowns`; nothing is guessed.

Which files a later RUN may have touched
    A repair must not put back what a RUN has deleted (often the patch that holds the answer), so `Entry.touched` errs
    towards "touched". A RUN touches an earlier file if its text names the last component of the file's path; if it
    removes, moves, overwrites or changes the mode of a directory above it, wildcards included (`rm -rf /tmp/*`); or if
    it runs a build tool (`make`, `npm install`, `git checkout`, …) in a directory above it. It touches everything if
    its effect cannot be told from its text: it runs a script, an interpreter, a program that isn't known, or removes a
    path that is computed. Installing packages, downloading, printing and making directories
    touch nothing but what they name: `RUN apt-get install -y git` leaves every file alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harbor_trl import _native
from harbor_trl.errors import DockerfileError

__all__ = [
    "BuildProblem",
    "CopyPlan",
    "Entry",
    "Heredoc",
    "Instruction",
    "Touched",
    "Unknown",
    "copy_plan",
    "parse_dockerfile",
]


@dataclass(frozen=True, slots=True)
class Touched:
    """A later instruction that may have changed or removed an entry."""

    line: int
    """First line of the instruction, counted from 1."""
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that COPY or ADD puts into the image; later entries overwrite earlier ones."""

    destination: str
    """Absolute, without `.`, `..` and trailing slash."""
    kind: Literal["file", "directory", "symlink", "archive", "special"]
    """`archive`: a tar file that ADD unpacks into `destination`. `special`: a device, pipe or socket."""
    source: str | None
    """Path in the build context; None for heredocs, links and directories that are only made on the way."""
    content: bytes | None
    """A heredoc's content."""
    link: str | None
    """Target of a symbolic link, as written."""
    mode: int | None
    """Permission bits; None for links, and where they aren't known."""
    owner: str | None
    """`user:group` as numbers; as written by --chown where the image's files decide; None if unknown."""
    line: int
    """First line of the COPY or ADD, counted from 1; of the FROM, for one that ONBUILD brought."""
    if_missing: bool
    """A directory that is only made if nothing is there, and otherwise stays as it is."""
    if_directory: str | None
    """Where a file lands instead if `destination` is a directory of the image, where that isn't known."""
    touched: Touched | None
    """Set if a later instruction may have changed or removed it: never put such an entry back."""


@dataclass(frozen=True, slots=True)
class BuildProblem:
    """Something that a build refuses."""

    code: str
    """Short and stable, such as `source-missing`."""
    line: int
    """First line of the instruction, counted from 1; 0: the file as a whole."""
    column: int | None
    """Where on `line`, counted from 1 in characters, if the offending word was found there."""
    message: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that could not be worked out."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Result of `copy_plan`. With `errors` there is no image; the rest is then as complete as it can be."""

    entries: tuple[Entry, ...]
    """In the order in which the build puts them there, those of the stages below included."""
    workdirs: tuple[Entry, ...]
    """Directories that WORKDIR makes where they are missing, in order; without those whose name isn't known."""
    base: str | None
    """Image that the stages start from; None if its name isn't known."""
    stage: str
    """Name of the stage; empty if it has none."""
    workdir: str | None
    """WORKDIR at the end; None if the base image decides."""
    user: str | None
    """USER at the end; empty: root; None if the base image decides."""
    env: Mapping[str, str | None]
    """What ENV sets; None for a value that isn't known."""
    errors: tuple[BuildProblem, ...]
    unknowns: tuple[Unknown, ...]


def copy_plan(
    dockerfile: str | os.PathLike[str],
    context: str | os.PathLike[str],
    *,
    target: str | None = None,
    build_args: Mapping[str, str] | None = None,
    base_env: Mapping[str, str] | None = None,
    base_workdir: str | None = None,
    base_user: str | None = None,
) -> CopyPlan:
    """What a build of `dockerfile` with the directory `context` copies into the image.

    Args:
        dockerfile: Path of the Dockerfile. `NAME.dockerignore` beside it wins over the context's `.dockerignore`.
        context: Directory that the build is given.
        target: Name of the stage to build; the last one by default.
        build_args: Values for ARG, as from `--build-arg`.
        base_env: Variables that the base image is known to set; any other may be set by it too.
        base_workdir: WORKDIR of the base image, if it is known.
        base_user: USER of the base image, if it is known; empty: root.

    Raises:
        OSError: The Dockerfile or its ignore file cannot be read.

    A Dockerfile that no build accepts raises nothing; see `CopyPlan.errors`.
    """
    plan = _native.copy_plan(
        os.fspath(dockerfile),
        os.fspath(context),
        target,
        dict(build_args or {}),
        dict(base_env or {}),
        base_workdir,
        base_user,
    )
    return CopyPlan(
        entries=_entries(plan["entries"]),
        workdirs=_entries(plan["workdirs"]),
        base=plan["base"],
        stage=plan["stage"],
        workdir=plan["workdir"],
        user=plan["user"],
        env=plan["env"],
        errors=tuple(BuildProblem(**error) for error in plan["errors"]),
        unknowns=tuple(Unknown(**unknown) for unknown in plan["unknowns"]),
    )


def _entries(found: list[dict[str, Any]]) -> tuple[Entry, ...]:
    return tuple(
        Entry(**entry | {"touched": Touched(**entry["touched"]) if entry["touched"] else None}) for entry in found
    )


@dataclass(frozen=True, slots=True)
class Heredoc:
    """An inline document of COPY, ADD or RUN."""

    name: str
    expand: bool
    """Variables in it are replaced: its name was not quoted."""
    chomp: bool
    """Written with `<<-`: leading tabs go."""
    file_descriptor: int
    content: bytes
    """As it stands in the file."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, unexpanded."""

    keyword: str
    """Upper case; may be a word that is no instruction."""
    flags: tuple[str, ...]
    """Leading `--name=value` words."""
    args: tuple[str, ...]
    """ENV and LABEL: name, value and separator in turn. RUN, CMD and the like in shell form: one string."""
    json: bool
    heredocs: tuple[Heredoc, ...]
    original: str
    """The line with its continuations joined."""
    line: int
    end_line: int


def parse_dockerfile(source: str | bytes) -> tuple[Instruction, ...]:
    """Cuts the text of a Dockerfile into instructions; what they mean is not checked.

    Raises:
        DockerfileError: BuildKit's parser refuses the text; has `code`, `line` and `column`.
    """
    parsed = _native.parse_dockerfile(source.encode() if isinstance(source, str) else source)
    error = parsed["error"]
    if error is not None:
        message = f"line {error['line']}: {error['message']}"
        raise DockerfileError(message, code=error["code"], line=error["line"], column=error["column"])
    return tuple(
        Instruction(
            keyword=found["keyword"],
            flags=tuple(found["flags"]),
            args=tuple(found["args"]),
            json=found["json"],
            heredocs=tuple(Heredoc(**heredoc) for heredoc in found["heredocs"]),
            original=found["original"],
            line=found["line"],
            end_line=found["end_line"],
        )
        for found in parsed["instructions"]
    )
