"""Bubblewrap sandboxes: what a command costs, and how many whole Harbor trials a machine does per second.

    python benches/bench_bubblewrap.py [--trials 64] [--rounds 3]

Prints Markdown tables. Each row stands beside its floor, measured in the same run: a bare `bash -c true` for a command,
and for a trial or rollout the same Harbor trials in a backend that runs no sandbox at all. A rollout is what a trainer
sees: `reset`, one tool call, the reward; its sandbox is stopped behind the next batch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import EnvironmentConfig as TaskEnvironmentConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.trial import Trial

from harbor_trl import HarborTerminalEnv
from harbor_trl.engine import engine
from harbor_trl.environments import environment_for
from harbor_trl.environments.bubblewrap import BubblewrapEnvironment
from harbor_trl.options import RolloutOptions
from harbor_trl.rewards import outcome_reward

FILES = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Write the number after the one in data.txt to /tmp/answer.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY data.txt ./\n",
    "environment/data.txt": "41\n",
    "solution/solve.sh": "#!/bin/bash\necho $(($(cat data.txt) + 1)) > /tmp/answer\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /tmp/answer)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
}


class NoSandbox(BaseEnvironment):
    """Answers at once and runs nothing: what is left is Harbor's own work for a trial."""

    @staticmethod
    @override
    def type() -> str:
        return "no-sandbox"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    @override
    def _validate_definition(self) -> None: ...

    @override
    async def start(self, force_build: bool) -> None: ...

    @override
    async def stop(self, delete: bool) -> None: ...

    @override
    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        return ExecResult(return_code=0)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None: ...

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).write_text("")

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if source_dir == "/logs/verifier":
            Path(target_dir, "reward.txt").write_text("1")


async def seconds(work: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def trials(task: Path, directory: Path, count: int, environment: dict[str, Any]) -> None:
    async def one(number: int) -> None:
        config = TrialConfig(
            task=TaskConfig(path=task),
            trials_dir=directory,
            trial_name=f"bench-{number}",
            agent=AgentConfig(name="oracle"),
            environment=EnvironmentConfig(**environment),
        )
        result = await (await Trial.create(config)).run()
        assert result.verifier_result is not None, result.exception_info
        assert result.verifier_result.rewards == {"reward": 1.0}

    await asyncio.gather(*(one(number) for number in range(count)))


def rollouts(task: Path, directory: Path, count: int) -> float:
    """Seconds from the first `reset` of a batch to its last reward."""
    options = RolloutOptions(trials_dir=str(directory), keep_trials="none")
    envs = [HarborTerminalEnv("bubblewrap", options=options) for _ in range(count)]
    start = time.perf_counter()
    for env in envs:
        env.reset(task_dir=str(task))
    for env in envs:
        env.bash("echo $(($(cat data.txt) + 1)) > /tmp/answer")
    rewards = outcome_reward(environments=envs)
    took = time.perf_counter() - start
    assert rewards == [1.0] * count, rewards
    return took


def bench_rollouts(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        task = write_task(Path(name))
        rollouts(task, Path(name, "warm"), 2)
        times = [rollouts(task, Path(name, str(number)), count) for number in range(rounds)]
        engine().close()
    median = statistics.median(times)
    print(f"\n{count} rollouts at once: {median:.2f} s, {count / median:.1f} a second.")


def write_task(top: Path) -> Path:
    for path, text in FILES.items():
        (top / "task" / path).parent.mkdir(parents=True, exist_ok=True)
        (top / "task" / path).write_text(text)
    return top / "task"


async def bench(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        task = write_task(top)
        backends = {
            "bubblewrap": environment_for("bubblewrap"),
            "no sandbox (floor)": {"import_path": f"{__name__}:NoSandbox"},
        }
        for label, backend in backends.items():
            await trials(task, top / f"warm {label}", 2, backend)

        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {count} trials at once, median of {rounds}\n")
        print("| whole trials | seconds | trials a second | times the floor |\n|---|--:|--:|--:|")
        times: dict[str, list[float]] = {label: [] for label in backends}
        for number in range(rounds):
            # In turn, so that what else the machine does hits both.
            for label, backend in backends.items():
                directory = top / f"{label} {number}"
                times[label].append(await seconds(lambda d=directory, b=backend: trials(task, d, count, b)))
        floor = statistics.median(times["no sandbox (floor)"])
        for label in backends:
            median = statistics.median(times[label])
            print(f"| {label} | {median:.2f} | {count / median:.1f} | {median / floor:.1f} |")

        environment = BubblewrapEnvironment(
            environment_dir=task / "environment",
            environment_name="bench",
            session_id="bench__env",
            trial_paths=TrialPaths(top / "bench"),
            task_env_config=TaskEnvironmentConfig(),
        )
        start, stop, commands, bare = [], [], [], []
        for _ in range(10):
            start.append(await seconds(lambda: environment.start(force_build=False)))
            stop.append(await seconds(lambda: environment.stop(delete=True)))
        await environment.start(force_build=False)
        for _ in range(100):
            commands.append(await seconds(lambda: environment.exec("true")))
            before = time.perf_counter()
            subprocess.run(["bash", "-c", "true"], check=True)
            bare.append(time.perf_counter() - before)
        megabytes = 200
        flood = await seconds(lambda: environment.exec(f"head -c {megabytes}000000 /dev/zero"))
        await environment.stop(delete=True)
        floor = statistics.median(bare)
        print("\n| one sandbox | milliseconds, median | times a bare `bash -c true` |\n|---|--:|--:|")
        for label, values in (("start", start), ("exec", commands), ("stop", stop), ("bare bash (floor)", bare)):
            median = statistics.median(values)
            print(f"| {label} | {median * 1000:.1f} | {median / floor:.1f} |")
        print(f"\nOutput of a command: {megabytes / flood:.0f} MB a second.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=64, help="trials at once (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (default: 3)")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    asyncio.run(bench(arguments.trials, arguments.rounds))
    bench_rollouts(arguments.trials, arguments.rounds)


if __name__ == "__main__":
    main()
