"""The copy plan in plain Python: the executable specification of `rust/core/src/dockerfile/plan.rs`.

A stage's file system is a dictionary from absolute path to node. A path that isn't in it is missing, or unknown if the
nearest directory above it is `partial`: it may hold more than is known.
"""

from __future__ import annotations

import copy
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.dockerfile_run import Effects, run_effects
from reference.dockerfile_text import (
    Instruction,
    Lexer,
    Patterns,
    Refused,
    Unclear,
    Unset,
    chomp,
    clean,
    expand,
    has_wildcard,
    heredoc_word,
    ignore_lines,
    match_path,
    parse,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PLATFORM_ARGS = [
    f"{side}{name}" for side in ("BUILD", "TARGET") for name in ("PLATFORM", "OS", "OSVERSION", "ARCH", "VARIANT")
]
PLATFORM_ARGS.append("TARGETSTAGE")
KNOWN_FLAGS = {
    "ADD": {
        "chown": str,
        "chmod": str,
        "link": bool,
        "keep-git-dir": bool,
        "checksum": str,
        "unpack": bool,
        "exclude": list,
    },
    "COPY": {"chown": str, "from": str, "chmod": str, "link": bool, "exclude": list, "parents": bool},
    "RUN": {"mount": list, "network": str, "security": str, "device": list},
    "FROM": {"platform": str},
    "HEALTHCHECK": {"interval": str, "timeout": str, "start-period": str, "start-interval": str, "retries": str},
}
KEYWORDS = {
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
}


@dataclass
class Node:
    kind: str
    mode: int | None
    owner: str | None = "0:0"
    source: str | None = None
    content: bytes | None = None
    link: str | None = None
    partial: bool = False


@dataclass
class Command:
    keyword: str
    line: int
    args: list[str]
    flags: dict[str, Any] = field(default_factory=dict)
    instruction: Instruction | None = None


@dataclass
class Stage:
    base: str
    name: str
    platform: str
    line: int
    commands: list[Command] = field(default_factory=list)


# What each instruction demands.


def check_flags(instruction: Instruction) -> dict[str, Any]:
    known = KNOWN_FLAGS.get(instruction.keyword, {})
    if instruction.keyword == "HEALTHCHECK" and instruction.args[0].upper() == "NONE":
        return {}
    if instruction.keyword == "STOPSIGNAL":
        return {}
    flags: dict[str, Any] = {}
    for word in instruction.flags:
        name, equals, value = word.partition("=")
        name = name.removeprefix("--")
        if name not in known:
            raise Refused("unknown-flag", instruction.line)
        kind = known[name]
        if name in flags and kind is not list:
            raise Refused("repeated-flag", instruction.line)
        if kind is bool:
            if value.lower() not in ("true", "false") and (equals or value):
                raise Refused("flag-value", instruction.line)
            flags[name] = value.lower() != "false"
        elif not equals:
            raise Refused("flag-value", instruction.line)
        elif kind is list:
            flags.setdefault(name, []).append(value)
        else:
            flags[name] = value
    return flags


def command(instruction: Instruction) -> Command:
    keyword, args, line = instruction.keyword, instruction.args, instruction.line

    def demand(condition: bool, code: str = "arguments") -> None:
        if not condition:
            raise Refused(code, line)

    if keyword not in KEYWORDS:
        raise Refused("unknown-instruction", line)
    if keyword in ("ADD", "COPY"):
        demand(len(args) >= 2, "copy-arguments")
    if keyword in ("WORKDIR", "USER", "MAINTAINER", "STOPSIGNAL"):
        demand(len(args) == 1)
    if keyword in ("ARG", "EXPOSE", "VOLUME", "HEALTHCHECK", "ONBUILD"):
        demand(len(args) >= 1)
    if keyword == "HEALTHCHECK":
        demand(args[0].upper() in ("NONE", "CMD"))
        demand(args[0].upper() == "CMD" or len(args) == 1)
    flags = check_flags(instruction) if keyword != "ARG" else {}
    if keyword in ("ENV", "LABEL", "SHELL"):
        demand(len(args) >= 1)
    if keyword in ("ENV", "LABEL"):
        demand(all(args[::3]), "blank-name")
    if keyword == "HEALTHCHECK":
        demand(args[0].upper() == "NONE" or len(args) > 1)
    if keyword == "ARG":
        demand(not any(arg.startswith("=") for arg in args), "blank-name")
    if keyword == "VOLUME":
        demand(all(arg.strip() for arg in args))
    if keyword == "SHELL":
        demand(instruction.json, "shell-form")
    if keyword == "ONBUILD":
        demand(args[0] not in ("ONBUILD", "FROM", "MAINTAINER"), "onbuild-trigger")
    if keyword in ("ADD", "COPY"):
        try:
            destination_is_heredoc = heredoc_word(args[-1]) is not None
        except (Refused, Unclear):
            destination_is_heredoc = False
        demand(not destination_is_heredoc, "heredoc-destination")
    return Command(keyword, line, args, flags, instruction)


def stages_of(instructions: list[Instruction]) -> tuple[list[Stage], list[Command]]:
    stages: list[Stage] = []
    global_args: list[Command] = []
    for instruction in instructions:
        args, line = instruction.args, instruction.line
        if instruction.keyword == "FROM":
            if len(args) != 1 and not (len(args) == 3 and args[1].lower() == "as"):
                raise Refused("from-arguments", line)
            name = args[2].lower() if len(args) == 3 else ""
            if name and not re.fullmatch(r"[a-z][a-z0-9_.-]*", name):
                raise Refused("stage-name", line)
            stages.append(Stage(args[0], name, check_flags(instruction).get("platform", ""), line))
            continue
        found = command(instruction)
        if stages:
            stages[-1].commands.append(found)
        elif found.keyword == "ARG":
            global_args.append(found)
        else:
            raise Refused("before-from", line)
    if not stages:
        raise Refused("no-from", instructions[-1].line)
    return stages, global_args


# File systems.


class Context:
    """The build context through its .dockerignore; the whole of it is read at once."""

    def __init__(self, root: Path, patterns: Patterns) -> None:
        self.nodes: dict[str, Node] = {"/": Node("directory", 0o755)}
        self._read(root, "", patterns, None)

    def _read(self, root: Path, inside: str, patterns: Patterns, parent: list[bool] | None) -> bool:
        """Whether anything in the directory is visible."""
        visible = False
        for name in sorted(os.listdir(root / inside)):
            path = os.path.join(inside, name)
            status = (root / path).lstat()
            mode = stat.S_IMODE(status.st_mode)
            ignored, matches = patterns.below(path, parent)
            if stat.S_ISDIR(status.st_mode):
                node = Node("directory", mode, source=path)
                below = self._read(root, path, patterns, matches) if not ignored or patterns.exceptions else False
                ignored = ignored and not below
            elif stat.S_ISLNK(status.st_mode):
                node = Node("symlink", mode, link=os.readlink(root / path))
            elif stat.S_ISREG(status.st_mode):
                node = Node("file", mode, source=path)
            else:
                node = Node("special", mode)
            if not ignored:
                self.nodes["/" + path] = node
                visible = True
        return visible


def lookup(nodes: dict[str, Node], path: str) -> Node | str:
    """A node, or `missing`, `not a directory`, `unknown`."""
    path = clean("/" + path)
    above = "/"
    for part in path.strip("/").split("/") if path != "/" else []:
        if nodes[above].kind != "directory":
            return "not a directory"
        here = above.rstrip("/") + "/" + part
        if here not in nodes:
            return "unknown" if nodes[above].partial else "missing"
        above = here
    return nodes[above]


def resolve(nodes: dict[str, Node], path: str) -> str:
    """The path without links, inside the root."""
    waiting = [part for part in path.split("/") if part not in ("", ".")]
    done: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        node = lookup(nodes, "/".join([*done, part]))
        if isinstance(node, Node) and node.kind == "symlink":
            links += 1
            if links > 255:
                raise Unclear("links")
            assert node.link is not None
            done = [] if node.link.startswith("/") else done
            waiting = [part for part in node.link.split("/") if part not in ("", ".")] + waiting
        else:
            done.append(part)
    return "/" + "/".join(done)


def children(nodes: dict[str, Node], path: str) -> list[str]:
    prefix = path.rstrip("/") + "/"
    return sorted(
        other[len(prefix) :]
        for other in nodes
        if other.startswith(prefix) and other != "/" and "/" not in other[len(prefix) :]
    )


def join(*parts: str) -> str:
    return clean("/".join(parts))


def base_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1] or "/"


@dataclass
class State:
    env: dict[str, str | None]
    env_open: bool
    workdir: str | None
    user: str | None
    nodes: dict[str, Node]
    image: str | None
    exported: list[str] = field(default_factory=list)
    shell: list[str] | None = None
    traceable: bool = True
    onbuild: list[Instruction] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    workdirs: list[dict[str, Any]] = field(default_factory=list)

    def get(self, name: str) -> str | type[Unset] | None:
        if name in self.env:
            return self.env[name]
        return None if self.env_open else Unset


class Planner:
    def __init__(self, context: Path, target: str | None, build_args: dict[str, str]) -> None:
        self.root, self.target, self.build_args = context, target, build_args
        self.errors: list[tuple[str, int]] = []
        self.unknowns: list[int] = []
        self.globals: dict[str, str | None] = {}
        self.sent: list[str] = []
        self.sent_unknown = False
        self.fruitless: list[tuple[int, str]] = []
        self.context: Context | None = None
        self.result: dict[str, Any] = {
            "entries": [],
            "workdirs": [],
            "base": None,
            "stage": "",
            "workdir": None,
            "user": None,
            "env": {},
        }

    def plan(self, source: bytes, ignore: bytes | None) -> dict[str, Any]:
        try:
            self.run(source, ignore)
        except Refused as refused:
            self.errors.append((refused.code, refused.line))
        return {**self.result, "errors": self.errors, "unknowns": self.unknowns}

    def run(self, source: bytes, ignore: bytes | None) -> None:
        instructions, self.escape, syntax = parse(source)
        if syntax is not None and "docker/dockerfile" not in syntax:
            self.unknowns.append(1)
        stages, global_args = stages_of(instructions)
        if len(stages) > 256:
            self.unknowns.append(stages[256].line)
            return
        for found in global_args:
            for arg in found.args:
                name, equals, default = arg.partition("=")
                if name in self.build_args:
                    self.globals[name] = self.build_args[name]
                elif equals:
                    self.globals[name] = self.maybe(default, found.line, self.global_value)
        bases, names = self.bases(stages)
        if self.target is None:
            target = len(stages) - 1
        elif self.target.lower() in names:
            target = names[self.target.lower()]
        else:
            raise Refused("target-missing", 0)
        needed = self.needed(stages, bases, names, target)
        try:
            self.context = Context(self.root, Patterns(ignore_lines(ignore or b"")))
        except Refused as refused:
            self.errors.append((refused.code, refused.line))
        except Unclear:
            self.unknowns.append(0)
        states: dict[int, State] = {}
        for index in needed:
            states[index] = self.stage(index, stages, bases, names, states)
        self.check_fruitless()
        self.finish(stages[target], states[target])

    def global_value(self, name: str) -> str | type[Unset] | None:
        if name in self.globals:
            return self.globals[name]
        if name in PLATFORM_ARGS:
            return self.build_args.get(name)
        return Unset

    def expand(self, word: str, line: int, get: Any) -> str:
        try:
            return expand(word, self.escape, get)
        except Refused as refused:
            raise Refused(refused.code, line) from None

    def maybe(self, word: str, line: int, get: Any) -> str | None:
        try:
            return self.expand(word, line, get)
        except Unclear:
            return None

    # Stages. A source is a stage's index, an image's name, or None if unknown.

    def bases(self, stages: list[Stage]) -> tuple[list[int | str | None], dict[str, int]]:
        bases: list[int | str | None] = []
        names: dict[str, int] = {}
        for index, stage in enumerate(stages):
            base = self.maybe(stage.base, stage.line, self.global_value)
            if base == "":
                raise Refused("from-blank", stage.line)
            bases.append(base if base is None else names.get(base, base))
            if stage.platform and self.maybe(stage.platform, stage.line, self.global_value) == "":
                raise Refused("platform-blank", stage.line)
            if stage.name:
                names[stage.name] = index
        return bases, names

    def source(self, name: str, line: int, stages: list[Stage], names: dict[str, int]) -> int | str | None:
        if self.maybe(name, line, lambda _: Unset) != name:
            raise Refused("from-variable", line)
        if re.fullmatch(r"[+-]?[0-9]+", name):
            if 0 <= int(name) < len(stages):
                return int(name)
            if int(name) >= len(stages) and self.has_images(stages, names):
                return None
            raise Refused("from-index", line)
        return names.get(name.lower(), name)

    def has_images(self, stages: list[Stage], names: dict[str, int]) -> bool:
        for found in (found for stage in stages for found in stage.commands):
            name = found.flags.get("from", "")
            if (
                found.keyword == "COPY"
                and name
                and not re.fullmatch(r"[+-]?[0-9]+", name)
                and name.lower() not in names
            ):
                return True
            if found.keyword == "ONBUILD" or (found.keyword == "RUN" and mounts_from(found)):
                return True
        return False

    def needed(self, stages: list[Stage], bases: list[Any], names: dict[str, int], target: int) -> list[int]:
        needs: list[list[tuple[int, int]]] = []
        for stage, base in zip(stages, bases, strict=True):
            need = [(base, stage.line)] if isinstance(base, int) else []
            for found in stage.commands:
                if found.keyword == "COPY" and found.flags.get("from"):
                    source = self.source(found.flags["from"], found.line, stages, names)
                    need += [(source, found.line)] if isinstance(source, int) else []
                if found.keyword == "RUN":
                    for name in mounts_from(found):
                        index = int(name) if re.fullmatch("[0-9]+", name) else names.get(name.lower(), len(stages))
                        need += [(index, found.line)] if index < len(stages) else []
            needs.append(need)
        done: set[int] = set()

        def visit(index: int, path: tuple[int, ...]) -> None:
            if index in done:
                return
            for need, line in needs[index]:
                if need == index or need in path:
                    raise Refused("stage-cycle", line)
                visit(need, (*path, index))
            done.add(index)

        for index in range(len(stages)):
            visit(index, ())
        reachable: set[int] = set()
        waiting = [target]
        while waiting:
            index = waiting.pop()
            if index not in reachable:
                reachable.add(index)
                waiting += [need for need, _ in needs[index]]
        return sorted(reachable)

    def stage(
        self, index: int, stages: list[Stage], bases: list[Any], names: dict[str, int], states: dict[int, State]
    ) -> State:
        stage, base = stages[index], bases[index]
        commands: list[Command] = []
        if isinstance(base, int):
            state = copy.deepcopy(states[base])
            for trigger in state.onbuild:
                try:
                    commands.append(self.trigger(trigger, stage.line))
                except Refused as refused:
                    self.errors.append((refused.code, stage.line))
            state.onbuild = []
        else:
            scratch = base == "scratch"
            root = Node("directory", 0o755, partial=not scratch)
            env = {"PATH": DEFAULT_PATH if scratch else None}
            state = State(env, not scratch, "/" if scratch else None, "" if scratch else None, {"/": root}, base)
            if base is None:
                self.unknowns.append(stage.line)
        for found in commands + stage.commands:
            try:
                self.command(found, state, index, stages, names, states)
            except Refused as refused:
                self.errors.append((refused.code, refused.line))
            except Unclear:
                self.unknowns.append(found.line)
                if found.keyword in ("COPY", "ADD"):
                    state.traceable = False
        return state

    def trigger(self, instruction: Instruction, line: int) -> Command:
        text = re.sub(r"(?i)\A\s*ONBUILD\s*", "", instruction.original).encode()
        for heredoc in instruction.heredocs:
            text += b"\n" + heredoc.content + heredoc.name.encode()
        parsed = parse(text)[0]
        if len(parsed) != 1:
            raise Refused("onbuild-trigger", line)
        found = command(parsed[0])
        found.line = line
        return found

    def command(
        self,
        found: Command,
        state: State,
        index: int,
        stages: list[Stage],
        names: dict[str, int],
        states: dict[int, State],
    ) -> None:
        line, args = found.line, found.args
        if found.keyword == "ENV":
            pairs = []
            for name, value in zip(args[::3], args[1::3], strict=True):
                name = self.expand(name, line, state.get)
                pairs.append((name, self.maybe(value, line, state.get)))
            for name, value in pairs:
                state.env[name] = value
                state.exported += [] if name in state.exported else [name]
        elif found.keyword == "ARG":
            for arg in args:
                name, equals, default = arg.partition("=")
                if name in self.build_args:
                    state.env[name] = self.build_args[name]
                elif equals:
                    state.env[name] = self.maybe(default, line, state.get)
                elif self.global_value(name) is not Unset:
                    state.env[name] = self.global_value(name)  # type: ignore[assignment]
        elif found.keyword == "WORKDIR":
            try:
                path = self.expand(args[0], line, state.get)
            except Unclear:
                state.workdir = None
                raise
            full = absolute(state.workdir, path)
            if full is None:
                return
            check_length(full, line)
            state.workdir = clean(full)
            owner = None if state.user is None else numeric_owner(state.user or "0")
            made = entry("directory", state.workdir, line, mode=0o755, owner=owner, if_missing=True)
            state.workdirs.append(made)
            self.make_directories(state.nodes, resolve(state.nodes, full), 0o755, owner, line, None)
        elif found.keyword == "USER":
            state.user, user = None, state.user
            try:
                state.user = self.expand(args[0], line, state.get)
            except Refused:
                state.user = user
                raise
        elif found.keyword in ("LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL"):
            words = [word for at, word in enumerate(args) if found.keyword != "LABEL" or at % 3 < 2]
            for word in words:
                self.maybe(word, line, state.get)
        elif found.keyword == "SHELL":
            state.shell = args
        elif found.keyword == "ONBUILD":
            assert found.instruction
            state.onbuild.append(found.instruction)
        elif found.keyword == "RUN":
            assert found.instruction
            effects = run_effects(found.instruction, line, state.workdir, state.shell, state.get)
            gone: list[str] = []
            for path in sorted(state.nodes):
                under = any(path.startswith(other + "/") for other in gone)
                if path != "/" and (under or effects.touches(path)):
                    gone.append(path)
                elif state.nodes[path].kind == "directory":
                    state.nodes[path].partial = True
            for path in gone:
                del state.nodes[path]
            state.traceable = False
            state.events.append(effects)
        elif found.keyword in ("COPY", "ADD"):
            self.copy(found, state, index, stages, names, states)

    # Copies.

    def make_directories(
        self,
        nodes: dict[str, Node],
        path: str,
        mode: int | None,
        owner: str | None,
        line: int,
        events: list[Any] | None,
    ) -> None:
        current = ""
        for part in [part for part in path.split("/") if part]:
            current += "/" + part
            found = lookup(nodes, current)
            if isinstance(found, Node) and found.kind == "directory":
                continue
            if isinstance(found, Node) or found == "not a directory":
                raise Refused("not-a-directory", line)
            nodes[current] = Node("directory", mode, owner, partial=found == "unknown")
            if events is not None:
                events.append(entry("directory", current, line, mode=mode, owner=owner, if_missing=True))

    def copy(
        self,
        found: Command,
        state: State,
        index: int,
        stages: list[Stage],
        names: dict[str, int],
        states: dict[int, State],
    ) -> None:
        line, flags = found.line, found.flags
        assert found.instruction
        sources, contents = [], []
        for word in found.args[:-1]:
            try:
                heredoc = heredoc_word(word)
            except (Refused, Unclear):
                heredoc = None
            if heredoc is None:
                sources.append(word)
                continue
            bodies = [other.content for other in found.instruction.heredocs if other.name == heredoc.name]
            body = bodies[-1] if bodies else b""
            contents.append((heredoc.name, chomp(body) if heredoc.chomp else body, heredoc.expand))

        chown = self.maybe(flags.get("chown", ""), line, state.get)
        chmod = self.maybe(flags.get("chmod", ""), line, state.get)
        checksum = self.maybe(flags.get("checksum", ""), line, state.get)
        paths = [self.maybe(source, line, state.get) for source in sources]
        destination = self.maybe(found.args[-1], line, state.get)
        datas: list[tuple[str, bytes | None]] = []
        for name, body, is_expanded in contents:
            data: bytes | None = body
            if is_expanded:
                try:
                    data = expand(body.decode(errors="replace"), "\\", state.get, heredoc=True).encode()
                except Unclear:
                    data = None
                except Refused as refused:
                    raise Refused(refused.code, line) from None
            datas.append((name, data))
        job = Job(found, line, flags, owner="0:0")
        if chown is None:
            job.owner, job.owner_given = None, True
            self.unknowns.append(line)
        elif chown:
            job.owner, job.owner_given = numeric_owner(chown) or chown, True
        if chmod is None:
            job.mode = "unknown"
            self.unknowns.append(line)
        elif chmod:
            job.mode = parse_mode(chmod, line)
        if checksum and (len(sources) != 1 or (paths[0] is not None and not is_remote(paths[0]))):
            raise Refused("checksum", line)
        full = None if destination is None else absolute(state.workdir, destination)
        # Where it leads may be unknown; a source that is missing fails the build all the same.
        if unclear := full is None:
            full = f"/{destination or ''}"
        job.destination = clean(full) + ("/" if full.endswith(("/", "/.")) and clean(full) != "/" else "")
        check_length(job.destination, line)
        try:
            job.excludes = Patterns(flags.get("exclude", []))
        except Refused:
            raise Refused("exclude-pattern", line) from None

        files: dict[str, Node] | None = self.context.nodes if self.context else None
        if name := flags.get("from"):
            origin = self.source(name, line, stages, names)
            if isinstance(origin, int) and origin >= index:
                raise Refused("from-later", line)
            files = None
            if origin == "scratch":
                files = {"/": Node("directory", 0o755)}
            elif isinstance(origin, int) and origin in states and states[origin].traceable:
                files = states[origin].nodes
        job.from_context = not flags.get("from")
        linked = flags.get("link") and not flags.get("chmod")
        nodes = {"/": Node("directory", 0o755)} if linked else state.nodes
        events: list[Any] = []
        if unclear:
            unknowns = list(self.unknowns)
            nodes = {"/": Node("directory", 0o755, partial=not linked)}
            try:
                self.copy_all(job, paths, datas, copy.deepcopy(files), nodes, events, state)
            finally:
                self.unknowns = unknowns
            raise Unclear("destination")
        try:
            self.copy_all(job, paths, datas, copy.deepcopy(files), nodes, events, state)
        finally:
            if linked:
                for event in events:
                    if isinstance(event, dict):
                        event["if_missing"] = False
                lay_over(state.nodes, nodes)
            state.events += events

    def copy_all(
        self,
        job: Job,
        paths: list[str | None],
        datas: list[tuple[str, bytes | None]],
        files: dict[str, Node] | None,
        nodes: dict[str, Node],
        events: list[Any],
        state: State,
    ) -> None:
        line = job.line
        for source in paths:
            try:
                if source is None or files is None or is_remote(source):
                    if source is not None and is_remote(source) and job.command.keyword == "COPY":
                        raise Refused("copy-remote", line)
                    raise Unclear("source")
                self.copy_source(job, source, files, nodes, events, state)
            except Unclear:
                self.unknowns.append(line)
                self.sent_unknown = True
                state.traceable = False
                events.append(Effects(line, below={clean(job.destination): "copy"}))
                mark_partial(nodes, clean(job.destination))
        for name, data in datas:
            if data is None:
                self.unknowns.append(line)
                continue
            if clean("/" + name).count("/") != 1 or clean("/" + name) == "/" or name.endswith("/"):
                raise Refused("heredoc-name", line)
            job.matches += 1
            self.copy_file(job, name, Node("file", 0o644, content=data), nodes, events)
        if job.matches > 1 and job.as_file and not job.destination.endswith("/"):
            self.unknowns.append(line)

    def copy_source(
        self, job: Job, source: str, files: dict[str, Node], nodes: dict[str, Node], events: list[Any], state: State
    ) -> None:
        line = job.line
        if job.flags.get("parents"):
            self.copy_with_parents(job, source, files, nodes, events)
            return
        source = clean("/" + source)
        check_length(source, line)
        if not has_wildcard(source):
            if job.from_context:
                self.sent += [source, resolve(files, source)]
            matches = [source]
        else:
            matches = self.glob(source, files, line)
            if job.from_context:
                self.sent += matches
                self.fruitless += [] if matches else [(line, source)]
        for match in matches:
            job.matches += 1
            resolved = resolve(files, match)
            node = info(files, resolved)
            if node is None:
                raise Refused("source-missing", line)
            if node.kind == "directory":
                self.copy_directory(job, resolved, files, nodes, events, None)
                continue
            unpack = job.flags.get("unpack", job.command.keyword == "ADD")
            if unpack and node.kind == "file" and node.source is not None and job.from_context:
                head = (self.root / node.source).read_bytes()[:512]
                if head.startswith((b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")):
                    raise Unclear("compressed")
                if is_tar(head):
                    target = resolve(nodes, job.destination)
                    self.make_directories(nodes, target, 0o755, job.owner, line, events)
                    state.traceable = False
                    mark_partial(nodes, target)
                    events.append(Effects(line, below={target: "archive"}))
                    owner = job.owner if job.owner_given else None
                    events.append(entry("archive", target, line, source=node.source, owner=owner))
                    continue
            self.copy_file(job, base_name(match), copy.copy(node), nodes, events)

    def glob(self, source: str, files: dict[str, Node], line: int) -> list[str]:
        if match_path(source, "") is None:
            raise Refused("source-pattern", line)
        parts = [part for part in source.split("/") if part]
        split = next(at for at, part in enumerate(parts) if has_wildcard(part))
        start = resolve(files, "/".join(parts[:split]))
        pattern = "/".join(parts[split:])
        node = info(files, start)
        if node is None:
            raise Refused("source-missing", line)
        found: list[str] = []

        def walk(path: str, relative: str) -> None:
            if relative and match_path(pattern, relative):
                found.append(path)
                return
            if relative.count("/") + bool(relative) >= len(parts) - split + pattern.count("["):
                return
            node = info(files, path)
            if node and node.kind == "directory":
                for name in children(files, path):
                    walk(join(path, name), f"{relative}/{name}" if relative else name)

        if node.kind == "directory":
            walk(start, "")
        return found

    def check_fruitless(self) -> None:
        for line, source in self.fruitless:
            parts = []
            for part in source.split("/")[1:]:
                if has_wildcard(part):
                    break
                parts.append(part)
            directory = "/" + "/".join(parts)
            if not parts or any(
                sent in ("/", directory) or sent.startswith(directory + "/") or directory.startswith(sent + "/")
                for sent in self.sent
            ):
                continue
            if self.sent_unknown:
                self.unknowns.append(line)
            else:
                self.errors.append(("source-missing", line))

    def prepare(self, job: Job, nodes: dict[str, Node], events: list[Any]) -> str:
        above = job.destination if job.destination.endswith("/") else job.destination.rsplit("/", 1)[0] + "/"
        self.make_directories(nodes, resolve(nodes, above), job.created_mode(), job.owner, job.line, events)
        return resolve(nodes, job.destination)

    def copy_file(self, job: Job, name: str, node: Node, nodes: dict[str, Node], events: list[Any]) -> None:
        target = self.prepare(job, nodes, events)
        found = lookup(nodes, target)
        if_directory = None
        if isinstance(found, Node) and found.kind == "directory":
            target = join(target, base_name(name))
        elif found == "not a directory":
            raise Refused("not-a-directory", job.line)
        else:
            job.as_file = True
            if found == "unknown":
                if_directory = join(target, base_name(name))
        check_length(target, job.line)
        self.make_directories(nodes, target.rsplit("/", 1)[0], job.created_mode(), job.owner, job.line, events)
        found = lookup(nodes, target)
        if isinstance(found, Node) and found.kind == "directory":
            raise Refused("file-over-directory", job.line)
        job.apply(node)
        events.append(entry_of(node, target, job.line, if_directory))
        if if_directory is None:
            put(nodes, target, node)

    def copy_directory(
        self,
        job: Job,
        source: str,
        files: dict[str, Node],
        nodes: dict[str, Node],
        events: list[Any],
        includes: Patterns | None,
    ) -> None:
        target = self.prepare(job, nodes, events)
        self.make_directories(nodes, target, job.created_mode(), job.owner, job.line, events)
        waiting: list[list[Any]] = []  # directories that are made once something below them is included

        def walk(
            source: str, target: str, relative: str, include: list[bool] | None, exclude: list[bool] | None
        ) -> None:
            info(files, source)
            for name in children(files, source):
                path, to, inside = join(source, name), join(target, name), f"{relative}/{name}" if relative else name
                included, include_below = includes.below(inside, include) if includes else (True, None)
                excluded, exclude_below = job.excludes.below(inside, exclude)
                included = included and not excluded
                node = info(files, path)
                if node is None or (not included and node.kind != "directory"):
                    continue
                check_length(to, job.line)
                if included:
                    for frame in waiting:
                        if not frame[2]:
                            frame[2] = True
                            self.put_parent(job, copy.copy(files[frame[0]]), frame[1], nodes, events)
                if node.kind == "directory":
                    if included:
                        self.put_directory(job, copy.copy(node), to, nodes, events)
                    if excluded and not job.excludes.exceptions:
                        continue
                    waiting.append([path, to, included])
                    walk(path, to, inside, include_below, exclude_below)
                    waiting.pop()
                    continue
                found = lookup(nodes, to)
                if isinstance(found, Node) and found.kind == "directory":
                    raise Refused("file-over-directory", job.line)
                if includes and node.kind == "symlink" and info(files, resolve(files, path)) is None:
                    raise Unclear("dangling link")
                node = copy.copy(node)
                job.apply(node)
                events.append(entry_of(node, to, job.line))
                put(nodes, to, node)

        walk(source, target, "", None, None)

    def put_parent(self, job: Job, node: Node, target: str, nodes: dict[str, Node], events: list[Any]) -> None:
        """A directory that is only made because something below it is included."""
        found = lookup(nodes, target)
        if isinstance(found, Node) and found.kind == "directory":
            found.mode = node.mode
            node.owner = found.owner
            events.append(entry_of(node, target, job.line))
        else:
            self.put_directory(job, node, target, nodes, events)
            events[-1]["if_missing"] = found == "unknown"

    def put_directory(self, job: Job, node: Node, target: str, nodes: dict[str, Node], events: list[Any]) -> None:
        job.apply(node)
        found = lookup(nodes, target)
        if isinstance(found, Node) and found.kind == "directory":
            found.mode, found.owner = node.mode, node.owner
        elif isinstance(found, Node) or found == "not a directory":
            raise Refused("directory-over-file", job.line)
        else:
            node.partial = found == "unknown"
            nodes[target] = node
        events.append(entry_of(node, target, job.line))

    def copy_with_parents(
        self, job: Job, source: str, files: dict[str, Node], nodes: dict[str, Node], events: list[Any]
    ) -> None:
        self.sent_unknown = True
        pivot, found, pattern = source.partition("/./")
        if not found:
            pivot, pattern = "/", source
        pattern, pivot = clean("/" + pattern), clean("/" + pivot)
        if not has_wildcard(pivot) and not has_wildcard(pattern):
            full = join(resolve(files, pivot), pattern)
            node = None if pattern == "/" else info(files, full)
            if node is None or (node.kind == "symlink" and info(files, resolve(files, full)) is None):
                raise Refused("source-missing", job.line)
            if job.excludes.matches(pattern[1:]):
                if job.excludes.exceptions:
                    raise Unclear("exclude")
                raise Refused("source-missing", job.line)
        starts = self.glob(pivot, files, job.line) if has_wildcard(pivot) else [pivot]
        try:
            includes = Patterns([pattern[1:]])
        except Refused:
            raise Refused("parents-pattern", job.line) from None
        for start in starts:
            resolved = resolve(files, start)
            node = info(files, resolved)
            if node is None:
                raise Refused("source-missing", job.line)
            if node.kind == "directory":
                self.copy_directory(job, resolved, files, nodes, events, includes)
            else:
                self.copy_file(job, base_name(start), copy.copy(node), nodes, events)

    def finish(self, stage: Stage, state: State) -> None:
        entries: list[dict[str, Any]] = []
        for event in state.events:
            if isinstance(event, Effects):
                for found in entries:
                    paths = [found["destination"], found["if_directory"]]
                    if found["touched"] is None and any(event.touches(path) for path in paths if path):
                        found["touched"] = event.line
            else:
                entries.append(dict(event))
        env = {name: state.env[name] for name in state.exported}
        self.result = {
            "entries": entries,
            "workdirs": state.workdirs,
            "base": state.image,
            "stage": stage.name,
            "workdir": state.workdir,
            "user": state.user,
            "env": env,
        }


@dataclass
class Job:
    command: Command
    line: int
    flags: dict[str, Any]
    owner: str | None
    owner_given: bool = False
    mode: Any = None
    destination: str = ""
    excludes: Patterns = field(default_factory=lambda: Patterns([]))
    from_context: bool = True
    matches: int = 0  # files and directories that its sources name or match
    as_file: bool = False  # one of them was put at the destination itself, not known to be a directory

    def created_mode(self) -> int | None:
        if isinstance(self.mode, int):
            return self.mode & 0o777
        return None if self.mode == "unknown" else 0o755

    def apply(self, node: Node) -> None:
        if self.owner_given:
            node.owner = self.owner
        if node.kind != "symlink":
            node.mode = change_mode(self.mode, node.mode, node.kind == "directory")


def parse_mode(text: str, line: int) -> int | list[tuple[int, str, str]]:
    if re.fullmatch("[0-7]+", text) and int(text, 8) <= 0o7777:
        return int(text, 8)
    clauses = []
    for clause in text.split(","):
        if not re.fullmatch(r"[augo]*([-+=][rwxXstugo]*)+", clause):
            raise Refused("chmod", line)
        who = 0
        while clause[0] in "augo":
            who |= {"a": 0o6777, "u": 0o4700, "g": 0o2070, "o": 0o007}[clause[0]]
            clause = clause[1:]
        clauses += [(who or 0o6777, part[0], part[1:]) for part in re.findall("[-+=][^-+=]*", clause)]
    return clauses


def change_mode(change: Any, mode: int | None, is_directory: bool) -> int | None:
    if change is None or mode is None:
        return mode if change is None or not isinstance(change, int) else change
    if isinstance(change, int):
        return change
    if change == "unknown":
        return None
    original = mode
    for who, operator, letters in change:
        bits = 0
        for letter in letters:
            if letter in "rwx":
                bits |= {"r": 0o444, "w": 0o222, "x": 0o111}[letter]
            elif letter == "X":
                bits |= 0o111 if operator == "-" or is_directory or original & 0o111 else 0
            elif letter in "ugo" and len(letters) == 1:
                bits |= (mode >> {"u": 6, "g": 3, "o": 0}[letter] & 7) * 0o111
            else:
                return None
        if operator == "+":
            mode |= bits & who
        elif operator == "-":
            mode &= ~(bits & who)
        else:
            mode = mode & ~(who & 0o777 if letters in ("u", "g", "o") else who) | bits & who
    return mode


def mounts_from(found: Command) -> list[str]:
    fields = [part for mount in found.flags.get("mount", []) for part in mount.split(",")]
    return [part.removeprefix("from=") for part in fields if part.startswith("from=")]


def info(files: dict[str, Node], path: str) -> Node | None:
    found = lookup(files, path)
    if found == "unknown" or (isinstance(found, Node) and found.kind == "directory" and found.partial):
        raise Unclear("base image")
    return found if isinstance(found, Node) else None


def put(nodes: dict[str, Node], path: str, node: Node) -> None:
    for below in [other for other in nodes if other.startswith(path + "/")]:
        del nodes[below]
    nodes[path] = node


def mark_partial(nodes: dict[str, Node], path: str) -> None:
    current = ""
    nodes["/"].partial = True
    for part in [part for part in path.split("/") if part]:
        current += "/" + part
        if current in nodes:
            nodes[current].partial = True


def lay_over(nodes: dict[str, Node], above: dict[str, Node]) -> None:
    fresh: set[str] = set()
    for path in sorted(above):
        if path == "/":
            continue
        parent = path.rsplit("/", 1)[0] or "/"
        node = above[path]
        existing = nodes.get(path)
        if existing and existing.kind == "directory" and node.kind == "directory":
            existing.mode, existing.owner = node.mode, node.owner
            continue
        if existing is None and node.kind == "directory":
            node.partial = (parent in fresh and nodes[parent].partial) or (
                parent not in fresh and nodes[parent].partial
            )
            fresh.add(path)
        put(nodes, path, node)


def absolute(workdir: str | None, path: str) -> str | None:
    if path.startswith("/"):
        return path
    return None if workdir is None else f"{workdir}/{path if path not in ('', '.') else './'}"


def check_length(path: str, line: int) -> None:
    if len(path.encode()) >= 4096 or any(len(part.encode()) > 255 for part in path.split("/")):
        raise Refused("path-too-long", line)
    if "\0" in path:
        raise Refused("path-nul", line)


def numeric_owner(text: str) -> str | None:
    user, colon, group = text.partition(":")
    group = group if colon else user
    both = [int(part) for part in (user, group) if re.fullmatch(r"\+?[0-9]+", part) and int(part) < 2**32]
    return f"{both[0]}:{both[1]}" if len(both) == 2 else None


def is_remote(source: str) -> bool:
    return re.match(r"https?://|git://|ssh://|[a-zA-Z0-9_-]+@[a-zA-Z0-9.-]+:", source) is not None


def is_tar(block: bytes) -> bool:
    if len(block) < 512 or not any(block):
        return False
    text = block[148:156].decode("latin-1").strip(" \0")
    if not re.fullmatch(r"\+?[0-7]+", text):
        return False
    rest = block[:148] + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in rest)
    return int(text, 8) in (sum(rest) + 8 * 32, signed + 8 * 32)


def entry(kind: str, destination: str, line: int, **known: Any) -> dict[str, Any]:
    blank = dict.fromkeys(("source", "content", "link", "mode", "owner", "if_directory", "touched"))
    return {**blank, "destination": destination, "kind": kind, "line": line, "if_missing": False, **known}


def entry_of(node: Node, destination: str, line: int, if_directory: str | None = None) -> dict[str, Any]:
    mode = None if node.kind == "symlink" else node.mode
    return entry(
        node.kind,
        destination,
        line,
        source=node.source,
        content=node.content,
        link=node.link,
        mode=mode,
        owner=node.owner,
        if_directory=if_directory,
    )


def copy_plan(
    dockerfile: Path, context: Path, target: str | None = None, build_args: dict[str, str] | None = None
) -> dict[str, Any]:
    """As the native `copy_plan`; errors as (code, line), unknowns as lines, `touched` as a line."""
    ignore = None
    for path in (dockerfile.with_name(dockerfile.name + ".dockerignore"), context / ".dockerignore"):
        if path.exists():
            ignore = path.read_bytes()
            break
    return Planner(context, target, build_args or {}).plan(dockerfile.read_bytes(), ignore)


__all__ = ["Lexer", "copy_plan"]
