"""Whether a disk of this machine is full, and whether one sandbox can have filled it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from pathlib import Path

#: Space without which a disk is called full: what a verifier may leave is no more than a few such pieces.
_NEEDED_BYTES = 1 << 20
#: Files of a trial that are looked at; a policy may have left a million.
_MAX_FILES = 100_000
_DOCKER_TIMEOUT_SEC = 60


def full_directory(trial_dir: Path) -> Path | None:
    """A directory that a trial writes to whose disk (or quota) is full: its own, or that of temporary files."""
    try:
        directories = [trial_dir, Path(tempfile.gettempdir())]
    except FileNotFoundError:  # Python found no directory in which it can write a few bytes
        return Path("/tmp")
    for directory in directories:
        existing = next((one for one in (directory, *directory.parents) if one.is_dir()), None)
        if existing is not None and _is_full(existing):
            return existing
    return None


def _is_full(directory: Path) -> bool:
    # Taking the space also knows quotas and what is reserved for root; statvfs doesn't.
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="harbor-trl-") as file:
            file.write(bytes(_NEEDED_BYTES))
            file.flush()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def bytes_below(directory: Path) -> int:
    """The space that the files below a directory take, links not followed; of the first 100,000 files at least."""
    total = files = 0
    for parent, directories, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
        files += len(names) + len(directories)
        if files > _MAX_FILES:
            break
    return total


async def container_bytes(name: str) -> int:
    """What the Docker containers whose names begin with `name` have written to their own disks; 0 if none is left."""
    try:
        async with asyncio.timeout(_DOCKER_TIMEOUT_SEC):
            containers = (await _docker("ps", "--all", "--quiet", "--filter", f"name=^{name}")).split()
            if not containers:
                return 0
            sizes = await _docker("inspect", "--size", "--format", "{{.SizeRw}}", *containers)
            return sum(int(size) for size in sizes.split() if size.isdigit())
    except (OSError, TimeoutError):
        return 0


async def _docker(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            process.kill()
        raise
    return output.decode(errors="replace")
