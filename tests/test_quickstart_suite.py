"""Every task of the quickstart suite: Harbor's own oracle solves it, and doing nothing does not, in both sandboxes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from harbor_trl.environments import environment_for
from tiny_model import QUICKSTART

TASKS = sorted(path.name for path in (QUICKSTART / "tasks").iterdir())


def run_trials(suite: Path, environment: str, agent: str, trials: Path, at_once: int) -> dict[str, float | None]:
    """The reward of each task of `suite` under one of Harbor's own agents."""

    async def reward_of(name: str, turn: asyncio.Semaphore) -> float | None:
        async with turn:
            trial = await Trial.create(
                TrialConfig(
                    task=TaskConfig(path=suite / name),
                    trials_dir=trials,
                    trial_name=f"{agent}-{name}",
                    agent=AgentConfig(name=agent),
                    environment=EnvironmentConfig(**environment_for(environment)),
                )
            )
            result = await trial.run()
            assert result.exception_info is None, result.exception_info
            return result.verifier_result.rewards["reward"]

    async def all_rewards() -> list[float | None]:
        turn = asyncio.Semaphore(at_once)
        return await asyncio.gather(*(reward_of(name, turn) for name in TASKS))

    return dict(zip(TASKS, asyncio.run(all_rewards()), strict=True))


def test_there_are_at_least_eight_tasks_of_different_kinds():
    from harbor_trl import HarborSpec

    rows = HarborSpec(QUICKSTART / "tasks").train_dataset
    assert len({*rows["kind"]}) == len(rows) >= 8
    assert {*rows["verifier"]} == {"shell", "python"}


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_on_bubblewrap(agent, reward, tmp_path):
    rewards = run_trials(QUICKSTART / "tasks", "bubblewrap", agent, tmp_path, at_once=8)
    assert rewards == dict.fromkeys(TASKS, reward)


@pytest.mark.docker
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_on_docker(agent, reward, tmp_path):
    suite = tmp_path / "suite"
    shutil.copytree(QUICKSTART / "tasks", suite)
    for dockerfile in suite.glob("*/environment/Dockerfile"):
        # The test image has a python3, and an engine without a registry has no other image.
        dockerfile.write_text(dockerfile.read_text().replace("FROM python:3-slim", "FROM debian:bookworm-slim"))
    rewards = run_trials(suite, "docker", agent, tmp_path / "trials", at_once=4)
    assert rewards == dict.fromkeys(TASKS, reward)
