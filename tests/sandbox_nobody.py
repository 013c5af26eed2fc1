"""Become an ordinary user that can still reach the interpreter and its packages, then run a command.

python sandbox_nobody.py DIRECTORY PATHS COMMAND…
"""

from __future__ import annotations

import ctypes
import os
import sys

NOBODY = 65534
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    values = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    if libc.mount(values[0], values[1], values[2], ctypes.c_ulong(flags), values[3]):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def closed_ancestor(path: str) -> str | None:
    """The topmost directory on the way to `path` that only its owner may enter."""
    parts = path.strip("/").split("/")
    for end in range(1, len(parts) + 1):
        directory = "/" + "/".join(parts[:end])
        if os.path.isdir(directory) and not os.stat(directory).st_mode & 0o001:
            return directory
    return None


def main() -> None:
    directory, paths, *command = sys.argv[1:]
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    closed: dict[str, list[tuple[str, int]]] = {}
    for path in sorted({os.path.abspath(one) for one in paths.split(os.pathsep)}):
        ancestor = closed_ancestor(path)
        if ancestor is None or ancestor == path:
            continue
        if not any(path.startswith(other + "/") for other, _ in closed.get(ancestor, [])):
            closed.setdefault(ancestor, []).append((path, os.open(path, os.O_PATH)))
    for ancestor, inside in closed.items():
        mount("tmpfs", ancestor, "tmpfs", 0, "size=1m,mode=0755")
        for path, descriptor in inside:
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
            os.close(descriptor)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir(directory)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
