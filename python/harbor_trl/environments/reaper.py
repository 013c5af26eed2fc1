"""Removes a dead process's Docker containers: a detached process that waits for the end of its owner, however it ends.

Run as a script it needs the standard library only: `python reaper.py PREFIX` reads standard input until its end, then
removes every container, network and image of a compose project whose name begins with PREFIX.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_PROJECT = "com.docker.compose.project"
#: `docker` clients that the owner started go on for a while after it, so one clean look is not enough.
_CLEAN_SWEEPS = 3
_GIVE_UP_SEC = 60.0

_write_end: int | None = None


def start(prefix: str) -> None:
    """Watch over this process's compose projects; does nothing the second time.

    Args:
        prefix: How their names begin.
    """
    global _write_end
    if _write_end is not None:
        return
    read_end, _write_end = os.pipe()  # not inherited by programs we start, so it closes when this process ends
    subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), prefix],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C in the owner's terminal must not reach it
    )
    os.close(read_end)


def _forget_after_fork() -> None:
    global _write_end
    if _write_end is not None:
        os.close(_write_end)
        _write_end = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _docker(*arguments: str) -> list[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60).stdout.split()


def sweep(prefix: str) -> int:
    """Remove what is there now; returns how many things that was."""

    def ours(kind: list[str]) -> list[str]:
        rows = _docker(*kind, "--filter", f"label={_PROJECT}", "--format", f'{{{{.ID}}}}|{{{{.Label "{_PROJECT}"}}}}')
        return [row.split("|")[0] for row in rows if row.partition("|")[2].startswith(prefix)]

    if containers := ours(["ps", "-a"]):
        _docker("rm", "--force", "--volumes", *containers)
    if networks := ours(["network", "ls"]):
        _docker("network", "rm", *networks)
    if images := _docker("images", "--filter", f"reference={prefix}*", "--format", "{{.Repository}}:{{.Tag}}"):
        _docker("rmi", *images)
    return len(containers) + len(networks) + len(images)


def _main(prefix: str) -> None:
    sys.stdin.buffer.read()
    clean, ended = 0, time.monotonic()
    while clean < _CLEAN_SWEEPS and time.monotonic() - ended < _GIVE_UP_SEC:
        try:
            clean = 0 if sweep(prefix) else clean + 1
        except (OSError, subprocess.TimeoutExpired):
            clean = 0  # the engine may come back
        time.sleep(0.5)


if __name__ == "__main__":
    _main(sys.argv[1])
