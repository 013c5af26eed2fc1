"""How rollouts are run: what `HarborSpec` passes to each `HarborEnv`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

KeepTrials = Literal["failed", "all", "none"]


def did_you_mean(given: object, possible: Iterable[str]) -> str:
    """` Did you mean 'docker'?` for `'dockr'`; empty if nothing is like it."""
    import difflib

    by_folded = {name.casefold(): name for name in possible}
    close = difflib.get_close_matches(given.casefold(), by_folded, n=1) if isinstance(given, str) else []
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""


def integer(option: str, value: Any) -> int:
    """`value` as an int; a `TypeError` that names the option if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{option} takes integers, not {value!r} ({type(value).__name__}).") from None


def require_one_of(option: str, given: object, possible: Iterable[str]) -> None:
    """Raise a `ValueError` unless `given` is one of `possible`."""
    names = list(possible)
    if given not in names:
        listed = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
        raise ValueError(f"{option}={given!r}: use {listed}.{did_you_mean(given, names)}")


@dataclass(frozen=True)
class RolloutOptions:
    """Options of a rollout; plain values, so that it pickles.

    Args:
        environment_kwargs: Handed to Harbor's `EnvironmentConfig` (`env`, `kwargs`, `override_cpus`, ...).
        reward_key: Which key of the verifier's rewards is the scalar. Default: `reward`, else the only key.
        trials_dir: Directory of the trial directories. Default: `harbor-trl-trials` in the working directory.
        keep_trials: Which trial directories stay after the trial: `"failed"`, `"all"` or `"none"`.
        max_sandboxes: Sandboxes of this process that may exist at once. Default: no limit of our own; starts are
            throttled to what one machine bears. It must be at least the number of rollouts a rank generates at once.
        start_timeout: Seconds from `reset` to a sandbox that is up and healthy. Default: the task's own build timeout.
        repair_copies: Put the files that a Dockerfile COPYs into the sandbox after its start. Default: on backends that
            are known to drop them (`repair.DROPPING_BACKENDS`).
        output_limit: Characters of output that a tool call returns: half from its beginning, half from its end.
        give_up_after: End the run with an error when this many rollouts of a process have failed, none for a reason
            that a policy can cause, and none has had a verdict. None: never.

    Raises:
        ValueError: A value is out of range.
    """

    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_key: str | None = None
    trials_dir: str | None = None
    keep_trials: KeepTrials = "failed"
    max_sandboxes: int | None = None
    start_timeout: float | None = None
    repair_copies: bool | None = None
    output_limit: int = 8000
    give_up_after: int | None = 32

    def __post_init__(self) -> None:
        require_one_of("keep_trials", self.keep_trials, get_args(KeepTrials))
        for option, least, otherwise in (
            ("max_sandboxes", 1, ", or None for no limit"),
            ("give_up_after", 1, ", or None for never"),
            ("output_limit", 200, " characters"),
        ):
            value = getattr(self, option)
            if (value is not None or option == "output_limit") and integer(option, value) < least:
                raise ValueError(f"{option}={value}: use {least} or more{otherwise}.")
        seconds = self.start_timeout
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise ValueError(f"start_timeout={seconds!r}: use seconds above 0, or None for the task's own.")
        if not isinstance(self.environment_kwargs, Mapping):
            example = {"kwargs": {"memory_mb": 1024}}
            raise TypeError(f"environment_kwargs={self.environment_kwargs!r}: use a mapping, such as {example}.")
