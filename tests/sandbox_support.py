"""What the sandbox tests share: backends with the reason why one cannot run here, live sandboxes, tasks on disk."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.task.config import EnvironmentConfig as TaskEnvironmentConfig
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

from harbor_trl.environments import docker, environment_for
from harbor_trl.environments._sandbox import check_available
from harbor_trl.environments.bubblewrap import BubblewrapEnvironment
from harbor_trl.environments.docker import FastDockerEnvironment
from harbor_trl.errors import SandboxUnavailableError

BASE_IMAGE = "debian:bookworm-slim"
BACKENDS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]


@functools.cache
def why_not(backend: str) -> str | None:
    """Why `backend` cannot run on this machine, or None."""
    if backend == "bubblewrap":
        try:
            check_available()
        except SandboxUnavailableError as error:
            return str(error)
        return None
    if not shutil.which("docker"):
        return "no docker command"
    for command, reason in (
        (["docker", "info"], "no Docker engine answers"),
        ([*FastDockerEnvironment.runtime().compose, "version"], "no Compose v2 plugin"),
        (["docker", "image", "inspect", BASE_IMAGE], f"no image {BASE_IMAGE}"),
    ):
        if subprocess.run(command, capture_output=True).returncode:
            return reason
    return None


def require(backend: str) -> None:
    if reason := why_not(backend):
        pytest.skip(reason)


@contextlib.contextmanager
def own_images() -> Iterator[None]:
    """Keep the images of these tests apart from a user's, and delete them."""
    usual = docker.IMAGE_REPOSITORY
    docker.IMAGE_REPOSITORY = f"harbor-trl-test-{uuid4().hex[:8]}"
    try:
        yield
    finally:
        docker.remove_task_images()
        docker.IMAGE_REPOSITORY = usual


def make_environment(
    backend: str,
    directory: Path,
    *,
    dockerfile: str = f"FROM {BASE_IMAGE}\nWORKDIR /work\n",
    files: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
    persistent_env: dict[str, str] | None = None,
    network: NetworkMode = NetworkMode.PUBLIC,
    allowed_hosts: list[str] | None = None,
    **config: Any,
) -> BaseEnvironment:
    """A Harbor environment that is not started."""
    context = directory / "task" / "environment"
    context.mkdir(parents=True, exist_ok=True)
    (context / "Dockerfile").write_text(dockerfile)
    for name, text in (files or {}).items():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(text)
    kind = BubblewrapEnvironment if backend == "bubblewrap" else FastDockerEnvironment
    return kind(
        environment_dir=context,
        environment_name="sandbox-test",
        session_id=f"sandbox-test-{uuid4().hex[:8]}__env",
        trial_paths=TrialPaths(directory / "trial"),
        task_env_config=TaskEnvironmentConfig(**config),
        network_policy=NetworkPolicy(network_mode=network, allowed_hosts=allowed_hosts or []),
        persistent_env=persistent_env,
        **(options or {}),
    )


class Live:
    """A sandbox driven from plain test code; its loop runs in a thread of its own."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def wait[T](self, coroutine: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def start(self) -> None:
        self.wait(self.environment.start(force_build=False))

    def exec(self, command: str, **kwargs: Any) -> ExecResult:
        return self.wait(self.environment.exec(command, **kwargs))

    def output(self, command: str, **kwargs: Any) -> str:
        """What a command that must succeed prints."""
        result = self.exec(command, **kwargs)
        assert result.return_code == 0, result
        return (result.stdout or "").strip("\n")

    def close(self) -> None:
        """End the loop; the sandbox, if it still runs, stays."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextlib.contextmanager
def running(environment: Any) -> Iterator[Live]:
    live = Live(environment)
    try:
        live.start()
        yield live
    finally:
        try:
            live.wait(environment.stop(delete=True))
        finally:
            live.close()


def host_processes(*words: str) -> list[int]:
    """Processes of this machine whose command line holds all of `words`, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(word in line for word in words):
                    found.append(int(name))
    return found


# --- whole trials -----------------------------------------------------------------------------------------------------


def write_task(directory: Path, *, config: str = "", solution: str, test: str, **more: str) -> Path:
    """A Harbor task; `more` maps paths (with `__` for `/`, `_dot_` for `.`) to further files' text."""
    files = {
        "task.toml": f'version = "1.0"\n{config}',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": f"FROM {BASE_IMAGE}\nWORKDIR /app\nCOPY data.txt ./\n",
        "environment/data.txt": "41\n",
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        **{name.replace("__", "/").replace("_dot_", "."): text for name, text in more.items()},
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


async def run_trial(task: Path, trials: Path, backend: str, **kwargs: Any) -> TrialResult:
    """One whole Harbor trial, with Harbor's oracle agent."""
    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=trials,
        trial_name=f"sandbox-test-{uuid4().hex[:8]}",
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig(**environment_for(backend, kwargs)),
    )
    trial = await Trial.create(config)
    return await trial.run()


# --- as an ordinary user ----------------------------------------------------------------------------------------------

NOBODY = 65534


def run_as_nobody(arguments: list[str], directory: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with `arguments` as an ordinary user; needs root.

    The interpreter, the packages and this checkout may lie below a directory that only root may enter. In a mount
    namespace of its own, such a directory is covered by an open one that holds just them.
    """
    script = Path(__file__).with_name("sandbox_nobody.py")
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    os.chown(directory, NOBODY, NOBODY)
    needed = [sys.base_prefix, sys.prefix, *(path for path in sys.path if os.path.isdir(path))]
    return subprocess.run(
        [sys.executable, str(script), str(directory), os.pathsep.join(needed), sys.executable, *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isdir(path))},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
