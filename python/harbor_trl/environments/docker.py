"""Harbor's Docker backend without its waits: the same Compose project, started and stopped several times faster.

What differs from `harbor.environments.docker`:

- PID 1 of the main container is a shell that ends on its stop signal, collects the dead, and outlives `kill 1` and
  `kill -9 -1`. Harbor's `sleep infinity` ignores the signal, and every stop takes the ten seconds of Docker's grace
  period.
- Commands run in `bash` where the image has it, else in `sh`.
- A container that has ended by itself when its start is over is an error that says how it ended.
- The image is built once per content and process, not once per rollout. It stays, as `harbor-trl-task:<digest>`, so
  that the rollouts of a group share it; `remove_task_images` deletes all of them.
- A task of one container that has no network in any phase runs with Docker's network mode `none`, which needs no image
  from a registry; Harbor's egress control serves all other restricted tasks.
- `up` does not `--wait` where the image has no HEALTHCHECK to wait for, nothing is taken down that is not there, and
  the Compose plugin is called directly; a single container is spoken to without Compose at all.
- What is copied out of a single container is bounded, in all; and so are the processes of the main container.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, override

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.definition import COMPOSE_FILE_NAME
from harbor.environments.docker import COMPOSE_NO_NETWORK_PATH
from harbor.environments.docker.docker import (
    DockerEnvironment,
    DockerOptions,
    _sanitize_docker_compose_project_name,
)
from harbor.environments.docker.runtime import ContainerRuntime
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from pydantic import Field

from harbor_trl.environments import _transfer
from harbor_trl.errors import SandboxLostError, SandboxUnavailableError

IMAGE_REPOSITORY = "harbor-trl-task"
#: Largest file that is copied out of a container of several, and most that one copy out of a single one may hold.
_MAX_FILE_BYTES = 1 << 30
_MAX_COPY_ENTRIES = 200_000
#: How long an image's own ENTRYPOINT may take to run what it was given, or to end.
_ENTRYPOINT_SEC = 1.0
_KEPT_ALIVE_BY = ("sh -c trap", "sleep infinity", "tail -f /dev/null")
_LOST = re.compile(r"no such container|is not running|is restarting", re.IGNORECASE)
_NO_BASH = re.compile(r"\bexec: \W?bash\W?: (executable file not found|.*no such file)", re.IGNORECASE)
_INIT_OVERLAY, _PROCESSES_OVERLAY = (Path(__file__).with_name(f"docker-{name}.yaml") for name in ("init", "processes"))


class FastDockerOptions(DockerOptions):
    """`EnvironmentConfig.kwargs` of `FastDockerEnvironment`."""

    init: bool = Field(
        default=True,
        description="A PID 1 of ours in the main container; off for images that bring an init of their own.",
    )
    max_processes: int = Field(
        default_factory=lambda: max(1024, 128 * (os.cpu_count() or 1)),
        ge=16,
        description="Processes and threads that the main container may have at once: a fork bomb would end the host. "
        "Default: 1024, or 128 for each CPU of this machine if that is more.",
    )


class FastDockerEnvironment(DockerEnvironment):
    """Harbor's `DockerEnvironment`, faster to start and stop; everything else is inherited."""

    options_model = FastDockerOptions
    options: FastDockerOptions
    task_env_config: EnvironmentConfig

    #: Image of each build context, by digest of its content: what this process has built.
    _built: ClassVar[dict[str, str]] = {}
    _build_locks: ClassVar[dict[tuple[int, str], asyncio.Lock]] = {}
    #: Images that have no bash.
    _without_bash: ClassVar[set[str]] = set()

    def __init__(self, environment_dir: Path, *args: Any, **kwargs: Any) -> None:
        self._was_up = self._is_starting = False
        self._has_healthcheck = self._has_entrypoint = True
        self._shell: str | None = None
        self._image_os: str | None = None
        self._is_unplugged = False
        self._has_services = bool(kwargs.get("extra_docker_compose")) or (environment_dir / COMPOSE_FILE_NAME).exists()
        super().__init__(environment_dir, *args, **kwargs)

    @classmethod
    @override
    def runtime(cls) -> ContainerRuntime:
        return _runtime()

    @classmethod
    @override
    def _detect_daemon_os(cls) -> str | None:
        return _daemon_os()

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        try:
            super().preflight(kwargs)
        except SystemExit as error:
            raise SystemExit(_why_no_engine() or str(error)) from None

    # Static in Harbor, but called on the instance.
    def _requires_egress_control(  # type: ignore[override]
        self, *, startup_network_policy: NetworkPolicy, phase_network_policies: Sequence[NetworkPolicy]
    ) -> bool:
        policies = [startup_network_policy, *phase_network_policies]
        self._is_unplugged = not self._has_services and all(
            policy.network_mode == NetworkMode.NO_NETWORK for policy in policies
        )
        restricted = any(policy.network_mode != NetworkMode.PUBLIC for policy in policies)
        return restricted and not self._is_unplugged

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        capabilities = super().capabilities
        if self._is_unplugged and not self._is_windows_container:
            return capabilities.model_copy(update={"disable_internet": True})
        return capabilities

    @property
    def _is_plain(self) -> bool:
        """One container, from a Dockerfile or an image: no compose file of the task or of the run."""
        return not self._user_compose_paths() and not self._is_windows_container

    @property
    @override
    def _docker_compose_paths(self) -> list[Path]:
        paths: list[Path] = super()._docker_compose_paths
        if self.options.init and not self._is_windows_container:
            # Before the task's own files, which may say otherwise.
            base = self._DOCKER_COMPOSE_PREBUILT_PATH if self._use_prebuilt else self._DOCKER_COMPOSE_BUILD_PATH
            paths.insert(paths.index(base) + 1, _INIT_OVERLAY)
        if not self._is_windows_container and not any(
            "pids" in path.read_text() for path in self._user_compose_paths()
        ):
            # Compose refuses a second way of saying it.
            paths.append(_PROCESSES_OVERLAY)
        if self._is_unplugged:
            paths.append(COMPOSE_NO_NETWORK_PATH)
        return paths

    @override
    def _compose_infra_env_vars(self) -> dict[str, str]:
        variables: dict[str, str] = super()._compose_infra_env_vars()
        return {**variables, "HARBOR_TRL_MAX_PROCESSES": str(self.options.max_processes)}

    @override
    async def start(self, force_build: bool) -> None:
        # The daemon is asked once per process, and not from the event loop.
        await asyncio.to_thread(_daemon_os)
        if self._is_plain and self._dockerfile_path.exists() and (force_build or not self.task_env_config.docker_image):
            image = await self._build_once(force_build)
            self.task_env_config = self.task_env_config.model_copy(update={"docker_image": image})
            self._env_vars.prebuilt_image_name = image
            force_build = False
        self._is_starting = True
        try:
            await super().start(force_build)
            if self._has_entrypoint and self._is_plain:
                await self._check_entrypoint()
        finally:
            self._is_starting = False

    async def _build_once(self, force_build: bool) -> str:
        digest = await asyncio.to_thread(context_digest, self.environment_dir)
        key = (id(asyncio.get_running_loop()), digest)
        async with self._build_locks.setdefault(key, asyncio.Lock()):
            image = None if force_build else self._built.get(digest)
            found = await self._inspect_image(image) if image else None
            if found is None:
                image = f"{IMAGE_REPOSITORY}:{digest}"
                await self._run_docker_compose_command(["build"])
                built = f"{self._project}-main"
                await self._engine("tag", built, image)
                await self._engine("rmi", "--no-prune", built)
                self._built[digest] = image
                found = await self._inspect_image(image) or {}
            assert image is not None
            config = found.get("Config") or {}
            self._has_healthcheck = bool(config.get("Healthcheck"))
            self._has_entrypoint = bool(config.get("Entrypoint"))
            self._image_os = found.get("Os")
            return image

    async def _inspect_image(self, image: str) -> dict[str, Any] | None:
        """What the engine knows of an image, or None when there is no such image."""
        code, output = await self._engine("image", "inspect", "-f", "{{json .}}", image, check=False)
        return json.loads(output) if code == 0 else None

    @override
    async def _validate_image_os(self, image_name: str) -> None:
        if self._image_os != "linux" or self._is_windows_container:
            await super()._validate_image_os(image_name)

    @property
    def _project(self) -> str:
        return _sanitize_docker_compose_project_name(self.session_id)

    @property
    def _container(self) -> str:
        return f"{self._project}-{MAIN_SERVICE_NAME}-1"

    async def _check_entrypoint(self) -> None:
        """Wait until the image's ENTRYPOINT has become, or started, the command that keeps the container alive."""
        deadline = time.monotonic() + _ENTRYPOINT_SEC
        while time.monotonic() < deadline:
            code, output = await self._engine("top", self._container, "-eo", "pid,args", check=False)
            # Its own process: an ENTRYPOINT has it among its arguments, too.
            commands = [line.strip().partition(" ")[2].lstrip() for line in output.splitlines()]
            if code or any(command.startswith(_KEPT_ALIVE_BY) for command in commands):
                break
            await asyncio.sleep(0.1)
        code, output = await self._engine("inspect", "-f", "{{.State.Running}}", self._container, check=False)
        if code == 0 and output.strip() != "true":
            raise await self._ended_by_itself()

    async def _ended_by_itself(self) -> SandboxUnavailableError:
        code, output = await self._engine(
            "inspect", "-f", "{{.State.ExitCode}} {{json .Path}} {{json .Args}}", self._container, check=False
        )
        exit_code, _, process = output.strip().partition(" ") if code == 0 else ("unknown", "", "?")
        logs = ["logs", "--tail", "20", self._container]
        _, log = await self._engine(*logs, check=False, merged=True)
        return SandboxUnavailableError(
            f"{self.environment_dir}: the container ended by itself at its start, with exit code {exit_code}. It ran "
            f"{process}: the image's ENTRYPOINT, if it has one, and a command that keeps it alive, which an ENTRYPOINT "
            'must run. Remove ENTRYPOINT from the Dockerfile, or end its script with `exec "$@"`. '
            f"Last lines of its log: {log.strip()[-1000:] or '(empty)'}"
        )

    async def _engine(self, *arguments: str, check: bool = True, merged: bool = False) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *self._engine_cmd(*arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if merged else asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        code = process.returncode or 0
        if check and code:
            raise RuntimeError(f"docker {' '.join(arguments)} failed: {errors.decode(errors='replace').strip()}")
        return code, output.decode(errors="replace")

    # A process outlives the cancellation of who waits for it: a build that hangs would go on for ever, and a copy of
    # what a policy left in a container would fill this machine's disk.
    @staticmethod
    @override
    async def _collect_buffered_output(process: asyncio.subprocess.Process, **kwargs: Any) -> ExecResult:
        async with _ended_with_us(process):
            return await DockerEnvironment._collect_buffered_output(process, **kwargs)

    @staticmethod
    @override
    async def _collect_streamed_output(process: asyncio.subprocess.Process, **kwargs: Any) -> ExecResult:
        async with _ended_with_us(process):
            return await DockerEnvironment._collect_streamed_output(process, **kwargs)

    async def _has_containers(self) -> bool:
        label = f"label=com.docker.compose.project={self._project}"
        code, output = await self._engine("ps", "-aq", "--filter", label, check=False)
        return code != 0 or bool(output.strip())

    @override
    async def _compose_exec(self, command: str, *, service: str, **kwargs: Any) -> ExecResult:
        if service != MAIN_SERVICE_NAME or self._is_windows_container:
            return await super()._compose_exec(command, service=service, **kwargs)
        image = self.task_env_config.docker_image or self._main_image_name
        if self._shell is None and image in self._without_bash:
            self._shell = "sh"
        result = await self._exec_in_main(command, **kwargs)
        said = result.stdout or ""
        if self._shell is None:
            self._shell = "bash"
            if result.return_code in (126, 127) and _NO_BASH.search(said):
                self._shell = "sh"
                self._without_bash.add(image)
                result = await self._exec_in_main(command, **kwargs)
                said = result.stdout or ""
        if self._is_starting and result.return_code and _LOST.search(said):
            raise await self._ended_by_itself()
        return result

    async def _exec_in_main(
        self,
        command: str,
        *,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | int | None,
    ) -> ExecResult:
        options = ["-w", cwd] if cwd else []
        for key, value in (env or {}).items():
            options += ["-e", f"{key}={value}"]
        if user is not None:
            options += ["-u", str(user)]
        return await self._run_docker_compose_command(
            ["exec", *options, MAIN_SERVICE_NAME, self._shell or "bash", "-c", command],
            check=False,
            timeout_sec=timeout_sec,
            on_output=self._output_callback(),
        )

    @override
    async def _run_docker_compose_command(self, command: list[str], *args: Any, **kwargs: Any) -> ExecResult:
        if command[0] in ("exec", "cp") and self._is_plain:
            return await self._run_in_container(command, *args, **kwargs)
        if command[0] == "up":
            self._was_up = True
            if self._is_plain and self._use_prebuilt and not self._has_healthcheck and not self._enable_egress_control:
                # `--wait` polls twice a second.
                command = [word for word in command if word != "--wait"]
            if self._is_plain:
                # Stale containers of the same name are replaced, so nothing needs to be taken down first.
                command = [*command, "--force-recreate", "--renew-anon-volumes", "--remove-orphans"]
        elif command[0] == "down":
            if not self._was_up and (self._is_plain or not await self._has_containers()):
                return ExecResult(return_code=0)
            if self._is_plain and "--rmi" in command:
                # Compose knows the image by a label of its first trial, whatever its tag: the next rollouts need it.
                at = command.index("--rmi")
                command = [*command[:at], *command[at + 2 :]]
            # For services that ignore SIGTERM.
            command = ["down", "--timeout", "1", *command[1:]]
        return await super()._run_docker_compose_command(command, *args, **kwargs)

    async def _run_in_container(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: Any = None,
    ) -> ExecResult:
        """`docker compose exec` and `cp` without Compose, which takes half as much CPU time again."""
        if command[0] == "exec":
            at = 1
            while command[at].startswith("-"):
                at += 1 if command[at] == "-T" else 2
            options = [word for word in command[1:at] if word != "-T"]
            attach = ["-i"] if stdin_data is not None else []
            command = ["exec", *attach, *options, self._container, *command[at + 1 :]]
        else:
            command = [
                f"{self._container}:{word.removeprefix(f'{MAIN_SERVICE_NAME}:')}"
                if word.startswith(f"{MAIN_SERVICE_NAME}:")
                else word
                for word in command
            ]
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *self._engine_cmd(*command),
            stdin=null if stdin_data is None else pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
        )
        if on_output is None:
            result = await self._collect_buffered_output(process, timeout_sec=timeout_sec, stdin_data=stdin_data)
        else:
            result = await self._collect_streamed_output(
                process, timeout_sec=timeout_sec, stdin_data=stdin_data, on_output=on_output
            )
        if check and result.return_code:
            said = (result.stdout or "").strip()
            error = SandboxLostError if _LOST.search(said) else RuntimeError
            raise error(f"docker {' '.join(command)} failed: {said}")
        return result

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with _telling_what_is_lost():
            await super().upload_file(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with _telling_what_is_lost():
            await super().upload_dir(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        if not self._is_plain:
            await super().download_file(source_path, target_path)
            return
        target = Path(target_path)
        if target.is_dir():
            target = target / Path(source_path).name
        await self._copy_out(source_path, target, is_file=True)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if not self._is_plain:
            await super().download_dir(source_dir, target_dir)
            return
        await self._copy_out(f"{source_dir}/.", Path(target_dir), is_file=False)

    async def _copy_out(self, source: str, target: Path, *, is_file: bool) -> None:
        """Copy out what a policy may have made: bounded, and never outside `target`."""
        reader, writer = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._engine_cmd("cp", *(["-L"] if is_file else []), f"{self._container}:{source}", "-"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        assert process.stderr is not None
        left_out: list[str] = []
        problem: Exception | None = None
        async with _ended_with_us(process):
            try:
                left_out = await asyncio.to_thread(_unpack, reader, target, is_file)
            except (OSError, RuntimeError, tarfile.TarError) as error:
                problem = error
                if not isinstance(error, tarfile.ReadError):
                    await self._terminate_process(process)
            said = (await process.stderr.read()).decode(errors="replace").strip()
            code = await process.wait()
        if problem is not None or code:
            reason = said if isinstance(problem, tarfile.ReadError | None) and said else problem or f"exit code {code}"
            lost = SandboxLostError if _LOST.search(said) else RuntimeError
            raise lost(f"{source} could not be copied out of the sandbox: {reason}") from problem
        if left_out:
            self.logger.warning(
                f"{len(left_out)} entries of {source} are special or lead out of it, not downloaded: "
                f"{', '.join(left_out[:5])}"
            )


@contextlib.contextmanager
def _telling_what_is_lost() -> Iterator[None]:
    """Harbor tries uploads in two ways, and says in one text why both failed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SandboxLostError) or not _LOST.search(str(error)):
            raise
        raise SandboxLostError(f"the sandbox is gone: {error}") from error


@contextlib.asynccontextmanager
async def _ended_with_us(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        await asyncio.shield(DockerEnvironment._terminate_process(process))
        raise


def _unpack(reader: int, target: Path, is_file: bool) -> list[str]:
    """Unpack the tar stream of `docker cp`; returns what was left out.

    Raises:
        RuntimeError: It holds more than may be copied out, or no file where one is wanted.
    """
    left_out = []
    bytes_left, entries_left = _MAX_FILE_BYTES, _MAX_COPY_ENTRIES
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open(reader, "rb"))
        archive = stack.enter_context(
            tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape")
        )
        unpacking = stack.enter_context(_transfer.Unpacking(target.parent if is_file else target))
        for member in archive:
            bytes_left -= member.size
            entries_left -= 1
            if bytes_left < 0 or entries_left < 0:
                raise RuntimeError(
                    f"it is more than {_MAX_FILE_BYTES} bytes or {_MAX_COPY_ENTRIES} entries, which is the most"
                )
            if is_file and not member.isreg():
                raise RuntimeError("not a regular file")
            path = os.fsencode(target.name if is_file else member.name.removeprefix("./"))
            if path in (b".", b""):
                continue
            if member.isdir():
                unpacking.directory(path)
            elif member.issym():
                if not unpacking.link(path, os.fsencode(member.linkname)):
                    left_out.append(member.name)
            elif member.islnk():
                unpacking.hard_link(path, os.fsencode(member.linkname.removeprefix("./")))
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                with content, unpacking.file(path, member.mode) as out:
                    shutil.copyfileobj(content, out)
            else:
                left_out.append(member.name)
    return left_out


def context_digest(context: Path) -> str:
    """Digest of all that a build can see of a directory: names, kinds, modes, contents, link targets."""
    digest = hashlib.blake2b(digest_size=16)

    def add(*fields: bytes) -> None:
        for one in fields:
            digest.update(len(one).to_bytes(8, "big") + one)

    for root, directories, files in os.walk(os.fsencode(context)):
        directories.sort()
        for name in sorted([*files, *directories]):
            path = os.path.join(root, name)
            state = os.lstat(path)
            add(os.path.relpath(path, os.fsencode(context)), state.st_mode.to_bytes(4, "big"))
            if stat.S_ISLNK(state.st_mode):
                add(os.readlink(path))
            elif stat.S_ISREG(state.st_mode):
                with open(path, "rb") as file:
                    add(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def remove_task_images() -> list[str]:
    """Delete the images that rollouts left for the next ones; returns their names. Images in use stay."""
    listed = subprocess.run(
        ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", IMAGE_REPOSITORY],
        capture_output=True,
        text=True,
        check=True,
    )
    removed = []
    for name in listed.stdout.split():
        if subprocess.run(["docker", "image", "rm", name], capture_output=True).returncode == 0:
            removed.append(name)
    return removed


@functools.cache
def _runtime() -> ContainerRuntime:
    # `docker compose` is a process that starts this one: half of the CPU time of a call.
    config = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    system = ("/usr/local/lib", "/usr/local/libexec", "/usr/lib", "/usr/libexec")
    for directory in (config, *(Path(one, "docker") for one in system)):
        plugin = directory / "cli-plugins" / "docker-compose"
        if os.access(plugin, os.X_OK):
            return ContainerRuntime(engine=_with_file_limit("docker"), compose=_with_file_limit(str(plugin)))
    return ContainerRuntime(engine=_with_file_limit("docker"), compose=_with_file_limit("docker", "compose"))


def _with_file_limit(*command: str) -> tuple[str, ...]:
    # A file of terabytes costs a container nothing if it is sparse, and `docker cp` would write out its zeros.
    if sys.platform == "win32":
        return command
    return ("sh", "-c", f'ulimit -f {_MAX_FILE_BYTES // 512} && exec "$@"', "sh", *command)


def _why_no_engine() -> str | None:
    """Which engine was asked, and what the client says of it; None if there is no client."""
    host = os.environ.get("DOCKER_HOST")
    where = f"DOCKER_HOST={host}" if host else "the current `docker context`"
    try:
        if not host:
            inspect = ["docker", "context", "inspect", "-f", "{{.Name}}, {{.Endpoints.docker.Host}}"]
            shown = subprocess.run(inspect, capture_output=True, text=True, timeout=10).stdout.strip()
            where += f" ({shown})" if shown else ""
        done = subprocess.run(["docker", "info", "-f", "x"], capture_output=True, text=True, timeout=10)
        said = " ".join(done.stderr.split())[-500:] or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        said = "no answer within 10 s"
    except OSError:
        return None
    return f"No Docker engine answers. Asked was {where}: {said}. Start it, or choose another."


_daemon: list[str] = []


def _daemon_os() -> str | None:
    # Only an answer is kept: a daemon that is down now may be up for the next rollout.
    if not _daemon:
        answer = super(FastDockerEnvironment, FastDockerEnvironment)._detect_daemon_os()
        if answer is None:
            return None
        _daemon.append(answer)
    return _daemon[0]
