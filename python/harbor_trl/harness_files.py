"""Harnesses in files outside any package, importable in every process that imports this package.

A class pickles as the name of its module and its own. A module loaded from `path/to/file.py` gets a name below this one
that spells the file's absolute path, so a fresh process that unpickles the class, or a factory made from it, finds the
file again: importing the parent of that name is what installs the finder.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

#: Submodules are looked for below a module that has a path; the finder answers for them, not these directories.
__path__: list[str] = []

_NAME = re.compile(rf"{re.escape(__name__)}\.[A-Za-z0-9_]*_x([0-9a-f]+)")
_VERSION = "__harbor_trl_file_version__"


def load(file: str | os.PathLike[str]) -> ModuleType:
    """The module in `file`; loaded again if the file has changed since.

    Raises:
        FileNotFoundError: There is no such file.
        Exception: Whatever the module raises when it is executed.
    """
    path = Path(file).expanduser().resolve(strict=True)
    name = _module_name(path)
    status = path.stat()
    version = (status.st_mtime_ns, status.st_size)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, _VERSION, version) == version:
        return loaded
    sys.modules.pop(name, None)
    module = importlib.import_module(name)
    setattr(module, _VERSION, version)
    return module


def _module_name(path: Path) -> str:
    readable = re.sub(r"\W", "_", path.stem, flags=re.ASCII)
    return f"{__name__}.{readable}_x{os.fsencode(path).hex()}"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        match = _NAME.fullmatch(fullname)
        if match is None:
            return None
        file = os.fsdecode(bytes.fromhex(match[1]))
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the source each time: cached bytecode is checked by seconds, in which a harness may have been edited."""

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        file = self.get_filename(fullname)
        return self.source_to_code(self.get_data(file), file)


sys.meta_path.insert(0, _Finder())
