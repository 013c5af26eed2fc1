"""Real `GRPOTrainer.train()` runs on real Harbor trials in Docker containers."""

from __future__ import annotations

import math
import subprocess

import pytest
from trl import GRPOTrainer

from harbor_trl import HarborSpec
from tasks import make_task
from test_train_bubblewrap import WRITES, answer_of, scripted, write
from tiny_model import config, last_batch, policy, step_logs

pytestmark = pytest.mark.docker


def test_rewards_of_a_scripted_policy_and_a_masked_task(tmp_path):
    suite = tmp_path / "suite"
    make_task(suite / "write-17", test=WRITES[17], instruction="Write 17.\n")
    make_task(suite / "does-not-build", dockerfile="FROM debian:bookworm-slim\nRUN exit 1\n", instruction="Write 42.\n")
    spec = HarborSpec(suite, environment_type="docker", trials_dir=tmp_path / "trials")

    def script(prompt, generation):
        return [write(17 if generation == 0 and answer_of(prompt) == 17 else generation)]

    trainer = scripted(spec, script, tmp_path / "run", num_generations=2, per_device_train_batch_size=4)
    trainer.train()
    batch = last_batch(trainer)
    # For two rewards, 0 and 1: mean 1/2, standard deviation √½.
    expected = pytest.approx(math.sqrt(0.5), abs=1e-3)
    assert [(reward, advantage) for command, reward, advantage in batch if command == write(17)] == [(1, expected)]
    assert sorted(advantage for _, reward, advantage in batch if math.isnan(reward)) == [0, 0]
    assert step_logs(trainer)[0]["reward"] == 0.5


def test_a_model_trains_for_a_step_and_leaves_no_container(tmp_path):
    suite = tmp_path / "suite"
    make_task(suite / "leaves-no-container", test=WRITES[17], instruction="Write 17.\n")
    spec = HarborSpec(suite, environment_type="docker", trials_dir=tmp_path / "trials")
    trainer = GRPOTrainer(
        **policy(),
        args=config(tmp_path / "run", num_generations=2, per_device_train_batch_size=2, max_completion_length=16),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
    )
    trainer.train()
    log = step_logs(trainer)[0]
    assert log["reward"] == 0
    assert log["harbor/failed"] == 0

    from harbor_trl.engine import engine

    engine().close()
    names = subprocess.run(["docker", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, check=True)
    assert engine().run_id not in names.stdout
