"""The quickstart: its curve rises because of training, its script runs, and it leaves nothing behind."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harbor_trl import HarborBashEnv, HarborSpec
from tiny_model import QUICKSTART

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap runs on Linux only")

#: Of 32 rollouts each.
CONTROL_STEPS = 4
TRAINED_STEPS = 7


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_curve_rises_with_the_optimizer_and_stays_flat_without(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import run

    spec = HarborSpec(QUICKSTART / "tasks", environment_type="bubblewrap", num_tasks=4, trials_dir=tmp_path / "trials")
    model, tokenizer, shown = run.prepare(spec, tmp_path, seed=0)
    assert shown == 0.25

    def curve(learning_rate: float, steps: int) -> list[float]:
        log = run.train(spec, copy.deepcopy(model), tokenizer, tmp_path, steps=steps, learning_rate=learning_rate)
        assert all(entry["harbor/failed"] == 0 for entry in log)
        return [entry["reward"] for entry in log]

    def mean(rewards: list[float]) -> float:
        return sum(rewards) / len(rewards)

    control = curve(0.0, CONTROL_STEPS)
    trained = curve(run.LEARNING_RATE, TRAINED_STEPS)
    # Of 64 rollouts each, so that 0.3 is four standard deviations of chance.
    half = CONTROL_STEPS // 2
    assert abs(mean(control[half:]) - mean(control[:half])) < 0.3, control
    assert 0 < mean(control) < 0.5, "the warm-up must leave something to learn, and something to learn from"
    assert mean(trained[-2:]) > mean(control) + 0.3, (trained, control)


def test_the_warm_up_and_the_trainer_render_the_same_prompt(tmp_path):
    from policy import build_tokenizer, record_transcripts

    from tiny_model import ScriptedTrainer, config, policy

    spec = HarborSpec(QUICKSTART / "tasks", environment_type="bubblewrap", num_tasks=1, trials_dir=tmp_path / "trials")
    seen = []

    def script(prompt: str, generation: int) -> list[str]:
        seen.append(prompt)
        return []

    ScriptedTrainer(
        **policy(),
        script=script,
        args=config(tmp_path / "run", num_generations=2, per_device_train_batch_size=2),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
    ).train()
    transcript = record_transcripts(QUICKSTART / "warmup.toml", spec.train_dataset, spec.environment_factory)[0]
    shown = build_tokenizer().apply_chat_template(
        transcript["messages"][:1], tools=transcript["tools"], tokenize=False, add_generation_prompt=True
    )
    assert HarborBashEnv.PROMPT_SUFFIX in shown
    assert {*seen} == {shown}


def start(output: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(QUICKSTART / "run.py"), "--output", str(output), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def children_of_session(leader: int) -> list[str]:
    """Command lines of the processes in the session of `leader`, itself excepted."""
    listed = subprocess.run(["ps", "-eo", "pid=,sess=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [row[2] for row in rows if len(row) == 3 and row[1] == str(leader) and row[0] != str(leader)]


def test_ctrl_c_in_the_middle_of_a_run_leaves_no_process(tmp_path):
    process = start(tmp_path / "interrupted", "--steps", "1000", "--generations", "2", "--warm-up", "2")
    for line in process.stdout:
        if re.match(r"\s+2\s+\d\.\d\d", line):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 130
    assert "Traceback" not in rest
    deadline = time.monotonic() + 10
    while (left := children_of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_where_no_sandbox_can_run_it_says_what_to_do(tmp_path):
    process = start(tmp_path, "--environment", "no-such-backend")
    output = process.stdout.read()
    assert process.wait(60) == 1
    assert "no-such-backend" in output and "bubblewrap" in output
    assert "Traceback" not in output
