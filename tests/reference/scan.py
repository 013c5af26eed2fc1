"""Which tasks a suite has, and in which order: the rules of `harbor_trl.suite`, slowly, with `pathlib`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Scan(NamedTuple):
    tasks: list[Path]
    """Below the root, in order."""
    problems: set[tuple[Path, str]]
    """Below the root, and the kind."""


def scan(root: Path) -> Scan:
    real_root = root.resolve()
    tasks: list[Path] = []
    problems: set[tuple[Path, str]] = set()
    links: list[Path] = []
    seen: set[Path] = set()
    real_tasks: set[Path] = set()

    def visit(path: Path) -> None:
        real = path.resolve()
        if real in seen:
            return
        seen.add(real)
        toml = path / "task.toml"
        # A pipe, a device, a link to nothing: a broken task, but a task. A directory may have any name.
        if os.path.lexists(toml) and not os.path.isdir(toml):
            tasks.append(path)
            real_tasks.add(real)
            return
        for child in path.iterdir():
            if child.name.startswith("."):
                continue
            if child.is_symlink():
                look_at_link(child)
            elif child.is_dir():
                visit(child)

    def look_at_link(link: Path) -> None:
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            problems.add((link, "broken-link" if isinstance(error, FileNotFoundError | NotADirectoryError) else "loop"))
            return
        if target.is_dir():
            links.append(link)

    visit(root)
    # Real directories come first, so that a directory's own name wins over a link's.
    while links:
        link = min(links)
        links.remove(link)
        target = link.resolve()
        if link.parent.resolve().is_relative_to(target) or real_root.is_relative_to(target):
            problems.add((link, "loop"))
        elif target in seen or any(above in real_tasks for above in target.parents):
            problems.add((link, "again"))
        else:
            if not target.is_relative_to(real_root):
                problems.add((link, "outside"))
            visit(link)
    below = [task.relative_to(root) for task in sorted(tasks)]
    return Scan(below, {(path.relative_to(root), kind) for path, kind in problems})
