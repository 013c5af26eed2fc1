"""The reward function that `HarborSpec.reward_funcs` hands to the trainer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from harbor_trl.env import HarborEnv
from harbor_trl.errors import NoEnvironmentsError

logger = logging.getLogger(__name__)


def outcome_reward(
    environments: Sequence[Any] | None = None,
    environment_reward: Sequence[float | None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """The verifier's scalar of each rollout.

    All verifiers run at once. Where the trainer passes `log_metric`, it also logs what share of the rollouts failed, by
    kind, and the seconds spent on starting and verifying. Rollouts that are left out are a warning of each batch.

    Args:
        environments: The environments, one a rollout, from `GRPOTrainer` and `HarborAsyncGRPOTrainer`.
        environment_reward: Rewards that the rollout worker took already, one a rollout.
        log_metric: The trainer's logger of scalars.
        columns: The dataset's columns; not used.

    Returns:
        One reward a rollout; None leaves it out of its group.

    Raises:
        RewardKeyError: A verifier gives several rewards, and `reward_key` does not say which is meant.
        NothingWorksError: `give_up_after` rollouts have failed, and none has not.
        NoEnvironmentsError: The trainer passes neither environments nor rewards, as TRL's own `AsyncGRPOTrainer`.
    """
    if environment_reward is not None:
        return [None if reward is None else float(reward) for reward in environment_reward]
    if environments is None:
        # All None would be a run that learns nothing and does not say so.
        raise NoEnvironmentsError(
            "The trainer passed no environments to HarborSpec.reward_funcs. TRL's AsyncGRPOTrainer does not: use "
            "`from harbor_trl.async_grpo import HarborAsyncGRPOTrainer`, which takes the same arguments and does."
        )
    ours = [env for env in environments if isinstance(env, HarborEnv)]
    for env in ours:
        env._finish()
    rewards = [env.reward if isinstance(env, HarborEnv) else None for env in environments]
    if log_metric is not None:
        for name, value in rollout_metrics(ours).items():
            log_metric(name, value)
    _warn_of_masked(ours)
    return rewards


def _warn_of_masked(environments: Sequence[HarborEnv]) -> None:
    masked = [failure for env in environments if (failure := env._failure) is not None and failure.kind.masked]
    if masked:
        kinds = Counter(failure.kind for failure in masked).most_common()
        logger.warning(
            "%d of %d rollouts have no reward and are left out: %s; such as: %s",
            len(masked),
            len(environments),
            ", ".join(f"{count} {kind}" for kind, count in kinds),
            masked[0].message,
        )


def rollout_metrics(environments: Sequence[HarborEnv]) -> dict[str, float]:
    """What the trainer's log says about a batch of finished rollouts: shares in 0..1 and mean seconds.

    Every kind of failure is in it, also at 0: the trainer averages over the ranks that logged a name, so a rank without
    a failure must say 0.
    """
    from harbor_trl.rollout import FailureKind

    rollouts = [env._rollout for env in environments if env._rollout is not None]
    if not rollouts:
        return {}
    failures = [env._failure for env in environments]
    kinds = [failure.kind for failure in failures if failure is not None]
    count = len(rollouts)
    return {
        "harbor/failed": len(kinds) / count,
        "harbor/masked": sum(kind.masked for kind in kinds) / count,
        **{f"harbor/failed/{kind}": kinds.count(kind) / count for kind in FailureKind},
        "harbor/start_seconds": sum(rollout.timings.start for rollout in rollouts) / count,
        "harbor/verify_seconds": sum(rollout.timings.verify for rollout in rollouts) / count,
    }
