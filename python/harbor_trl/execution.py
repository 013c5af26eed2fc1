"""Running one command in a sandbox: bounded in time and output, whatever the command does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

#: Characters of output that a tool returns by default: half from the beginning, half from the end.
DEFAULT_OUTPUT_LIMIT = 8_000


class CommandResult(NamedTuple):
    """What a command did: the text for the model, and what the text does not say to a program."""

    text: str
    return_code: int
    timed_out: bool = False


async def run_command(
    environment: BaseEnvironment,
    command: str,
    *,
    timeout_sec: float = 180,
    output_limit: int = DEFAULT_OUTPUT_LIMIT,
) -> CommandResult:
    """Run `command` in `environment` as its default user.

    Args:
        environment: Harbor's live environment.
        command: Shell command, handed to `bash -c` by Harbor.
        timeout_sec: Seconds after which the command is killed.
        output_limit: Characters of output to keep.

    Raises:
        Exception: Whatever the backend raises when the sandbox does not answer; the caller decides what that means.
    """
    result = await environment.exec(command, timeout_sec=int(timeout_sec))
    text = (result.stdout or "") + (result.stderr or "")
    if len(text) > output_limit:
        half = output_limit // 2
        text = f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"
    return CommandResult(text or f"(empty output, rc={result.return_code})", result.return_code)
