"""Errors of this package: each is a `HarborTrlError` and also the builtin that fits.

A message says what is wrong, where (file, line, column) and what to do about it.
"""

from __future__ import annotations

import os


class HarborTrlError(Exception):
    """Base of every error that this package raises on purpose."""


class SuiteError(HarborTrlError, ValueError):
    """A suite holds no task, or tasks that cannot be used; or a selection of tasks does not fit the suite."""


class HubError(HarborTrlError, OSError):
    """A suite could not be listed or downloaded from the Hugging Face hub."""


class HarnessError(HarborTrlError, ValueError):
    """`agent=` names no harness."""


class HarnessTypeError(HarborTrlError, TypeError):
    """`agent=` names something that is not a `HarborEnv` subclass."""


class SandboxUnavailableError(HarborTrlError, RuntimeError):
    """A sandbox backend cannot run on this machine (missing engine, kernel setting, platform)."""


class SandboxNotAnsweringError(HarborTrlError, TimeoutError):
    """A sandbox gave no answer within the time a command may take plus the time to end it."""


class SandboxFileError(HarborTrlError, OSError):
    """A file in a sandbox could not be read or written."""


class RewardKeyError(HarborTrlError, LookupError):
    """A verifier gives several rewards, and which one is the scalar was not said."""


class NothingWorksError(HarborTrlError, RuntimeError):
    """The first rollouts of a run all failed for reasons that no policy can have caused."""


class NoEnvironmentsError(HarborTrlError, RuntimeError):
    """A trainer called the reward function of `HarborSpec` without the rollouts that it is to judge."""


class TrlVersionError(HarborTrlError, ImportError):
    """The installed TRL lacks what `harbor_trl.async_grpo` builds on."""


class SandboxLostError(HarborTrlError, RuntimeError):
    """A harness asked for the sandbox of a rollout that has none (any more)."""


class UnsupportedTaskError(HarborTrlError, ValueError):
    """A task needs something that the chosen sandbox backend cannot honour.

    `file` and `line` say what asks for it (line 0: the file as a whole), `reason` why it cannot be had.
    """

    def __init__(
        self, message: str, *, file: str | os.PathLike[str] | None = None, line: int = 0, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.reason = message if reason is None else reason


class DockerfileError(HarborTrlError, ValueError):
    """A Dockerfile that no build accepts.

    `code` is short and stable, `line` the first line of the instruction (0: the file as a whole), `column` where on
    that line, if it could be found.
    """

    def __init__(self, message: str, *, code: str, line: int, column: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.line = line
        self.column = column
