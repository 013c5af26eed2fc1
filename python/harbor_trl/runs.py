"""Which runs are alive: each holds the lock on a file of its own for as long as its process lives.

A run is one process that trains. Its id begins the names of all that it makes in Docker.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


def run_directory() -> Path:
    """Where this user's runs have their files."""
    return Path(tempfile.gettempdir()) / f"harbor-trl-runs-{os.getuid()}"


def hold_run(run_id: str) -> int | None:
    """Create and lock the file of a run, for as long as this process lives; its descriptor, None if that failed."""
    try:
        directory = run_directory()
        directory.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(directory / run_id, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return descriptor


def release_run(run_id: str, descriptor: int | None) -> None:
    """Remove the file of a run that is over."""
    if descriptor is not None:
        (run_directory() / run_id).unlink(missing_ok=True)
        os.close(descriptor)


def is_alive(run_id: str) -> bool | None:
    """Whether a run is alive on this machine; None if nothing is known of it."""
    if _has_reaper(run_id):
        return True
    known = None
    for file in Path(tempfile.gettempdir()).glob(f"harbor-trl-runs-*/{run_id}"):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        known = False
    return known


def _has_reaper(run_id: str) -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if run_id.encode() in words and any(word.endswith(b"reaper.py") for word in words):
            return True
    return False
