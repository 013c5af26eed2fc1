"""Harbor environment on bubblewrap: real, isolated sandboxes without a container engine.

    EnvironmentConfig(import_path="harbor_trl.environments.bubblewrap:BubblewrapEnvironment")

What a sandbox is
    One process tree under `bwrap` with its own user, mount, process, IPC, host-name and (for `no-network` tasks)
    network namespace. The host's `/usr` lies read-only underneath a layer of the sandbox's own (overlayfs; where the
    kernel has none for ordinary users, `/usr` is read-only). Everything a sandbox writes lives in one tmpfs that is
    gone with its last process. Of the host's `/etc` it sees the linker cache, `alternatives` and the CA certificates,
    and `resolv.conf` if it has network. The trainer's own base Python is bound read-only at its own path; if the host
    has no `/usr/bin/python3`, that interpreter is `python3` inside too. The environment variables of the trainer, its
    files, its descriptors, its processes and other sandboxes are not visible; the paths of what is bound are, in
    `/proc/mounts`.

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

import asyncio
import contextlib
import inspect
import os
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import COMPOSE_FILE_NAME, DOCKERFILE_NAME, require_agent_environment_definition
from harbor.environments.options import EnvironmentOptions
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import Field

from harbor_trl.environments import _transfer
from harbor_trl.environments._sandbox import BASE_USERS, Sandbox, check_available, check_platform, current_launcher
from harbor_trl.environments.dockerfile_subset import STAND_IN_IMAGES, ImagePlan, made_directory, owner_of, plan_image
from harbor_trl.errors import UnsupportedTaskError
from harbor_trl.execution import BoundedOutput

_MB = 1024 * 1024


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
        check_platform()
        self._sandbox: Sandbox | None = None
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
        launcher = await asyncio.to_thread(current_launcher)
        check_users(self.environment_dir, self._plan, many_users=launcher.many_users)
        logs = EnvironmentPaths.for_os(self.os)
        own = (logs.agent_dir, logs.verifier_dir, logs.artifacts_dir)
        open_directories = [*dict.fromkeys((*map(str, own), *self._mount_targets(writable_only=True)))]
        steps = [*self._plan.steps, made_directory(self._default_cwd)]
        # Plain directories need no transfer of their own.
        plain = all(step == made_directory(step.destination) for step in (replace(one, line=0) for one in steps))
        sandbox = Sandbox(launcher)
        self._sandbox = sandbox
        try:
            await sandbox.start(
                network=self._network_is_public,
                storage_bytes=self._storage_bytes,
                memory_bytes=self._memory_bytes,
                processes=self.options.max_processes,
                directories=[*(step.destination for step in steps if plain), *open_directories],
                open_directories=open_directories,
                timeout_sec=self.options.start_timeout_sec,
            )
            if not plain:
                with tempfile.TemporaryFile(prefix="harbor-trl-") as file:
                    out = cast(BinaryIO, file)
                    await asyncio.to_thread(_transfer.pack_entries, out, self.environment_dir, steps)
                    await sandbox.transfer("put", {"target": b"/", "name": b"", "is_file": False}, file.fileno())
        except BaseException:
            with contextlib.suppress(RuntimeError):  # why it did not start says more
                await self.stop(delete=True)
            raise

    @override
    async def stop(self, delete: bool) -> None:
        """End the sandbox, with every process and file in it. Harmless when repeated. `delete=False` keeps nothing."""
        if self._sandbox is not None:
            await self._sandbox.stop()

    @property
    def launcher_is_alive(self) -> bool:
        """Whether the process that this sandbox was forked from lives; no policy can reach it."""
        return self._sandbox is None or self._sandbox.launcher.alive()

    def _live(self) -> Sandbox:
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
            RuntimeError: `Command timed out after N seconds`.
            SandboxLostError: The sandbox is gone.
            UnsupportedTaskError: A user other than root, in a sandbox that has no other.
        """
        sandbox = self._live()
        output, code = await sandbox.run(
            command,
            cwd=cwd or self._default_cwd,
            env=self._variables(env),
            user=self._who(user),
            timeout_sec=timeout_sec,
            max_output=self.options.max_output_bytes,
            on_output=self._output_callback(),
        )
        return ExecResult(stdout=output or None, stderr=None, return_code=code)

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
        """Run `command` with time and output bounded inside the sandbox (`harbor_trl.execution.RunsBounded`).

        Raises:
            SandboxLostError: The sandbox is gone.
        """
        return await self._live().run_bounded(
            command,
            cwd=self._default_cwd,
            env={**env, **self._variables(None)},
            user=self._who(None),
            timeout_sec=timeout_sec,
            head_bytes=head_bytes,
            tail_bytes=tail_bytes,
            cap_bytes=cap_bytes,
            shown_bytes=shown_bytes,
        )

    def _variables(self, env: dict[str, str] | None) -> dict[str, str]:
        own = {"PATH": self._live().path, "HOSTNAME": "sandbox"}
        return {**own, **self._plan.env, **(self._merge_env(env) or {})}

    def _who(self, user: str | int | None) -> str:
        who = self._resolve_user(user)
        if who is None:
            who = self._plan.user or 0
        if not self._live().many_users:
            name, _, group = str(who).partition(":")
            if name not in ("root", "0") or group not in ("", "root", "0"):
                _check_user(who, "user", False)
        return str(who)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file in, owned by root, with its mode; into `target_path` if that is a directory or ends in `/`."""
        await self._upload(Path(source_path), target_path, is_file=True)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what a directory holds into `target_dir`, owned by root; links stay links."""
        await self._upload(Path(source_dir), target_dir, is_file=False)

    async def _upload(self, source: Path, target: str, is_file: bool) -> None:
        sandbox = self._live()
        with tempfile.TemporaryFile(prefix="harbor-trl-") as file:
            pack = _transfer.pack_file if is_file else _transfer.pack_directory
            await asyncio.to_thread(pack, cast(BinaryIO, file), source)
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


def check_users(environment_dir: Path, plan: ImagePlan, *, many_users: bool) -> None:
    """Refuse before the first command what would make every command fail.

    Args:
        environment_dir: Of the task.
        plan: Its image.
        many_users: Whether sandboxes of this process have other users than root.

    Raises:
        UnsupportedTaskError: The task names a user that its sandbox would not have.
    """
    dockerfile, task_file = environment_dir / DOCKERFILE_NAME, environment_dir.parent / "task.toml"
    _check_user(plan.user, "USER", many_users, file=dockerfile)
    for step in plan.steps:
        _check_user("{}:{}".format(*owner_of(step)), "owner", many_users, file=dockerfile, line=step.line)
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        text = task_file.read_text()
        config = tomllib.loads(text) if "user" in text else {}
    for table in (config, *config.get("steps", [])):
        for section in ("agent", "verifier"):
            _check_user(table.get(section, {}).get("user"), f"[{section}].user", many_users, file=task_file)


def _check_user(
    user: str | int | None, what: str, many_users: bool, *, file: Path | None = None, line: int = 0
) -> None:
    if user is None:
        return
    name, _, group = str(user).partition(":")
    if not name.isdigit() and name not in BASE_USERS:
        reason = f"no user {name!r} exists in a bubblewrap sandbox, which runs no useradd"
    elif (name not in ("root", "0") or group not in ("", "root", "0")) and not many_users:
        reason = "a bubblewrap sandbox that an ordinary user starts has no user but root"
    elif name.isdigit() and int(name) > 65535:
        reason = "a bubblewrap sandbox has user ids up to 65535"
    else:
        return
    reason = f"{what} = {user!r}: {reason}"
    where = "" if file is None else f"{file}, line {line}: " if line else f"{file}: "
    raise UnsupportedTaskError(
        f"{where}{reason}; run this task with environment_type='docker'.", file=file, line=line, reason=reason
    )
