"""Puts COPY'd files back into sandboxes of backends that drop them.

Some backends build an image from a Dockerfile without its build context, so that COPY and ADD leave nothing. Only they
are repaired (`needs_repair`), or what a user asks for; and never a file that a later RUN may have touched: in thousands
of public tasks that file is the patch that gives the answer away.
"""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harbor_trl.dockerfile import CopyPlan, Entry
from harbor_trl.errors import SandboxUnavailableError

__all__ = ["RepairReport", "needs_repair", "repair_copies"]

DROPPING_BACKENDS = frozenset({"e2b"})
"""Harbor environment types whose image builds are known to drop COPY'd files."""


class Sandbox(Protocol):
    """The part of Harbor's `BaseEnvironment` that a repair needs."""

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> Any: ...

    async def exec(self, command: str, *, user: str | int | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did."""

    offered: tuple[Entry, ...]
    """Uploaded; put in place unless something stood there already."""
    withheld: tuple[Entry, ...]
    """Not put back: touched by a later instruction, or nothing that can be uploaded (archives, devices)."""


def needs_repair(environment_type: str) -> bool:
    """Whether this Harbor environment type is known to drop COPY'd files."""
    return environment_type in DROPPING_BACKENDS


async def repair_copies(
    environment: Sandbox, plan: CopyPlan, context: Path | str, *, exec_user: str | int | None = "root"
) -> RepairReport:
    """Uploads what `plan` copies and no later RUN may have touched, with modes and owners.

    Files go to a directory under /tmp as the sandbox's own user, then into place as `exec_user`, which should be root.
    What already stands at a destination stays as it is.

    Args:
        environment: A started Harbor environment.
        plan: The plan of the sandbox's Dockerfile.
        context: The build context that the plan was made from.
        exec_user: Who puts the files in place; None: the sandbox's own user.

    Raises:
        SandboxUnavailableError: The files could not be put in place; holds the command's output.
    """
    final = {entry.destination: entry for entry in plan.entries}
    offered = [
        entry for entry in final.values() if entry.touched is None and entry.kind in ("file", "directory", "symlink")
    ]
    withheld = tuple(entry for entry in final.values() if entry not in offered)
    if not any(entry.kind != "directory" or not entry.if_missing for entry in offered):
        return RepairReport((), withheld)
    with tempfile.TemporaryDirectory(prefix="harbor-trl-copies-") as directory:
        local = Path(directory)
        remote = f"/tmp/{local.name}"
        lines = ["set -eu", f"cd {remote}"]
        for index, entry in enumerate(offered):
            if entry.kind == "file":
                content = entry.content
                if content is None:
                    content = (Path(context) / (entry.source or "")).read_bytes()
                (local / str(index)).write_bytes(content)
            lines.append(_place(entry, str(index)))
        (local / "place.sh").write_text("\n".join([*lines, ""]))
        await environment.upload_dir(local, remote)
    result = await environment.exec(f"sh {remote}/place.sh && rm -rf {remote}", user=exec_user)
    if result.return_code != 0:
        output = "\n".join(text for text in (result.stdout, result.stderr) if text).strip()
        raise SandboxUnavailableError(
            f"COPY repair: the files could not be put in place (exit status {result.return_code}): {output[-1000:]}"
        )
    return RepairReport(tuple(offered), withheld)


def _place(entry: Entry, upload: str) -> str:
    """Shell that puts one entry in place unless something is there."""
    target = shlex.quote(entry.destination)
    metadata = ""
    if entry.owner is not None:
        metadata += f'; chown -h {shlex.quote(entry.owner)} "$t"'
    # After chown, which clears set-id bits.
    if entry.mode is not None:
        metadata += f'; chmod {entry.mode:o} "$t"'
    lines = [f"t={target}"]
    if entry.if_directory is not None:
        lines.append(f'if [ -d "$t" ]; then t={shlex.quote(entry.if_directory)}; fi')
    lines.append('mkdir -p "$(dirname "$t")"')
    if entry.kind == "directory":
        make = 'mkdir "$t"'
    elif entry.kind == "symlink":
        make = f'ln -s {shlex.quote(entry.link or "")} "$t"'
    else:
        make = f'cp {upload} "$t"'
    lines.append(f'if ! [ -e "$t" ] && ! [ -L "$t" ]; then {make}{metadata}; fi')
    return "\n".join(lines)
