"""The host's side of moving files in and out of a bubblewrap sandbox.

The format is that of `_supervisor.py`: kind (1 byte), mode (4), length of the path (4), path; for `f` chunks of length
(4) and data up to a length of 0; for `l` length (4) and target; `.` ends it. It is not tar because it has to say less:
no devices, no absolute names, and what comes out of a sandbox is not to be trusted.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from harbor_trl.dockerfile import Entry
from harbor_trl.environments.dockerfile_subset import owner_of

CHUNK = 1 << 18


class TransferError(RuntimeError):
    """What came out of the sandbox is not a transfer."""


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _pack_file(out: BinaryIO, path: Path, name: bytes, mode: int | None = None) -> None:
    with path.open("rb") as file:
        actual = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        out.write(b"f" + _number(actual if mode is None else mode) + _number(len(name)) + name)
        while chunk := file.read(CHUNK):
            out.write(_number(len(chunk)) + chunk)
        out.write(_number(0))


def pack_file(out: BinaryIO, path: Path) -> None:
    """Write the file at `path` (a link is followed) as a transfer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(22, "not a regular file", str(path))
    _pack_file(out, path, b"")
    out.write(b".")
    out.seek(0)


def pack_directory(out: BinaryIO, directory: Path) -> None:
    """Write what `directory` holds as a transfer. Links stay links; sockets, pipes and devices are left out."""
    queue = [(os.fsencode(directory), b"")]
    while queue:
        path, prefix = queue.pop()
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                name = prefix + entry.name
                if entry.is_symlink():
                    target = os.readlink(entry.path)
                    out.write(b"l" + _number(0) + _number(len(name)) + name + _number(len(target)) + target)
                elif entry.is_dir(follow_symlinks=False):
                    own = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
                    out.write(b"d" + _number(own) + _number(len(name)) + name)
                    queue.append((entry.path, name + b"/"))
                elif entry.is_file(follow_symlinks=False):
                    _pack_file(out, Path(os.fsdecode(entry.path)), name)
    out.write(b".")
    out.seek(0)


def pack_entries(out: BinaryIO, context: Path, entries: Iterable[Entry]) -> None:
    """Write what COPY brings out of `context`, in order; what stands in the way is replaced as a build would."""
    for entry in entries:
        name = os.fsencode(entry.destination.lstrip("/")) or b"."
        mode = entry.mode or 0
        if entry.if_directory is not None:
            instead = os.fsencode(entry.if_directory.lstrip("/"))
            out.write(b"i" + _number(0) + _number(len(instead)) + instead)
        if entry.kind == "directory":
            out.write((b"m" if entry.if_missing else b"d") + _number(mode) + _number(len(name)) + name)
        elif entry.kind == "symlink":
            target = os.fsencode(entry.link or "")
            out.write(b"l" + _number(0) + _number(len(name)) + name + _number(len(target)) + target)
        elif entry.content is not None:
            out.write(b"f" + _number(mode) + _number(len(name)) + name)
            if entry.content:
                out.write(_number(len(entry.content)) + entry.content)
            out.write(_number(0))
        else:
            _pack_file(out, context / (entry.source or ""), name, mode)
        if (owner := owner_of(entry)) != (0, 0):
            ids = b"%d:%d" % owner
            out.write(b"o" + _number(mode) + _number(len(ids)) + ids)
    out.write(b".")
    out.seek(0)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise TransferError("the transfer ends too early")
    return data


def _sized(file: BinaryIO, most: int) -> bytes:
    size = int.from_bytes(_exactly(file, 4), "big")
    if size > most:
        raise TransferError("the transfer holds a name that is too long")
    return _exactly(file, size)


def _copy_chunks(file: BinaryIO, out: BinaryIO) -> None:
    while chunk := _sized(file, CHUNK):
        out.write(chunk)


def unpack_file(file: BinaryIO, target: Path) -> None:
    """Write the one file of a transfer to `target`; a link that stands there is replaced, never followed."""
    file.seek(0)
    if _exactly(file, 1) != b"f":
        raise TransferError("the transfer holds no file")
    mode = int.from_bytes(_exactly(file, 4), "big")
    _sized(file, 0)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    with open(_create(os.fsencode(target), mode, None), "wb") as out:
        _copy_chunks(file, out)


def unpack_directory(file: BinaryIO, target: Path) -> list[str]:
    """Write a transfer below the directory `target`, and nowhere else.

    No component of a path is followed when it is a link, whoever put it there. A link is kept only if it cannot lead
    out of `target`.

    Returns:
        The paths of the links that were left out.
    """
    file.seek(0)
    left_out: list[str] = []
    with Unpacking(target) as unpacking:
        while (kind := _exactly(file, 1)) != b".":
            mode = int.from_bytes(_exactly(file, 4), "big")
            path = _sized(file, 1 << 16)
            if kind == b"d":
                unpacking.directory(path)
            elif kind == b"l":
                if not unpacking.link(path, _sized(file, 1 << 16)):
                    left_out.append(os.fsdecode(path))
            elif kind == b"f":
                with unpacking.file(path, mode) as out:
                    _copy_chunks(file, out)
            else:
                raise TransferError(f"the transfer holds a record of kind {kind!r}")
    return left_out


class Unpacking:
    """Makes files, directories and links below `target`, which is made if need be, and nowhere else.

    No component of a path is followed when it is a link, whoever put it there.

    Raises:
        TransferError: A path is absolute or holds `..`.
    """

    def __init__(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        self._root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._parent = os.dup(self._root)
        self._parent_names: list[bytes] = []

    def __enter__(self) -> Unpacking:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._parent)
        os.close(self._root)

    def _names(self, path: bytes) -> list[bytes]:
        names = path.rstrip(b"/").split(b"/")
        if any(one in (b"", b".", b"..") or b"\0" in one for one in names):
            raise TransferError(f"the transfer holds the path {path!r}")
        return names

    def _at(self, path: bytes) -> tuple[int, bytes]:
        *names, name = self._names(path)
        if names != self._parent_names:
            parent = _walk(self._root, names)
            os.close(self._parent)
            self._parent, self._parent_names = parent, names
        return self._parent, name

    def directory(self, path: bytes) -> None:
        os.close(_enter(*self._at(path)))

    def file(self, path: bytes, mode: int) -> BinaryIO:
        parent, name = self._at(path)
        _remove(parent, name)
        return open(_create(name, mode, parent), "wb")

    def link(self, path: bytes, to: bytes) -> bool:
        """False if it could lead out of the target: then it is not made."""
        parent, name = self._at(path)
        if not _stays_inside(to, len(self._parent_names)):
            return False
        _remove(parent, name)
        os.symlink(to, name, dir_fd=parent)
        return True

    def hard_link(self, path: bytes, to: bytes) -> None:
        *names, name = self._names(to)
        directory = _walk(self._root, names)
        try:
            parent, own_name = self._at(path)
            _remove(parent, own_name)
            os.link(name, own_name, src_dir_fd=directory, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(directory)


def _create(name: bytes, mode: int, parent: int | None) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # The owner must be able to read what was downloaded; set-id bits have no business on the host.
    return os.open(name, flags, (mode & 0o755) | 0o600, dir_fd=parent)


def _remove(parent: int, name: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _enter(parent: int, name: bytes) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
    os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def _walk(root: int, names: list[bytes]) -> int:
    here = os.dup(root)
    for name in names:
        try:
            deeper = _enter(here, name)
        finally:
            os.close(here)
        here = deeper
    return here


def _stays_inside(link: bytes, depth: int) -> bool:
    """Whether a link in a directory `depth` levels down stays inside.

    `..` counts only at the front: there it climbs real directories. After a name it might climb out of what that name
    links to.
    """
    if link.startswith(b"/") or not link:
        return False
    parts = [part for part in link.split(b"/") if part not in (b"", b".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == b"..":
        climbs += 1
    return climbs <= depth and b".." not in parts[climbs:]
