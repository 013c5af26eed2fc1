"""A batch of rollouts on Docker, all that is not the model: start, two tool calls, verifier, stop.

    python benches/bench_docker.py [--rollouts 8]

Prints seconds and ratios against `trl.experimental.harbor` in one run. Needs a Docker engine and
`debian:bookworm-slim`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TASK = {
    "task.toml": "",
    "instruction.md": "Write 42.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /workdir/answer.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt\n',
}


class Seconds(NamedTuple):
    """Wall seconds of one batch, and the CPU seconds of the trainer's process and its children."""

    start: float
    reward: float
    stopped: float
    cpu: float


def measure(name: str, task: str, rollouts: int, make: Callable[[], Any], stop: Callable[[list[Any]], None]) -> Seconds:
    """One batch: reset all, two tool calls each, all rewards, all sandboxes gone."""
    envs = [make() for _ in range(rollouts)]
    cpu, started = sum(os.times()[:4]), time.monotonic()
    for env in envs:
        env.reset(task_dir=task)
    for env in envs:
        env.bash("ls /")
    ready = time.monotonic()
    for env in envs:
        env.bash("echo -n 42 > /workdir/answer.txt")
    if hasattr(envs[0], "_finish"):
        from harbor_trl.rewards import outcome_reward

        rewards = outcome_reward(environments=envs)
    else:
        rewards = [env.reward for env in envs]
    assert rewards == [1.0] * rollouts, f"{name}: {rewards}"
    rewarded = time.monotonic()
    stop(envs)
    ended = time.monotonic()
    return Seconds(ready - started, rewarded - ready, ended - rewarded, sum(os.times()[:4]) - cpu)


def stop_ours(envs: list[Any]) -> None:
    """Nobody waits for this in training; here it counts."""
    from harbor_trl.engine import engine

    engine().close()
    left = subprocess.run(["docker", "ps", "-aq", "--filter", f"name=^{engine().run_id}"], capture_output=True)
    assert not left.stdout.strip()


def stop_upstream(envs: list[Any]) -> None:
    """What the next reset, or the end of the process, does."""
    for env in envs:
        env._run(env._stop())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of the batch (default 8)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.harbor import HarborBashEnv as Upstream

    from harbor_trl import HarborBashEnv

    with tempfile.TemporaryDirectory() as directory:
        task = Path(directory, "answer")
        for file, text in TASK.items():
            path = task / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        os.chdir(directory)
        # Builds the image once for both, so that neither pays for a cold cache.
        subprocess.run(["docker", "build", "-q", str(task / "environment")], check=True, capture_output=True)
        rows = {
            "harbor_trl": measure("ours", str(task), arguments.rollouts, HarborBashEnv, stop_ours),
            "trl.experimental.harbor": measure("upstream", str(task), arguments.rollouts, Upstream, stop_upstream),
        }
    print(f"{arguments.rollouts} rollouts, {os.cpu_count()} CPUs\n")
    print("| | start and first call, s | second call and reward, s | stop, s | total, s | CPU, s |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, seconds in rows.items():
        total = seconds.start + seconds.reward + seconds.stopped
        print(
            f"| {name} | {seconds.start:.1f} | {seconds.reward:.1f} | {seconds.stopped:.1f} | {total:.1f} "
            f"| {seconds.cpu:.1f} |"
        )
    ours, theirs = rows["harbor_trl"], rows["trl.experimental.harbor"]
    print(f"\nTotal: {sum(theirs[:3]) / sum(ours[:3]):.1f} times as fast.")
    print(f"Until the rewards are known: {sum(theirs[:2]) / sum(ours[:2]):.1f} times as fast.")


if __name__ == "__main__":
    main()
