"""Whether a backend is up: a sandbox that failed is its policy's doing only if the backend still serves others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

_PROBE_TIMEOUT_SEC = 10
_MAX_PEERS = 4


async def backend_is_up(environment: BaseEnvironment, peers: Sequence[BaseEnvironment], *, starts_fail: bool) -> bool:
    """Ask the engine where there is one, else the sandboxes of other rollouts.

    Args:
        environment: The sandbox that failed.
        peers: Live sandboxes of other rollouts on the same backend.
        starts_fail: Whether the latest starts on this backend failed.
    """
    kind = environment.type()
    if kind == "bubblewrap":  # the backend is this kernel, and the process that sandboxes are forked from
        return bool(getattr(environment, "launcher_is_alive", True))
    if kind in ("docker", "podman"):
        return await _engine_answers(kind)
    answers = await asyncio.gather(*(_answers(peer) for peer in peers[:_MAX_PEERS]))
    # One silent peer may be broken by its own policy, like the sandbox in question; starts that fail are not.
    return any(answers) or (len(answers) < 2 and not starts_fail)


async def _engine_answers(cli: str) -> bool:
    try:
        process = await asyncio.create_subprocess_exec(
            cli, "version", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_SEC):
            return await process.wait() == 0
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            process.kill()
        return False


async def _answers(environment: BaseEnvironment) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_SEC + 5):
            return (await environment.exec("true", timeout_sec=_PROBE_TIMEOUT_SEC)).return_code == 0
    except Exception:
        return False  # whatever it raises: no answer
