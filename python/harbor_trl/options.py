"""What may be set about a rollout beyond its task, its harness and its backend."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

KeepTrials = Literal["failed", "all", "none"]


@dataclass(frozen=True)
class RolloutOptions:
    """Options of a rollout. They travel to worker processes inside the environment factory, so all of them pickle.

    Args:
        environment_kwargs: Options of the sandbox backend, handed to Harbor's `EnvironmentConfig` as `kwargs`.
        reward_key: Which key of a reward dict is the scalar. `None`: `reward`, or else the only key.
        trials_dir: Directory for trial directories. `None`: decided where rollouts run.
        keep_trials: Which trial directories stay after a rollout.
        max_sandboxes: Sandboxes that may be up at the same time. `None`: decided from the machine.
        start_timeout: Seconds that a sandbox may take to start. `None`: the task's own build timeout.
        output_limit: Characters of a command's output that a tool returns.

    Raises:
        TypeError: `environment_kwargs` is no mapping with string keys, or does not pickle.
        ValueError: A limit is not positive, or `keep_trials` is none of the three.
    """

    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_key: str | None = None
    trials_dir: str | None = None
    keep_trials: KeepTrials = "failed"
    max_sandboxes: int | None = None
    start_timeout: float | None = None
    output_limit: int = 8000

    def __post_init__(self) -> None:
        kwargs = self.environment_kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise TypeError(f"environment_kwargs must map option names to values, got {kwargs!r}")
        # A plain dict of its own: a caller's later changes must not reach rollouts under way.
        object.__setattr__(self, "environment_kwargs", dict(kwargs))
        try:
            pickle.dumps(self.environment_kwargs)
        except Exception as error:
            raise TypeError(
                f"environment_kwargs must pickle, because rollouts may run in another process: {error}"
            ) from error
        if self.trials_dir is not None:
            object.__setattr__(self, "trials_dir", str(self.trials_dir))
        if self.keep_trials not in get_args(KeepTrials):
            raise ValueError(f"keep_trials must be one of {', '.join(get_args(KeepTrials))}, got {self.keep_trials!r}")
        for name in ("max_sandboxes", "start_timeout", "output_limit"):
            value = getattr(self, name)
            if value is None and name != "output_limit":
                continue
            numbers = (int, float) if name == "start_timeout" else int
            if isinstance(value, bool) or not isinstance(value, numbers) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
