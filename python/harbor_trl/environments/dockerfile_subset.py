"""The part of a Dockerfile that needs no image: WORKDIR, ENV, ARG, USER, COPY of plain files.

Everything else is refused with its line. Nothing is guessed: a glob, a heredoc, a variable whose value is not written
in the file, a second stage are refusals too.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import join, normpath

from harbor_trl.errors import UnsupportedTaskError

#: Images that a Linux host's own /usr can stand in for.
STAND_IN_IMAGES = ("debian", "debian:*", "ubuntu", "ubuntu:*", "python:3", "python:3-slim")

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Instructions that change nothing in a sandbox: Harbor replaces the command, and nothing listens from outside.
IGNORED = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL", "SHELL"})

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True)
class Copy:
    """One source of a COPY: a file or directory of the build context, and where it goes.

    `mode` is the octal `--chmod`, or None to keep the source's own modes. A directory's contents are copied, never the
    directory itself.
    """

    source: Path
    target: str
    mode: int | None
    line: int


@dataclass
class ImagePlan:
    """What a sandbox must look like before the first command."""

    workdir: str = "/"
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    #: Directories to make, and files to copy, in the Dockerfile's order.
    steps: list[str | Copy] = field(default_factory=list)


def plan_image(dockerfile: Path, context: Path, accept_images: tuple[str, ...] = STAND_IN_IMAGES) -> ImagePlan:
    """Read `dockerfile`, whose build context is `context`.

    Args:
        dockerfile: The file.
        context: Directory that COPY sources are relative to.
        accept_images: Patterns (`fnmatch`) of FROM images that the host's /usr may stand in for; `"*"` accepts any.

    Raises:
        UnsupportedTaskError: For anything that is not certain to come out as `docker build` would have it.
    """
    return _Reader(dockerfile, context, accept_images).read()


class _Reader:
    def __init__(self, dockerfile: Path, context: Path, accept_images: tuple[str, ...]) -> None:
        self.path = dockerfile
        self.context = context
        self.accept_images = accept_images
        self.plan = ImagePlan()
        self.variables: dict[str, str] = {}
        self.has_from = False
        self.line = 0

    def refuse(self, reason: str) -> UnsupportedTaskError:
        where = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return UnsupportedTaskError(
            f"{where}: {reason}. The bubblewrap sandbox builds no images; run this task with environment_type='docker'."
        )

    def read(self) -> ImagePlan:
        try:
            text = self.path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise self.refuse("not UTF-8") from None
        for line, instruction in self.instructions(text.splitlines()):
            self.line = line
            keyword, _, rest = instruction.partition(" ")
            self.handle(keyword.upper(), rest.strip())
        if not self.has_from:
            self.line = 0
            raise self.refuse("no FROM instruction")
        return self.plan

    def instructions(self, lines: list[str]) -> list[tuple[int, str]]:
        """Each instruction on one line, with the number of its first line."""
        found: list[tuple[int, str]] = []
        pending, start = "", 0
        for number, line in enumerate(lines, 1):
            stripped = line.strip()
            self.line = number
            if stripped.startswith("#"):
                if re.match(r"#\s*escape\s*=", stripped, re.IGNORECASE) and not found and not pending:
                    raise self.refuse("the escape directive is not supported")
                continue
            if not stripped:
                continue
            start = start or number
            body = line.rstrip()
            if body.endswith("\\"):
                pending += body[:-1]
                continue
            found.append((start, re.sub(r"^\s*(\w+)\s+", r"\1 ", pending + body)))
            pending, start = "", 0
        if pending.strip():
            found.append((start, pending.strip()))
        return found

    def expand(self, text: str) -> str:
        if "\\" in text:
            raise self.refuse(f"a backslash in {text!r} is not supported")

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in self.variables:
                raise self.refuse(f"the value of ${name} is not in the Dockerfile")
            return self.variables[name]

        expanded = _VARIABLE.sub(value, text)
        if "$" in _VARIABLE.sub("", text):
            raise self.refuse(f"the variable expression in {text!r} is not supported")
        return expanded

    def words(self, text: str) -> list[str]:
        if "\\" in text:
            raise self.refuse(f"a backslash in {text!r} is not supported")
        try:
            return shlex.split(text)
        except ValueError as error:
            raise self.refuse(f"{error} in {text!r}") from None

    def handle(self, keyword: str, rest: str) -> None:
        if keyword in IGNORED:
            return
        if "<<" in rest:
            raise self.refuse("heredocs are not supported")
        if keyword == "ARG":
            self.arg(rest)
        elif keyword == "FROM":
            self.image(rest)
        elif not self.has_from:
            raise self.refuse(f"{keyword} before FROM")
        elif keyword == "WORKDIR":
            self.workdir(rest)
        elif keyword == "ENV":
            self.env(rest)
        elif keyword == "USER":
            self.plan.user = self.expand(rest)
        elif keyword == "COPY":
            self.copy(rest)
        elif keyword == "HEALTHCHECK" and rest.upper() == "NONE":
            pass
        else:
            raise self.refuse(f"{keyword} is not supported")

    def arg(self, rest: str) -> None:
        for word in self.words(rest):
            name, equals, value = word.partition("=")
            # ENV wins over ARG of the same name, whichever comes first.
            if equals and name not in self.plan.env:
                self.variables[name] = self.expand(value)

    def image(self, rest: str) -> None:
        if self.has_from:
            raise self.refuse("a second build stage is not supported")
        words = [word for word in rest.split() if not word.startswith("--")]
        image = self.expand(words[0]) if words else ""
        bare = re.sub(r"^(docker\.io/)?(library/)?", "", image).partition("@")[0]
        if not any(fnmatch.fnmatchcase(bare, pattern) for pattern in self.accept_images):
            raise self.refuse(
                f"FROM {image}: the host's own /usr stands in for the image, which is fair only for "
                f"{', '.join(self.accept_images)} (option accept_images)"
            )
        if bare.startswith("python:") and shutil.which("python3", path=DEFAULT_PATH) is None:
            raise self.refuse(f"FROM {image}: this host has no python3 in {DEFAULT_PATH}")
        self.has_from = True
        # Arguments declared before FROM do not reach into the stage.
        self.variables = {"PATH": DEFAULT_PATH}

    def workdir(self, rest: str) -> None:
        self.plan.workdir = normpath(join(self.plan.workdir, self.expand(rest.strip("\"'"))))
        self.plan.steps.append(self.plan.workdir)

    def env(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if "=" not in name:
            pairs = {name: self.expand(value.strip())}
        else:
            if re.search(r"'[^']*\$", rest):
                raise self.refuse("a quoted dollar sign is not supported")
            pairs = {}
            for word in self.words(rest):
                key, equals, word_value = word.partition("=")
                if not equals:
                    raise self.refuse(f"ENV {word!r} has no value")
                pairs[key] = self.expand(word_value)
        # All values of one instruction see the variables as they were before it.
        self.plan.env.update(pairs)
        self.variables.update(pairs)

    def copy(self, rest: str) -> None:
        mode: int | None = None
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            rest = rest.strip()
            name, _, value = flag.partition("=")
            if name == "--chmod" and re.fullmatch(r"[0-7]{3,4}", value):
                mode = int(value, 8)
            elif name == "--chown" and value in ("root", "0", "root:root", "0:0"):
                pass
            else:
                raise self.refuse(f"COPY {flag} is not supported")
        if rest.startswith("["):
            try:
                words = [str(word) for word in json.loads(rest)]
            except ValueError:
                raise self.refuse("the JSON form of COPY cannot be read") from None
        elif "'" in rest or '"' in rest:
            raise self.refuse("quotes in COPY are not supported")
        else:
            words = rest.split()
        words = [self.expand(word) for word in words]
        if len(words) < 2:
            raise self.refuse("COPY needs a source and a destination")
        *sources, target = words
        if len(sources) > 1 and not target.endswith("/"):
            raise self.refuse("COPY of several sources needs a destination that ends in '/'")
        if (self.context / ".dockerignore").exists() or self.path.with_name(self.path.name + ".dockerignore").exists():
            raise self.refuse("COPY together with a .dockerignore is not supported")
        slash = "/" if target.endswith(("/", "/.")) or target == "." else ""
        absolute = normpath(join(self.plan.workdir, target))
        for source in sources:
            self.plan.steps.append(Copy(self.source(source), absolute.rstrip("/") + (slash or ""), mode, self.line))

    def source(self, word: str) -> Path:
        if any(character in word for character in "*?["):
            raise self.refuse(f"the pattern {word!r} is not supported")
        inside = normpath("/" + word).lstrip("/")
        path = self.context / inside
        real, root = path.resolve(), self.context.resolve()
        if real != root and root not in real.parents:
            raise self.refuse(f"COPY source {word!r} is a link that leaves the build context")
        if not real.exists():
            raise self.refuse(f"COPY source {word!r} does not exist")
        if not real.is_dir() and not real.is_file():
            raise self.refuse(f"COPY source {word!r} is neither a file nor a directory")
        # Docker names the copy after the source as written, not after what a link leads to.
        return path
