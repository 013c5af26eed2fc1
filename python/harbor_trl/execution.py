"""Running one command in a sandbox: bounded in time and output, whatever the command does.

`run_command` works on every Harbor backend, through its `exec` and a wrapper in POSIX sh (`bounded_exec.sh`). A backend
that can do natively what the wrapper does offers `bounded_exec` (`RunsBounded`), and that is used instead.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import functools
import importlib.resources
import logging
import math
import os
import re
import secrets
import shlex
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from harbor_trl._native import OutputBuffer
from harbor_trl.errors import SandboxFileError, SandboxNotAnsweringError

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment, ExecResult

logger = logging.getLogger(__name__)

#: Characters of output that a tool returns by default: half from the beginning, half from the end.
DEFAULT_OUTPUT_LIMIT = 8_000
#: Bytes that a command may write before it is stopped.
DEFAULT_OUTPUT_CAP = 64 * 1024 * 1024
#: Seconds beyond its deadline that a command may take to be ended and reported.
GRACE_SEC = 30

# Redraws fold to little, so more than the limit is worth sending. Four bytes make any character.
_LEAST_SENT_BYTES = 32 * 1024
# Linux takes no argument and no variable beyond 128 KiB; some of it are names and what stands around the data.
_LONGEST_INLINE_BYTES = 128 * 1024 - 64
_FILE_TIMEOUT_SEC = 60
#: What a container engine says where a command's output should be.
SANDBOX_GONE = re.compile(r"no such container|container \S+ is not running", re.IGNORECASE)
_DIRECTORIES = ("/tmp", "/dev/shm", "/var/tmp")


class CommandResult(NamedTuple):
    """What a command did: the text for the model, and what the text does not say to a program."""

    text: str
    return_code: int
    timed_out: bool = False
    #: The sandbox could not run the command at all: no shell, no processes left, no container.
    broken: bool = False
    #: It had ended before: the command is not why.
    gone: bool = False


class BoundedOutput(NamedTuple):
    """What `bounded_exec` gives: the two ends of the merged output, and how the command ended."""

    head: bytes
    tail: bytes = b""
    #: Bytes and line ends between head and tail.
    dropped_bytes: int = 0
    dropped_lines: int = 0
    return_code: int = 0
    timed_out: bool = False
    #: The command was stopped because it wrote more than the cap.
    over_cap: bool = False
    #: The sandbox had no room for the output, part of it is gone.
    lost: bool = False
    #: The sandbox could not start any more processes, so what commands had left running was killed.
    exhausted: bool = False
    #: A process in the background still writes to the output.
    background: bool = False
    #: Processes that were killed for memory while the command ran.
    oom_kills: int = 0
    #: The working directory was gone, so the command ran in /.
    nowhere: bool = False
    #: What else the backend has to say, a line each.
    notes: tuple[str, ...] = ()
    #: The sandbox could not run the command at all, and this is what it said.
    refusal: str | None = None
    #: File in the sandbox that holds the whole output, if it was kept.
    file: str | None = None


@runtime_checkable
class RunsBounded(Protocol):
    """An environment that bounds a command's time and output itself."""

    async def bounded_exec(
        self,
        command: str,
        *,
        timeout_sec: float,
        head_bytes: int,
        tail_bytes: int,
        cap_bytes: int,
        shown_bytes: int,
        env: Mapping[str, str],
    ) -> BoundedOutput:
        """Run `command` as the default user, stdin empty, `env` below the task's own variables.

        At `timeout_sec`, and when it writes more than `cap_bytes`, all that the command started is killed; when it ends
        by itself, what it left in the background lives on. Output of more than `shown_bytes` (at most `head_bytes`), or
        to which the background still writes, stays in a file in the sandbox. Raises what the backend raises if it does
        not answer.
        """


#: For programs that would otherwise page, colour or ask. A task's own values win.
TERMINAL_ENV = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}


@dataclasses.dataclass
class _Known:
    """What earlier calls found out about a sandbox."""

    carries_env: bool = True
    tools: str | None = None


_known: weakref.WeakKeyDictionary[BaseEnvironment, _Known] = weakref.WeakKeyDictionary()


async def run_command(
    environment: BaseEnvironment,
    command: str,
    *,
    timeout_sec: float = 180,
    output_limit: int = DEFAULT_OUTPUT_LIMIT,
    output_cap: int = DEFAULT_OUTPUT_CAP,
    fold: bool = True,
) -> CommandResult:
    """Run `command` in `environment` as its default user. Any number of calls may run at once.

    Args:
        environment: Harbor's live environment.
        command: Shell command, for bash where the sandbox has it, else for sh. Its stdin is empty.
        timeout_sec: Seconds after which the command and all it started are killed; rounded up to whole seconds.
        output_limit: Characters of output to keep, half from the beginning and half from the end.
        output_cap: Bytes of output after which the command is stopped.
        fold: Fold progress bars and drop escape sequences (see `OutputBuffer`).

    Returns:
        What the command wrote, and in further lines how it ended if that was not with 0. A command that cannot be run,
        and a sandbox that cannot run one, give a text that says so.

    Raises:
        SandboxNotAnsweringError: No answer `GRACE_SEC` after the deadline.
        Exception: Whatever else the backend raises.
    """
    try:
        encoded = command.encode()
    except UnicodeEncodeError as error:
        text = (
            f"[not run: the command holds {command[error.start]!r} at character {error.start}, which is no character]"
        )
        return CommandResult(text, 126)
    if "\0" in command:
        text = f"[not run: the command holds a NUL byte at character {command.index(chr(0))}; write it as \\0 or \\x00]"
        return CommandResult(text, 126)
    sent = max(_LEAST_SENT_BYTES, 2 * output_limit)
    deadline = time.monotonic() + timeout_sec + GRACE_SEC
    try:
        async with asyncio.timeout(timeout_sec + GRACE_SEC + 5):
            if isinstance(environment, RunsBounded):
                output = await environment.bounded_exec(
                    command,
                    timeout_sec=timeout_sec,
                    head_bytes=sent,
                    tail_bytes=sent,
                    cap_bytes=output_cap,
                    shown_bytes=output_limit,
                    env=TERMINAL_ENV,
                )
                return _describe(output, timeout_sec, output_limit, output_cap, fold)
            call = _WrappedCall(environment, encoded, timeout_sec, output_limit, sent, output_cap)
            answer = await call.run()
    except Exception as error:
        # A backend says in words of its own that its client gave up.
        if time.monotonic() < deadline and not isinstance(error, TimeoutError):
            raise
        raise SandboxNotAnsweringError(
            f"The sandbox gave no answer within {_rounded(timeout_sec + GRACE_SEC)} s to a command with a limit of "
            f"{_rounded(timeout_sec)} s: {type(error).__name__}: {error}"
        ) from error
    if isinstance(answer, CommandResult):
        return answer
    return _describe(answer, timeout_sec, output_limit, output_cap, fold)


def _describe(output: BoundedOutput, timeout: float, limit: int, cap: int, fold: bool) -> CommandResult:
    if output.refusal is not None:
        return _refused(output.refusal, output.return_code)
    buffer = OutputBuffer(limit, fold=fold)
    buffer.feed(output.head)
    buffer.skip(output.dropped_bytes, output.dropped_lines)
    buffer.feed(output.tail)
    text = buffer.text(f"the whole output is in {output.file}" if output.file and not output.lost else "")
    code = output.return_code
    notes = ["[the sandbox's working directory does not exist any more: this ran in /]"] if output.nowhere else []
    if output.timed_out:
        notes.append(f"[timed out after {_rounded(timeout)} s: the command and all it started were killed]")
    elif output.over_cap:
        notes.append(
            f"[stopped: the command wrote more than {cap // 1024} KiB, so it was killed; "
            "send long output to a file, or through a filter]"
        )
    else:
        if code and text:
            notes.append(f"(rc={code})")
        if name := _signal_name(code):
            notes.append(f"[killed by {name}]")
    notes += output.notes
    if output.oom_kills:
        notes.append(f"[out of memory: the kernel killed {output.oom_kills} process(es) of this sandbox]")
    if output.lost:
        notes.append("[the sandbox had no room for the output (is its disk full?): part of it is lost]")
    if output.exhausted:
        notes.append(
            "[the sandbox could not start any more processes: all that commands had left running was killed, "
            "this command may not have run to its end]"
        )
    if output.background:
        where = f"; what it writes from now on is in {output.file}" if output.file else ""
        notes.append(f"[a process in the background still holds the output{where}]")
    if not text and not output.timed_out and not output.over_cap:
        notes.insert(0, f"(empty output, rc={code})")
    if notes and text and not text.endswith("\n"):
        text += "\n"
    return CommandResult(text + "\n".join(notes), 124 if output.timed_out else code, output.timed_out)


def _rounded(seconds: float) -> str:
    """What is left of a budget has many digits."""
    return f"{seconds:.1f}".removesuffix(".0") if seconds >= 1 else f"{seconds:.2g}"


def _signal_name(return_code: int) -> str | None:
    try:
        return signal.Signals(return_code - 128).name if return_code > 128 else None
    except ValueError:
        return None


@functools.cache
def _wrapper() -> str:
    source = importlib.resources.files("harbor_trl").joinpath("bounded_exec.sh").read_text(encoding="utf-8")
    lines = (line.strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#"))


class _WrappedCall:
    """One run of `bounded_exec.sh`."""

    def __init__(
        self, environment: BaseEnvironment, command: bytes, timeout: float, shown: int, keep: int, cap: int
    ) -> None:
        self.environment = environment
        self.command = command
        self.known = _known.setdefault(environment, _Known())
        self.seconds = max(1, math.ceil(timeout))
        self.sizes = (shown, keep, max(1, cap // 1024))
        self.keep = keep
        self.id = secrets.token_hex(8)
        self.mark = f"@@harbor-trl-{self.id}@@"

    async def run(self) -> BoundedOutput | CommandResult:
        file = "" if len(self.command) <= _LONGEST_INLINE_BYTES else await self._send()
        result = await self._exec(file)
        output = self._parse(result)
        if output is None and self.known.carries_env and not result.return_code:
            # The shell came back at once and empty-handed: it was not given the wrapper.
            self.known.carries_env = False
            result = await self._exec(file)
            output = self._parse(result)
        if output is None and _lacks_directory(result):
            result = await self._exec(file, cwd="/")
            output = self._parse(result)
            if output is not None:
                output = output._replace(nowhere=True)
        if output is not None:
            return output
        return await self._explain(result)

    async def _send(self) -> str:
        file = f"/tmp/harbor-trl-{self.id}.sh"
        await _upload(self.environment, self.command, file)
        return file

    async def _exec(self, file: str, cwd: str | None = None) -> ExecResult:
        arguments = " ".join(["set --", self.id, str(self.seconds), *map(str, self.sizes), file])
        command = "" if file else self.command.decode()
        client_timeout = self.seconds + GRACE_SEC
        if self.known.carries_env:
            env = {"HARBOR_TRL_WRAPPER": _wrapper(), "HARBOR_TRL_COMMAND": command}
            line = f'{arguments}; eval "$HARBOR_TRL_WRAPPER"'
            return await self.environment.exec(line, cwd=cwd, env=env, timeout_sec=client_timeout)
        line = f"HARBOR_TRL_COMMAND={shlex.quote(command)}; {arguments}\n{_wrapper()}"
        if not file and len(line.encode()) > _LONGEST_INLINE_BYTES:
            return await self._exec(await self._send(), cwd)
        return await self.environment.exec(line, cwd=cwd, timeout_sec=client_timeout)

    def _parse(self, result: ExecResult) -> BoundedOutput | None:
        """None if the wrapper did not come to its end."""
        before, found, report = (result.stdout or "").rpartition(f"{self.mark} rc=")
        _, started, output = before.partition(f"{self.mark} start\n")
        report, found, _ = report.partition(" end\n") if found else ("", "", "")
        if not found or not started:
            return None
        fields = dict(field.partition("=")[::2] for field in f"rc={report}".split())
        head, gap, tail = output.partition(f"{self.mark} gap ")
        dropped_bytes = dropped_lines = 0
        if gap:
            counts, _, tail = tail.partition("\n")
            dropped_bytes, dropped_lines = map(int, re.findall(r"\d+", counts))
        # What the command left in the background writes behind the mark.
        if fields["held"] == "1":
            head, ended, _ = head.partition(self.mark)
            tail = "" if ended else tail.partition(self.mark)[0]
        else:  # it has ended meanwhile
            head, tail = (part.replace(self.mark, "") for part in (head, tail))
        self._note_tools(fields)
        return BoundedOutput(
            head=head.encode("utf-8", "surrogateescape"),
            tail=tail.encode("utf-8", "surrogateescape"),
            dropped_bytes=dropped_bytes,
            dropped_lines=dropped_lines,
            return_code=int(fields["rc"] or 125),
            timed_out=fields["timed_out"] == "1",
            over_cap=fields["over"] == "1",
            lost=fields["lost"] == "1",
            exhausted=fields["exhausted"] == "1",
            background=fields["held"] == "1",
            oom_kills=int(fields["ooms"]),
            file=fields["file"] or None,
        )

    def _note_tools(self, fields: Mapping[str, str]) -> None:
        tools = f"shell={fields['shell']} group={fields['group']} mode={fields['mode']}"
        if self.known.tools is None and tools != "shell=bash group=session mode=fifo":
            logger.info("sandbox %s: commands run with %s", self.environment.session_id, tools)
        self.known.tools = tools

    async def _explain(self, result: ExecResult) -> CommandResult:
        said = _said(result).strip()
        # Something of the wrapper is there, so it ran.
        started = self.mark in (result.stdout or "")
        code = result.return_code
        if started:
            rest = await self._recover()
            note = (
                f"[the command killed the shell that ran it (rc={code}), and maybe other processes of the sandbox]"
                if code
                else "[the sandbox's answer was cut short: the command ran, how it ended is not known]"
            )
            text = "\n".join(part for part in (rest.text.rstrip("\n") if rest else "", note) if part)
            return CommandResult(text, code or 125, broken=rest is None or rest.broken)
        return _refused(said, code)

    async def _recover(self) -> CommandResult | None:
        """What the command had written when its shell was killed."""
        files = " ".join(f"{directory}/harbor-trl-{self.id}" for directory in _DIRECTORIES)
        script = f'for f in {files}; do [ -f "$f.out" ] && cat "$f.out" && rm -f "$f.out" "$f.log" "$f.fifo"; done; :'
        call = _WrappedCall(self.environment, script.encode(), 10, self.sizes[0], self.keep, self.keep * 4)
        result = await call._exec("")
        output = call._parse(result)
        if output is None:
            return None
        if not output.head:
            return CommandResult("", 0)
        return _describe(output, 10, self.sizes[0], self.keep * 4, True)


def _said(result: ExecResult) -> str:
    return f"{result.stdout or ''}{result.stderr or ''}"


def _refused(said: str, code: int) -> CommandResult:
    said = said[:500] or "it said nothing"
    if SANDBOX_GONE.search(said):
        return CommandResult(f"[not run: the sandbox has ended: {said}]", code or 125, broken=True, gone=True)
    if re.search(r"(ba)?sh\b.*(not found|no such file)|exec format error", said, re.IGNORECASE):
        text = f"[not run: the sandbox has no shell that its backend can start (any more): {said}]"
    elif "temporarily unavailable" in said or "annot fork" in said:
        text = f"[not run: the sandbox cannot start any more processes: {said}]"
    else:
        text = f"[not run: the sandbox did not start the command (rc={code}): {said}]"
    return CommandResult(text, code or 125, broken=True)


def _lacks_directory(result: ExecResult) -> bool:
    return bool(result.return_code) and bool(re.search(r"\bchdir\b|\bcwd\b|working directory", _said(result)))


async def _upload(environment: BaseEnvironment, data: bytes, path: str) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        # Uploads keep the mode; the sandbox's user is not the one who owns the upload.
        os.chmod(file.name, 0o644)
        await environment.upload_file(file.name, path)


async def _short_exec(environment: BaseEnvironment, script: str, user: str | None = None) -> ExecResult:
    try:
        # Not every backend keeps its own.
        async with asyncio.timeout(_FILE_TIMEOUT_SEC + GRACE_SEC):
            return await environment.exec(script, timeout_sec=_FILE_TIMEOUT_SEC, user=user)
    except TimeoutError as error:
        raise SandboxNotAnsweringError(
            f"The sandbox gave no answer within {_FILE_TIMEOUT_SEC + GRACE_SEC:g} s to reading or writing a file"
        ) from error


async def read_file(environment: BaseEnvironment, path: str, max_bytes: int = 1 << 20) -> bytes:
    """The content of a file in the sandbox, read as its default user.

    Args:
        environment: Harbor's live environment.
        path: Any name; relative to the sandbox's working directory.
        max_bytes: More than this is refused.

    Raises:
        SandboxFileError: There is no such file, it cannot be read, or it is longer than `max_bytes`.
        SandboxNotAnsweringError: No answer.
    """
    quoted = shlex.quote(_checked(path))
    # Not a device or a pipe: those never end. `od` where there is no `base64`.
    script = (
        f'f={quoted}; [ -f "$f" ] || {{ [ -e "$f" ] && echo "not a regular file" || echo "no such file"; exit 66; }}; '
        f'[ -r "$f" ] || {{ echo "permission denied"; exit 66; }}; echo; '
        f'if command -v base64 >/dev/null; then head -c {max_bytes + 1} -- "$f" | base64; '
        f'else echo hex; head -c {max_bytes + 1} -- "$f" | od -An -v -tx1; fi'
    )
    result = await _short_exec(environment, script)
    reason, _, encoded = (result.stdout or "").partition("\n")
    if result.return_code or reason:
        raise SandboxFileError(
            f"{path!r} in the sandbox cannot be read: {reason.strip() or _said(result).strip()[:300]}"
        )
    try:
        data = bytes.fromhex(encoded[4:]) if encoded.startswith("hex\n") else base64.b64decode(encoded)
    except (ValueError, binascii.Error) as error:
        raise SandboxFileError(f"{path!r} in the sandbox cannot be read: {error}") from error
    if len(data) > max_bytes:
        raise SandboxFileError(f"{path!r} in the sandbox is longer than max_bytes={max_bytes}")
    return data


async def write_file(environment: BaseEnvironment, path: str, data: bytes) -> None:
    """Write a file in the sandbox as its default user, making the directories above it.

    Raises:
        SandboxFileError: The file cannot be written.
        SandboxNotAnsweringError: No answer.
    """
    quoted = shlex.quote(_checked(path))
    prepare = f'f={quoted}; case $f in */*) mkdir -p -- "${{f%/*}}/";; esac && '
    encoded = base64.b64encode(data).decode()
    if len(encoded) + len(prepare) <= _LONGEST_INLINE_BYTES - 64:
        script = f'{prepare}printf %s {encoded or chr(39) * 2} | base64 -d >"$f"'
        result = await _short_exec(environment, script)
    else:
        upload = f"/tmp/harbor-trl-{secrets.token_hex(8)}.data"
        await _upload(environment, data, upload)
        result = await _short_exec(environment, f'{prepare}cat {upload} >"$f"')
        await _short_exec(environment, f"rm -f {upload}", user="root")
    if result.return_code:
        raise SandboxFileError(f"{path!r} in the sandbox cannot be written: {_said(result).strip()[:300]}")


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise SandboxFileError(f"{path!r} is no name of a file")
    # Not an option of a tool, whatever it begins with.
    return f"./{path}" if path.startswith("-") else path
