"""The rollout worker's loop for `AsyncGRPOTrainer`, in this process: real sandboxes, a scripted policy."""

from __future__ import annotations

import math
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import PartialState

from fake_vllm import FakeVLLM, Play
from harbor_trl import HarborBashEnv, HarborEnv, HarborSpec
from harbor_trl.async_grpo import HarborAsyncGRPOTrainer, HarborRolloutLoop
from harbor_trl.errors import HarnessTypeError, NoEnvironmentsError, RewardKeyError
from tasks import make_task, write_reward
from tiny_model import build_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap runs on Linux only")


def write(answer: object) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": f"echo {answer} > /workdir/answer.txt"}


class Loop:
    """A loop on a thread of this process.

    Args:
        spec: What to train on.
        plays: Of `FakeVLLM`.
        options: Of `HarborRolloutLoop`.
    """

    def __init__(self, spec: HarborSpec, plays: dict[str, Sequence[Play]], **options: Any) -> None:
        PartialState(cpu=True)  # TRL's logger wants it
        tokenizer = build_tokenizer()
        self.vllm = FakeVLLM(tokenizer, plays)
        self.samples: queue.Queue[Any] = queue.Queue()
        self.metrics: queue.Queue[dict[str, Any]] = queue.Queue()
        self.loop = HarborRolloutLoop(
            **{
                "model_name": "tiny",
                "dataset": spec.train_dataset,
                "reward_funcs": [spec.reward_funcs],
                "processing_class": tokenizer,
                "eos_token_ids": [tokenizer.eos_token_id],
                "rollout_buffer": self.samples,
                "model_version_value": SimpleNamespace(value=1),
                "heartbeat_value": SimpleNamespace(value=0.0),
                "failed_event": threading.Event(),
                "exception_info_queue": queue.Queue(),
                "metrics_queue": self.metrics,
                "environment_factory": spec.environment_factory,
                "num_generations": 4,
                "max_inflight_tasks": 4,
                "vllm_server_url": self.vllm.url,
                "max_tokens": 1000,
                **options,
            }
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Loop:
        self.vllm.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.loop._loop.call_soon_threadsafe(self.loop._stop_event.set)
        self.join()
        self.vllm.__exit__()

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def group(self, size: int = 4) -> list[Any]:
        """The next so many samples."""
        samples: list[Any] = []
        while len(samples) < size:
            try:
                samples.append(self.samples.get(timeout=1))
            except queue.Empty:
                if self.error is not None:
                    raise self.error from None
        return samples

    def logged(self) -> dict[str, float]:
        """What the trainer would log of the metrics up to now that are this package's."""
        sums: dict[str, list[float]] = {}
        while not self.metrics.empty():
            for name, value in self.metrics.get().items():
                if name.startswith("harbor/"):
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[0] += value[0]
                    total[1] += value[1]
        return {name: total / count for name, (total, count) in sums.items()}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Loop]:
    def build(plays: Sequence[Play] = (), *, spec: dict[str, Any] | None = None, task: Any = None, **options: Any):
        make_task(tmp_path / "suite" / "task", **(task or {}))
        chosen = {"environment_type": "bubblewrap", "trials_dir": tmp_path / "trials", **(spec or {})}
        return Loop(HarborSpec(tmp_path / "suite", **chosen), {"Write 42.": plays}, **options)

    return build


def test_each_rollout_has_its_own_reward_though_one_environment_plays_them_all(run):
    with run([[write(answer)] for answer in (42, 1, 2, 42)], max_inflight_tasks=1) as loop:
        groups = [loop.group() for _ in range(2)]
    for group in groups:
        written = [sample.completion[0]["tool_calls"][0]["function"]["arguments"]["command"] for sample in group]
        assert [sample.metrics["reward"] for sample in group] == [float(" 42 " in command) for command in written]
        assert sorted(sample.advantage for sample in group) == pytest.approx([-1, -1, 1, 1], abs=1e-3)
        assert {sample.group_id for sample in group} == {group[0].group_id}
    assert groups[0][0].metrics.keys() >= {"rewards/outcome_reward", "tools/failure_frequency"}
    logged = loop.logged()
    assert logged["harbor/failed"] == logged["harbor/masked"] == 0
    assert logged["harbor/start_seconds"] > 0


class Waiting:
    """A server that answers nobody before so many are waiting, and what a verifier does to wait there."""

    def __init__(self, count: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.test = f"""#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{self._socket.getsockname()[1]}
read -r -t 30 answer <&3
[ "$answer" = all ]; echo $((1 - $?)) > /logs/verifier/reward.txt
"""
        threading.Thread(target=self._serve, args=(count,), daemon=True).start()

    def _serve(self, count: int) -> None:
        while True:
            waiting = [self._socket.accept()[0] for _ in range(count)]
            for connection in waiting:
                connection.sendall(b"all\n")
                connection.close()


def test_the_verifiers_of_all_rollouts_in_flight_run_at_once(run):
    # Four groups of two: no group's verifiers could wait for each other's if groups were verified one by one.
    barrier = Waiting(8)
    plays = [[write(1)], [write(2)]]
    with run(plays, task={"test": barrier.test}, num_generations=2, max_inflight_tasks=8) as loop:
        assert [sample.metrics["reward"] for sample in loop.group(8)] == [1.0] * 8


def test_a_rollout_without_a_sandbox_is_left_out_of_its_group(run):
    spec = {"environment_type": "faults:StartsThreeOfFour"}
    with run([[write(42)], [write(1)]], spec=spec) as loop:
        samples = loop.group()
    rewards = {sample.metrics["reward"]: sample.advantage for sample in samples}
    masked = [sample for sample in samples if math.isnan(sample.metrics["reward"])]
    assert [sample.advantage for sample in masked] == [0]
    assert "no machine could be had" in masked[0].completion[1]["content"]  # the policy was told
    # As if there had been three: one reward differs from the two others.
    scored = [sample.metrics["reward"] for sample in samples if sample not in masked]
    mean, deviation = sum(scored) / 3, math.sqrt(2) / 3
    assert {0.0, 1.0} < rewards.keys()
    assert all(rewards[one] == pytest.approx((one - mean) / deviation, abs=1e-3) for one in (0.0, 1.0))
    logged = loop.logged()
    assert logged["harbor/masked"] == logged["harbor/failed/start_failed"] == 0.25


class Counting(HarborBashEnv):
    def reset(self, task_dir: str | None = None, **columns: Any) -> str:
        self._calls = 0
        return super().reset(task_dir, **columns)

    def bash(self, command: str) -> str:
        """
        Run a command.

        Args:
            command: The command.
        """
        self._calls += 1
        return super().bash(command)


def shorter_is_better(environments, log_metric, completions, **columns):
    log_metric("calls", sum(env._calls for env in environments))
    return [None if env.reward is None else env.reward / env._calls for env in environments]


def test_a_custom_reward_function_gets_the_environments_as_their_rollouts_left_them(run):
    plays = [[write(42)] + [("bash", {"command": f"sleep 0.{index}"})] * index for index in range(4)]
    plays[1:] = [[("bash", {"command": f"true {len(play)}"}), *play[:-1], write(42)] for play in plays[1:]]
    with run(plays, spec={"agent": Counting}, reward_funcs=[shorter_is_better], max_inflight_tasks=2) as loop:
        for sample in loop.group():
            calls = sum(message["role"] == "tool" for message in sample.completion)
            assert sample.metrics["reward"] == 1 / calls


def test_a_missing_reward_key_ends_the_run_and_says_which_keys_there_are(run, no_keys_seen):
    task = {"test": write_reward('{"style": 1, "speed": 0}', "reward.json")}
    with run([[write(42)]], task=task) as loop:
        loop.join()
    assert isinstance(loop.error, RewardKeyError)
    assert "'speed', 'style'" in str(loop.error)
    assert loop.loop._failed_event.is_set()


def test_stopping_ends_rollouts_in_flight_with_their_sandboxes(run):
    from harbor_trl import engine as engines

    with run([[("bash", {"command": "touch started; sleep 300"})]]) as loop:
        while loop.vllm.calls["/v1/completions"] < 4:
            threading.Event().wait(0.05)
    assert loop.error is None
    assert engines._engine is not None and engines._engine._closed and not engines._engine._trials
    assert loop.samples.empty()


def test_without_environments_the_reward_function_says_which_trainer_to_use():
    spec = HarborSpec("anything")
    with pytest.raises(NoEnvironmentsError, match="HarborAsyncGRPOTrainer"):
        spec.reward_funcs(prompts=["p"], completions=["c"], completion_ids=[[1]], task_dir=["t"])


def test_a_second_worker_and_a_harness_without_tools_are_refused_before_a_model_is_loaded():
    with pytest.raises(TypeError, match="rollout_worker="):
        HarborAsyncGRPOTrainer("no-model", rollout_worker=object())
    with pytest.raises(HarnessTypeError, match="HarborEnv has no tools"):
        HarborAsyncGRPOTrainer("no-model", environment_factory={"bash": HarborBashEnv, "none": HarborEnv})
