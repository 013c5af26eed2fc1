"""Real `HarborAsyncGRPOTrainer.train()` runs, with TRL's rollout worker in its own process; see async_train.py."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trl
from trl.experimental.async_grpo import async_rollout_worker

from fake_vllm import write_package
from harbor_trl import async_grpo
from harbor_trl.async_grpo import _moved
from harbor_trl.errors import TrlVersionError
from test_harness_training import BUILT_IN, SCRIPTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap runs on Linux only")

HERE = Path(__file__).parent


def start(how: str, environment_type: str, directory: Path) -> subprocess.Popen[str]:
    packages = [str(write_package(directory.parent / "packages")), str(HERE), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", "import async_train; async_train.main()", how, environment_type, str(directory)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, packages)),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "OMP_NUM_THREADS": "1",
        },
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=(directory / "errors.txt").open("w"),
        text=True,
    )


def train(environment_type: str, directory: Path) -> dict[str, Any]:
    process = start("train", environment_type, directory)
    process.communicate(timeout=900)
    assert process.returncode == 0, (directory / "errors.txt").read_text()[-6000:]
    return json.loads((directory / "result.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run, in which each built-in harness plays the task of its own."""
    directory = tmp_path_factory.mktemp("async") / "bubblewrap"
    directory.mkdir()
    return train("bubblewrap", directory)


def check_samples(run: dict[str, Any], harnesses: list[str]) -> None:
    groups = defaultdict(list)
    for sample in run["samples"]:
        groups[sample["group"]].append(sample)
    for number, group in groups.items():
        if len(group) < 2:  # the trainer had enough
            continue
        right, wrong, shown = SCRIPTS[harnesses[number % len(harnesses)]]
        assert sorted(sample["reward"] for sample in group) == [0, 1]
        for sample in group:
            called = [
                call["function"]["name"] for message in sample["completion"] for call in message.get("tool_calls") or ()
            ]
            printed = [message["content"] for message in sample["completion"] if message["role"] == "tool"]
            assert called == [name for name, _ in (right if sample["reward"] else wrong)]
            assert sample["advantage"] == pytest.approx(1 if sample["reward"] else -1, abs=1e-3)
            if sample["reward"]:
                assert all(wanted in text for text, wanted in zip(printed, shown, strict=True))


def check_log(run: dict[str, Any]) -> list[dict[str, Any]]:
    log = [entry for entry in run["log"] if "reward" in entry]
    assert [entry["step"] for entry in log] == [1, 2]
    assert [entry["reward"] for entry in log] == [entry["rewards/outcome_reward"] for entry in log] == [0.5, 0.5]
    assert {entry["harbor/failed"] for entry in log} == {entry["harbor/masked"] for entry in log} == {0}
    return log


def test_each_harness_gets_the_reward_of_its_verifier(trained):
    assert len(trained["samples"]) >= 16
    check_samples(trained, BUILT_IN)


def test_the_trainer_learns_syncs_its_weights_and_logs_the_rates(trained):
    log = check_log(trained)
    assert log[0]["harbor/start_seconds"] > 0 and log[0]["harbor/verify_seconds"] > 0
    assert all(math.isfinite(entry["grad_norm"]) and entry["grad_norm"] > 0 for entry in log)
    assert trained["changed"]
    # Before the first step, and after each: every parameter.
    assert trained["sent"] == [trained["parameters"]] * 3
    assert trained["calls"]["/pause"] == trained["calls"]["/resume"] == 3
    assert {sample["version"] for sample in trained["samples"]} <= {1, 2, 3}


def test_the_worker_ends_when_training_does_and_is_not_killed(trained):
    assert trained["exit_code"] == 0


@pytest.mark.docker
def test_training_on_docker(tmp_path):
    directory = tmp_path / "docker"
    directory.mkdir()
    run = train("docker", directory)
    check_samples(run, ["bash"])
    check_log(run)
    assert run["exit_code"] == 0
    runs = [path.name for path in (directory / "trials").iterdir()]
    assert len(runs) == 1
    names = subprocess.run(["docker", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, check=True)
    assert runs[0] not in names.stdout


def alive(mark: str) -> list[int]:
    """Processes of this machine that have `mark` as their name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().split(b"\0")[0] == mark.encode():
                found.append(int(file.parent.name))
        except OSError:
            pass
    return found


def wait_until(condition: Any, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_sandboxes_go_with_the_worker_and_the_worker_with_the_trainer(tmp_path):
    directory = tmp_path / f"hold-{os.getpid()}"
    directory.mkdir()
    trainer = start("hold", "bubblewrap", directory)
    errors = directory / "errors.txt"
    try:
        assert trainer.stdout is not None
        for number, (name, victim) in enumerate([("SIGTERM", None), ("SIGKILL", None), ("SIGKILL", trainer.pid)]):
            worker = int(trainer.stdout.readline() or 0)
            assert worker, errors.read_text()[-6000:]
            mark = f"{directory.name}-{number}"
            assert wait_until(lambda mark=mark: len(alive(mark)) == 2), errors.read_text()[-6000:]
            os.kill(victim or worker, signal.Signals[name])
            assert wait_until(lambda mark=mark, worker=worker: not alive(mark) and not running(worker)), name
    finally:
        trainer.kill()
        trainer.communicate()


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_trl_has_the_names_that_are_built_on():
    assert _moved(async_rollout_worker) == []


class _Moved:
    """TRL's module without what a test takes away."""

    def __init__(self, **replaced: Any) -> None:
        vars(self).update({**vars(async_rollout_worker), **replaced})


@pytest.mark.parametrize("method", ["_generate_one", "_score_group", "_run_loops", "_push_metrics"])
def test_a_moved_name_is_named(method):
    def renamed(self, everything):
        pass

    loop = type("Loop", (async_rollout_worker._AsyncRolloutLoop,), {method: renamed})
    worker = type("Worker", (), {"_loop_cls": loop})
    moved = _moved(_Moved(_AsyncRolloutLoop=loop, AsyncRolloutWorker=worker))
    assert moved and all(name.startswith(f"_AsyncRolloutLoop.{method}(") for name in moved)


def test_a_moved_class_is_named():
    gone = {"_AsyncRolloutLoop": None, "RolloutGroup": None}
    assert _moved(_Moved(**gone)) == [
        "_AsyncRolloutLoop",
        "AsyncRolloutWorker._loop_cls",
        "RolloutGroup.reward_kwargs",
        "RolloutGroup.rollout_rewards",
    ]


def test_importing_with_a_trl_that_has_moved_a_name_says_which_and_whose(monkeypatch):
    monkeypatch.delattr(async_rollout_worker._AsyncRolloutLoop, "_score_group")
    with pytest.raises(TrlVersionError, match=rf"TRL {re.escape(trl.__version__)} .*_score_group\(group\)"):
        runpy.run_path(async_grpo.__file__, run_name="harbor_trl.async_grpo")
