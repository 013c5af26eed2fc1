"""The part of a Dockerfile that needs no image: WORKDIR, ENV, ARG, USER, COPY and ADD out of the build context.

What COPY and ADD come to is worked out by `harbor_trl.dockerfile`. What that cannot tell, and every instruction that
needs an image, is refused with its line. Nothing is guessed.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from harbor_trl.dockerfile import Entry, Instruction, copy_plan, parse_dockerfile
from harbor_trl.errors import DockerfileError, UnsupportedTaskError

#: Images that a Linux host's own /usr can stand in for.
STAND_IN_IMAGES = ("debian", "debian:*", "ubuntu", "ubuntu:*", "python:3", "python:3-slim")

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Instructions that change nothing in a sandbox: Harbor replaces the command, and nothing listens from outside.
IGNORED = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL", "SHELL"})
SUPPORTED = IGNORED | {"FROM", "ARG", "ENV", "WORKDIR", "USER", "COPY", "ADD"}

_NO_BUILD = "a bubblewrap sandbox builds no image"
_OWNER = re.compile(r"(root|\d{1,10})(?::(root|\d{1,10}))?")


@dataclass
class ImagePlan:
    """What a sandbox must look like before the first command."""

    workdir: str = "/"
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    #: What WORKDIR, COPY and ADD bring, in the Dockerfile's order; owners are numbers or root.
    steps: list[Entry] = field(default_factory=list)


def made_directory(path: str, line: int = 0) -> Entry:
    """What WORKDIR makes of `path`, as root."""
    return Entry(
        destination=path,
        kind="directory",
        source=None,
        content=None,
        link=None,
        mode=0o755,
        owner="0:0",
        line=line,
        if_missing=True,
        if_directory=None,
        touched=None,
    )


def owner_of(entry: Entry) -> tuple[int, int]:
    """Numeric user and group of what COPY brings; `plan_image` has refused all others."""
    match = _OWNER.fullmatch(entry.owner or "")
    assert match is not None
    user, group = (0 if name == "root" else int(name) for name in (match[1], match[2] or match[1]))
    return user, group


def plan_image(dockerfile: Path, context: Path, accept_images: tuple[str, ...] = STAND_IN_IMAGES) -> ImagePlan:
    """Read `dockerfile`, whose build context is `context`.

    Args:
        dockerfile: The file.
        context: Directory that COPY sources are relative to.
        accept_images: Patterns (`fnmatch`) of FROM images that the host's /usr may stand in for; `"*"` accepts any.

    Raises:
        UnsupportedTaskError: For anything that is not certain to come out as `docker build` would have it.
        OSError: A file cannot be read.
    """
    source = dockerfile.read_bytes()

    def refuse(line: int, reason: str) -> UnsupportedTaskError:
        where = f"{dockerfile}, line {line}" if line else str(dockerfile)
        message = f"{where}: {reason}; run this task with environment_type='docker'."
        return UnsupportedTaskError(message, file=dockerfile, line=line, reason=reason)

    try:
        source.decode()
        instructions = parse_dockerfile(source)
    except UnicodeDecodeError:
        raise refuse(0, "not UTF-8") from None
    except DockerfileError as error:
        raise refuse(error.line or 0, str(error)) from None
    has_from = False
    for instruction in instructions:
        keyword = instruction.keyword
        if keyword == "FROM" and has_from:
            raise refuse(instruction.line, f"a second build stage is not supported: {_NO_BUILD}")
        has_from |= keyword == "FROM"
        if keyword not in SUPPORTED and not _is_no_healthcheck(instruction):
            raise refuse(instruction.line, f"{keyword} is not supported: {_NO_BUILD}")
        # Builders differ here.
        if keyword in ("COPY", "ADD") and len(instruction.args) > 2 and not instruction.args[-1].endswith(("/", ".")):
            raise refuse(instruction.line, f"{keyword} of several sources needs a destination that ends in '/'")
    plan = copy_plan(dockerfile, context, base_env={"PATH": DEFAULT_PATH}, base_workdir="/", base_user="")
    for problem in plan.errors:
        raise refuse(problem.line, problem.message)
    for unknown in plan.unknowns:
        raise refuse(unknown.line, unknown.reason)
    if reason := _image_refusal(plan.base or "", accept_images):
        raise refuse(next(one.line for one in instructions if one.keyword == "FROM"), reason)
    steps = sorted((*plan.workdirs, *plan.entries), key=lambda entry: entry.line)
    for entry in steps:
        if entry.kind in ("archive", "special"):
            what = "an archive to unpack" if entry.kind == "archive" else "neither a file, a directory nor a link"
            raise refuse(entry.line, f"{entry.destination!r} would be {what}, which is not supported")
        if not _OWNER.fullmatch(entry.owner or ""):
            raise refuse(
                entry.line, f"the owner of {entry.destination!r} ({entry.owner}) has a number only in the image"
            )
        if entry.mode is None and entry.kind != "symlink":
            raise refuse(entry.line, f"the mode of {entry.destination!r} is not known")
    env = {}
    for name, value in plan.env.items():
        if value is None:
            own = [found for found in _settings(instructions) if found[1].startswith(f"{name}=")]
            line, text = own[-1] if own else (0, name)
            raise refuse(line, f"the value of {text} depends on what the image sets")
        env[name] = value
    return ImagePlan(
        workdir=plan.workdir or "/",
        user=plan.user or None,
        env=env,
        steps=steps,
    )


def _is_no_healthcheck(instruction: Instruction) -> bool:
    return instruction.keyword == "HEALTHCHECK" and [word.upper() for word in instruction.args] == ["NONE"]


def _image_refusal(image: str, accept_images: tuple[str, ...]) -> str | None:
    bare = re.sub(r"^(docker\.io/)?(library/)?", "", image).partition("@")[0]
    if bare.endswith(":") or not any(fnmatch.fnmatchcase(bare, pattern) for pattern in accept_images):
        return (
            f"FROM {image}: the host's own /usr stands in for the image, which is fair only for "
            f"{', '.join(accept_images)} (option accept_images)"
        )
    if bare.startswith("python:") and shutil.which("python3", path=DEFAULT_PATH) is None:
        return f"FROM {image}: this host has no python3 in {DEFAULT_PATH}"
    return None


def _settings(instructions: tuple[Instruction, ...]) -> list[tuple[int, str]]:
    """Line and `NAME=VALUE`, unexpanded, of all that ENV sets."""
    found = []
    for one in instructions:
        if one.keyword == "ENV":
            found += [(one.line, f"{name}={value}") for name, value in zip(one.args[::3], one.args[1::3], strict=True)]
    return found
