"""Sandboxes for the execution tests: shells of this machine, Docker containers, and one that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from harbor.environments.base import ExecResult
from harbor.models.task.config import EnvironmentConfig as TaskEnvironmentConfig
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from harbor_trl.environments.bubblewrap import BubblewrapEnvironment, check_available
from harbor_trl.environments.docker import FastDockerEnvironment
from harbor_trl.errors import SandboxUnavailableError
from sandbox_support import Live
from sandbox_support import running as started

BASE_IMAGE = "debian:bookworm-slim"
BUSYBOX_IMAGE = "harbor-trl-busybox:latest"

#: What the wrapper may use, less the shells.
TOOLS = (
    *("base64", "cat", "chmod", "echo", "env", "false", "grep", "head", "kill", "ls", "mkdir", "mkfifo"),
    *("od", "printf", "ps", "rm", "seq", "sleep", "sort", "tail", "tr", "true", "wc", "yes"),
)


class LocalEnvironment:
    """`exec` of a Harbor environment, run by a shell of this machine. Not a sandbox."""

    def __init__(self, shell: Sequence[str], directory: Path, path: str, env: dict[str, str] | None = None) -> None:
        self.shell = shell
        self.directory = directory
        self.session_id = f"local-{shell[0]}"
        self.env = {"PATH": path, "HOME": str(directory), "LC_ALL": "C.UTF-8", **(env or {})}

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *self.shell,
            "-c",
            command,
            cwd=cwd or self.directory,
            env={**(env or {}), **self.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                output, _ = await process.communicate()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        code = process.returncode or 0
        return ExecResult(stdout=output.decode(errors="replace"), return_code=code if code >= 0 else 128 - code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await asyncio.to_thread(shutil.copy, source_path, target_path)


class ScriptedEnvironment:
    """A local sandbox whose backend delays, cuts or fails: `script` says how for each exec in turn, then for all."""

    def __init__(self, inner: LocalEnvironment, *script: Any) -> None:
        self.inner = inner
        self.script = list(script)
        self.session_id = "scripted"
        self.execs = 0

    async def exec(self, command: str, **kwargs: Any) -> ExecResult:
        self.execs += 1
        act = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await act(self.inner, command, kwargs)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.inner.upload_file(source_path, target_path)


async def late_and_noisy(inner: LocalEnvironment, command: str, kwargs: dict[str, Any]) -> ExecResult:
    """A backend that takes its time, drops variables, and says more than the command did."""
    kwargs.pop("env", None)
    await asyncio.sleep(0.03)
    result = await inner.exec(command, **kwargs)
    await asyncio.sleep(0.03)
    if "HARBOR_TRL_COMMAND" not in command:  # a plain exec of the tests
        return result
    return ExecResult(stdout=f"motd\n{result.stdout}bye\n", stderr="noise", return_code=result.return_code)


def tool_directory(directory: Path, tools: Sequence[str], **shells: str) -> str:
    """A PATH that holds `tools` and, by name, `shells`."""
    directory.mkdir()
    for name in tools:
        if found := shutil.which(name):
            (directory / name).symlink_to(found)
    for name, target in shells.items():
        (directory / name).symlink_to(target)
    return str(directory)


@functools.cache
def find_busybox() -> str:
    """This machine's busybox, else that of the test image, which is static."""
    if found := shutil.which("busybox"):
        return found
    file = Path(tempfile.mkdtemp(prefix="harbor-trl-test-"), "busybox")
    atexit.register(shutil.rmtree, file.parent)
    with file.open("wb") as output, contextlib.suppress(FileNotFoundError):
        copy = ["docker", "run", "--rm", "--network", "none", BUSYBOX_IMAGE, "cat", "/bin/busybox"]
        subprocess.run(copy, stdout=output, stderr=subprocess.DEVNULL)
    if not file.stat().st_size:
        pytest.skip("no busybox on this machine, and no image that has it")
    file.chmod(0o755)
    return str(file)


#: Backends by name, and what each lacks of a full machine.
LOCAL = ["bash", "bash-posix", "dash", "ash", "no-setsid", "nothing-but-sh"]
ISOLATED = [
    "bubblewrap",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker-busybox", marks=pytest.mark.docker),
]
SANDBOXES = [*LOCAL, "scripted", *ISOLATED]
#: Of the isolated ones.
MAX_PROCESSES, MEMORY_MB = 100, 128


def local_environment(name: str, directory: Path, env: dict[str, str] | None = None) -> LocalEnvironment:
    work = directory / "work"
    work.mkdir()
    path = os.environ["PATH"]
    if name == "bash":
        return LocalEnvironment(["/bin/bash"], work, path, env)
    if name == "bash-posix":
        return LocalEnvironment(["/bin/bash", "--posix"], work, path, env)
    if name == "ash":
        busybox = find_busybox()
        applets = [*TOOLS, "setsid", "sh"]
        path = tool_directory(directory / "bin", [], **dict.fromkeys(applets, busybox))
        return LocalEnvironment([busybox, "ash"], work, path, env)
    dash = shutil.which("dash")
    if not dash:
        pytest.skip("no dash on this machine")
    tools = {"dash": [*TOOLS, "setsid"], "no-setsid": TOOLS, "nothing-but-sh": []}[name]
    return LocalEnvironment([dash], work, tool_directory(directory / "bin", tools, sh=dash), env)


def docker_environment(directory: Path, image: str, **config: Any) -> FastDockerEnvironment:
    options = config.pop("options", {})
    context = directory / "task" / "environment"
    context.mkdir(parents=True)
    return FastDockerEnvironment(
        environment_dir=context,
        environment_name="execution-test",
        session_id=f"execution-test-{uuid4().hex[:8]}__env",
        trial_paths=TrialPaths(directory / "trial"),
        task_env_config=TaskEnvironmentConfig(docker_image=image, **config),
        network_policy=NetworkPolicy(network_mode=NetworkMode.PUBLIC),
        **options,
    )


def bubblewrap_environment(directory: Path, max_processes: int) -> BubblewrapEnvironment:
    try:
        check_available()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    context = directory / "task" / "environment"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nWORKDIR /work\n")
    return BubblewrapEnvironment(
        environment_dir=context,
        environment_name="execution-test",
        session_id=f"execution-test-{uuid4().hex[:8]}__env",
        trial_paths=TrialPaths(directory / "trial"),
        task_env_config=TaskEnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.PUBLIC),
        max_processes=max_processes,
    )


@contextlib.contextmanager
def live(name: str, directory: Path, max_processes: int = MAX_PROCESSES) -> Iterator[Live]:
    """The sandbox called `name`, started."""
    if name in LOCAL or name == "scripted":
        local = local_environment("bash" if name == "scripted" else name, directory)
        sandbox = Live(ScriptedEnvironment(local, late_and_noisy) if name == "scripted" else local)
        try:
            yield sandbox
        finally:
            sandbox.close()
        return
    if name == "bubblewrap":
        environment: Any = bubblewrap_environment(directory, max_processes)
    else:
        image = BUSYBOX_IMAGE if name == "docker-busybox" else BASE_IMAGE
        options = {"max_processes": max_processes}
        environment = docker_environment(directory, image, options=options, workdir="/root", memory_mb=MEMORY_MB)
    with started(environment) as sandbox:
        yield sandbox
