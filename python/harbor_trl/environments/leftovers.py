"""What runs that are over left behind in Docker: after a crash of the machine, or when even their reaper was killed.

The names of a run's compose projects begin with its id; `harbor_trl.runs` knows whether it is alive. Of a run that
nothing is known of (started on another machine, or its file was cleaned away) nothing is removed while one of its
containers runs, or that is younger than an hour.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harbor_trl.errors import SandboxUnavailableError
from harbor_trl.runs import is_alive, run_directory

_PROJECT = "com.docker.compose.project"
_RUN = re.compile(r"(ht[0-9a-f]{8})-")
_IMAGE_REPOSITORY = "harbor-trl-task"
_YOUNG = datetime.timedelta(hours=1)


class Leftover(NamedTuple):
    """Something of a run that is over: removed, or kept because of a problem."""

    kind: str
    """`container`, `network` or `image`."""
    name: str
    run: str | None
    problem: str | None


@dataclass
class _Run:
    containers: list[dict[str, Any]] = field(default_factory=list)
    networks: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)

    def is_quiet(self) -> bool:
        """Neither running nor young."""
        now = datetime.datetime.now(datetime.UTC)
        things = [*self.containers, *self.networks]
        created = [_time(thing["Created"]) for thing in things]
        running = any(container["State"]["Running"] for container in self.containers)
        return not running and all(now - one > _YOUNG for one in created)


def remove(*, images: bool = False) -> Iterator[Leftover]:
    """Remove what is left of runs that are over, and say what that was.

    Args:
        images: Also the images that rollouts of later runs would share, unless a container uses them.

    Raises:
        SandboxUnavailableError: No Docker engine answers.
    """
    for run_id, run in sorted(_runs().items()):
        alive = is_alive(run_id)
        if alive or (alive is None and not run.is_quiet()):
            continue
        for container in run.containers:
            yield _removed(
                "container", run_id, container["Name"].lstrip("/"), "rm", "--force", "--volumes", container["Id"]
            )
        for network in run.networks:
            yield _removed("network", run_id, network["Name"], "network", "rm", network["Id"])
        for image in run.images:
            for tag in image["RepoTags"] or []:
                if _RUN.match(tag):
                    yield _removed("image", run_id, tag, "rmi", tag)
    for file in run_directory().glob("ht*"):
        if is_alive(file.name) is False:
            file.unlink(missing_ok=True)
    if images:
        for name in _docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", _IMAGE_REPOSITORY).split():
            yield _removed("image", None, name, "image", "rm", name)


def _runs() -> dict[str, _Run]:
    runs: dict[str, _Run] = defaultdict(_Run)
    label = f"label={_PROJECT}"
    for container in _inspect("container", _docker("ps", "-aq", "--no-trunc", "--filter", label).split()):
        if found := _RUN.match(container["Config"]["Labels"].get(_PROJECT, "")):
            runs[found[1]].containers.append(container)
    for network in _inspect("network", _docker("network", "ls", "-q", "--no-trunc", "--filter", label).split()):
        if found := _RUN.match(network["Labels"].get(_PROJECT, "")):
            runs[found[1]].networks.append(network)
    names = _docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "--filter", "reference=ht????????-*").split()
    for image in _inspect("image", [name for name in names if _RUN.match(name)]):
        for run_id in {found[1] for tag in image["RepoTags"] or [] if (found := _RUN.match(tag))}:
            runs[run_id].images.append(image)
    return runs


def _inspect(kind: str, names: list[str]) -> list[dict[str, Any]]:
    if not names:
        return []
    # What ended meanwhile is not in the answer, and makes the command fail.
    done = subprocess.run(["docker", kind, "inspect", *names], capture_output=True, text=True, timeout=60)
    found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return found


def _removed(kind: str, run_id: str | None, name: str, *command: str) -> Leftover:
    done = subprocess.run(["docker", *command], capture_output=True, text=True, timeout=60)
    return Leftover(kind, name, run_id, None if done.returncode == 0 else done.stderr.strip())


def _docker(*arguments: str) -> str:
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailableError(f"No Docker engine answers: {error}") from error
    if done.returncode != 0:
        raise SandboxUnavailableError(f"No Docker engine answers: {done.stderr.strip()}")
    return done.stdout


def _time(text: str) -> datetime.datetime:
    """Docker writes nine digits behind the point, and Python reads six."""
    return datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
