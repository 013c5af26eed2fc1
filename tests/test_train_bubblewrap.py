"""Real `GRPOTrainer.train()` runs on real Harbor trials in bubblewrap sandboxes."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from harbor_trl import HarborBashEnv, HarborSpec
from tasks import ANSWER_42, make_task
from tiny_model import ScriptedTrainer, config, last_batch, policy, step_logs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap runs on Linux only")

#: For each answer the verifier that wants it.
WRITES = {answer: ANSWER_42.replace("42", str(answer)) for answer in (17, 42)}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Two tasks; the instruction of each names the answer."""
    for answer, test in WRITES.items():
        make_task(tmp_path / "suite" / f"write-{answer}", test=test, instruction=f"Write {answer}.\n")
    return tmp_path / "suite"


def answer_of(prompt: str) -> int:
    return int(re.search(r"Write (\d+)\.", prompt)[1])


def write(answer: object) -> str:
    return f"echo {answer} > /workdir/answer.txt"


def scripted(spec: HarborSpec, script, output: Path, reward_funcs=None, **options) -> ScriptedTrainer:
    options = {"per_device_train_batch_size": 4 * len(spec.train_dataset), **options}
    return ScriptedTrainer(
        **policy(),
        script=script,
        args=config(output, **options),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=reward_funcs or spec.reward_funcs,
    )


def test_rewards_and_advantages_are_those_of_the_verifier(suite, tmp_path):
    right = {17: {0, 1}, 42: {3}}

    def script(prompt, generation):
        answer = answer_of(prompt)
        return [write(answer if generation in right[answer] else f"{answer}{generation}")]

    spec = HarborSpec(suite, environment_type="bubblewrap", trials_dir=tmp_path / "trials")
    trainer = scripted(spec, script, tmp_path / "run")
    trainer.train()

    groups: dict[float, list[float]] = {}
    for command, reward, advantage in last_batch(trainer):
        assert reward == float(command in (write(17), write(42)))
        task_mean, task_std = (0.5, math.sqrt(1 / 3)) if "echo 17" in command else (0.25, 0.5)
        assert advantage == pytest.approx((reward - task_mean) / task_std, abs=1e-3)
        groups.setdefault(task_mean, []).append(reward)
    assert {mean: sum(rewards) for mean, rewards in groups.items()} == {0.5: 2.0, 0.25: 1.0}
    log = step_logs(trainer)[0]
    assert log["reward"] == pytest.approx(3 / 8)
    assert log["rewards/outcome_reward/mean"] == pytest.approx(3 / 8)
    assert log["harbor/failed"] == 0
    assert log["tools/call_frequency"] == 1
    assert log["tools/failure_frequency"] == 0


def test_the_policy_reads_what_its_commands_print_and_files_stay_between_turns(suite, tmp_path):
    spec = HarborSpec(suite, environment_type="bubblewrap", num_tasks=1, trials_dir=tmp_path / "trials")

    def script(prompt, generation):
        return [f"echo {generation} > note; echo generation {generation}", "cat note", write(answer_of(prompt))]

    trainer = scripted(spec, script, tmp_path / "run")
    trainer.train()
    for number, completion in enumerate(trainer._logs["completion"]):
        printed = [message["content"].strip() for message in completion if message["role"] == "tool"]
        assert printed == [f"generation {number}", str(number), "(empty output, rc=0)"]
    assert step_logs(trainer)[0]["reward"] == 1


def test_a_rollout_whose_sandbox_does_not_start_is_left_out_of_its_group(suite, tmp_path):
    spec = HarborSpec(suite, environment_type="faults:StartsThreeOfFour", num_tasks=1, trials_dir=tmp_path / "trials")
    trainer = scripted(spec, lambda prompt, generation: [write(answer_of(prompt))], tmp_path / "run")
    trainer.train()
    batch = last_batch(trainer)
    masked = [advantage for _, reward, advantage in batch if math.isnan(reward)]
    assert masked == [0]
    # A masked rollout that counted as 0 would give the three right ones an advantage.
    assert [(reward, advantage) for _, reward, advantage in batch if not math.isnan(reward)] == [(1, 0)] * 3
    log = step_logs(trainer)[0]
    assert log["reward"] == 1
    assert log["harbor/masked"] == 0.25


def test_a_task_that_no_sandbox_can_run_does_not_end_the_run(suite, tmp_path):
    make_task(suite / "changed", instruction="Write 5.\n")
    spec = HarborSpec(suite, environment_type="bubblewrap", trials_dir=tmp_path / "trials")
    trainer = scripted(spec, lambda prompt, generation: [write(answer_of(prompt))], tmp_path / "run", max_steps=2)
    # Too late for the spec, which refuses such a task.
    (suite / "changed" / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nRUN true\n")
    trainer.train()
    rewards = {command: reward for command, reward, _ in last_batch(trainer)}
    assert rewards[write(17)] == rewards[write(42)] == 1
    assert math.isnan(rewards[write(5)])
    assert len(step_logs(trainer)) == 2
    refused = [str(one["content"]) for one in itertools.chain(*trainer._logs["completion"]) if one["role"] == "tool"]
    assert any("RUN" in text for text in refused), refused


class Mortal(HarborBashEnv):
    """Its sandbox dies at the command `die`."""

    def bash(self, command: str) -> str:
        """
        Run a command.

        Args:
            command: The command.
        """
        if command == "die":
            self._run(self._env.stop(delete=True))
        return super().bash(command)


def test_a_run_goes_on_when_a_sandbox_dies_in_the_middle_of_a_rollout(suite, tmp_path):
    spec = HarborSpec(suite, agent=Mortal, environment_type="bubblewrap", num_tasks=1, trials_dir=tmp_path / "trials")

    def script(prompt, generation):
        answer = write(answer_of(prompt))
        return [answer, answer] if generation else [answer, "die", answer]

    trainer = scripted(spec, script, tmp_path / "run", max_steps=2)
    trainer.train()
    assert [entry["reward"] for entry in step_logs(trainer)] == [0.75, 0.75]
    # After commands of the policy: masked (NaN), it would be no worse off than with a right answer.
    assert [reward for _, reward, _ in last_batch(trainer)] == [0, 1, 1, 1]


def test_a_custom_reward_function_reads_the_environments(suite, tmp_path):
    def half_reward(environments, **kwargs):
        return [env.reward / 2 for env in environments]

    spec = HarborSpec(suite, environment_type="bubblewrap", trials_dir=tmp_path / "trials")
    trainer = scripted(
        spec,
        lambda prompt, generation: [write(42)],
        tmp_path / "run",
        reward_funcs=half_reward,
    )
    trainer.train()
    assert {reward for _, reward, _ in last_batch(trainer, "half_reward")} == {0.0, 0.5}
    assert step_logs(trainer)[0]["reward"] == 0.25


def test_a_model_trains_for_some_steps(suite, tmp_path):
    spec = HarborSpec(suite, environment_type="bubblewrap", num_tasks=1, trials_dir=tmp_path / "trials")
    parts = policy()
    before = [parameter.detach().clone() for parameter in parts["model"].parameters()]

    def reward_of_tokens(completion_ids, **kwargs):
        # Random weights never solve a task: without this there would be nothing to learn from.
        return [ids[0] / len(parts["processing_class"]) for ids in completion_ids]

    trainer = GRPOTrainer(
        **parts,
        args=config(
            tmp_path / "run",
            max_steps=2,
            max_completion_length=16,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
        ),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=[spec.reward_funcs, reward_of_tokens],
    )
    trainer.train()
    logs = step_logs(trainer)
    assert len(logs) == 2
    for log in logs:
        assert log["rewards/outcome_reward/mean"] == 0
        assert {"harbor/failed", "harbor/masked", "harbor/start_seconds", "harbor/verify_seconds"} <= log.keys()
        assert math.isfinite(log["grad_norm"]) and log["grad_norm"] > 0
    after = [*parts["model"].parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def run_script(script: Path, *arguments: object, launcher: tuple[str, ...] = (), cwd: Path | None = None) -> str:
    """Run a script as a user does, and return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env=environment,
        cwd=cwd or script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


TWO_RANKS = r"""
import sys
from pathlib import Path

from tiny_model import ScriptedTrainer, config, last_batch, policy, step_logs

from harbor_trl import HarborSpec

suite, trials, output = map(Path, sys.argv[1:])
spec = HarborSpec(suite, environment_type="bubblewrap", trials_dir=trials, keep_trials="all")


def script(prompt, generation):
    rank = trainer.accelerator.process_index
    return [f"echo rank {rank}", "echo 42 > /workdir/answer.txt"]


trainer = ScriptedTrainer(
    **policy(),
    script=script,
    args=config(output, per_device_train_batch_size=4, max_steps=2),
    train_dataset=spec.train_dataset,
    environment_factory=spec.environment_factory,
    reward_funcs=spec.reward_funcs,
)
trainer.train()
environments = sorted(env._trial_dir.name for env in trainer.environments)
rank = trainer.accelerator.process_index
# One write, so that the ranks' lines do not mix.
sys.stdout.write(f"RANK {rank} of {trainer.accelerator.num_processes}: {environments}\n")
sys.stdout.flush()
if trainer.accelerator.is_main_process:
    print("REWARDS", [entry["reward"] for entry in step_logs(trainer)], flush=True)
    print("COMMANDS", sorted({command for command, *_ in last_batch(trainer)}), flush=True)
"""


def test_two_ranks_under_accelerate_launch_each_run_their_own_environments(suite, tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    # `--multi_gpu` is the launcher of several processes; the script's own `use_cpu` then makes them speak gloo.
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
    launcher += ("--mixed_precision=no", "--dynamo_backend=no")
    output = run_script(script, suite, tmp_path / "trials", tmp_path / "run", launcher=launcher)
    assert "REWARDS [0.5, 0.5]" in output
    assert "COMMANDS ['echo rank 0', 'echo rank 1']" in output
    ranks = {rank: names for rank, names in re.findall(r"RANK (\d) of 2: \[(.*)\]", output)}
    assert ranks.keys() == {"0", "1"}
    names = [name for one in ranks.values() for name in one.split(", ")]
    assert len(names) == len(set(names)) == 8
    # Two steps of eight rollouts, each a trial of its own.
    assert len([*(tmp_path / "trials").rglob("result.json")]) == 16


FOR_TRL = """
import sys

from tiny_model import ScriptedTrainer, config, policy
from trl.experimental.harbor import HarborBashEnv, HarborEnv, HarborSpec


class TwoTools(HarborEnv):
    PROMPT_SUFFIX = " Use the tool bash."

    async def _setup(self):
        await self._env.exec("mkdir -p /workdir && echo 42 > /workdir/hint")

    def bash(self, command: str) -> str:
        \"\"\"
        Run a command.

        Args:
            command: The command.
        \"\"\"
        return self._exec(command, timeout=20)


for agent in ("bash", HarborBashEnv, TwoTools):
    spec = HarborSpec(sys.argv[1], agent=agent, environment_type=sys.argv[2], num_tasks=2, include_metadata=True)
    assert {"prompt", "task_dir", "task_index", "gold_answer", "reward_mode"} <= {*spec.train_dataset.column_names}
    trainer = ScriptedTrainer(
        **policy(),
        script=lambda prompt, generation: ["cp /workdir/hint /workdir/answer.txt || echo 42 > /workdir/answer.txt"],
        args=config(sys.argv[3], per_device_train_batch_size=8),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
    )
    trainer.train()
    print("REWARD", trainer.state.log_history[0]["reward"])
"""


def test_a_script_for_trl_experimental_harbor_runs_with_only_the_import_changed(suite, tmp_path):
    original = tmp_path / "original.py"
    original.write_text(FOR_TRL)
    ours = tmp_path / "ours.py"
    ours.write_text(
        subprocess.run(
            ["sed", "s/trl.experimental.harbor/harbor_trl/", str(original)], check=True, capture_output=True, text=True
        ).stdout
    )
    output = run_script(ours, suite, "bubblewrap", tmp_path / "run")
    assert output.count("REWARD 0.5") == 3


#: The script that a user copies.
COPIED = Path(__file__).parents[1] / "examples" / "train_grpo.py"


def test_the_help_of_the_script_names_each_of_its_options_and_does_not_wait_for_imports():
    names = "import runpy, sys; script = runpy.run_path(sys.argv.pop(1), run_name='__main__'); "
    names += "print('OPTIONS', *script['SuiteArguments'].__annotations__); print({'torch', 'trl'} & {*sys.modules})"
    printed = subprocess.check_output([sys.executable, "-c", names, COPIED, "--help"], text=True)
    text, options, imported = printed.rstrip().rsplit("\n", 2)
    assert re.findall(r"^  --(\w+) ", text, re.M) == options.split()[1:]
    assert "--config" in text and "Default: docker." in text and imported == "set()"


def test_options_that_are_not_json_are_an_error_of_the_command_line(suite, tmp_path):
    options = ["--suite", suite, "--output_dir", tmp_path, "--use_cpu", "true", "--bf16", "false"]
    command = [sys.executable, COPIED, *options, "--environment_kwargs", "memory_mb=700"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--environment_kwargs is not JSON" in done.stderr


@pytest.mark.parametrize("lora", [False, True])
def test_the_script_that_a_user_copies_trains_and_saves_a_model(lora, suite, tmp_path):
    for part in policy().values():
        part.save_pretrained(tmp_path / "model")
    options = {
        "suite": suite,
        "environment": "bubblewrap",
        "num_tasks": 1,
        "on_invalid": "skip",
        "reward_key": "reward",
        "trials_dir": tmp_path / "trials",
        "keep_trials": "all",
        "model_name_or_path": tmp_path / "model",
        "output_dir": tmp_path / "run",
        "max_steps": 1,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 16,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        **({"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"} if lora else {}),
    }
    kwargs = '{"kwargs": {"memory_mb": 700}}'
    (tmp_path / "config.yaml").write_text(f"environment_kwargs: {kwargs}\n")
    options |= {"config": tmp_path / "config.yaml"} if lora else {"environment_kwargs": kwargs}
    output = run_script(
        COPIED, *(word for name, value in options.items() for word in (f"--{name}", value)), cwd=tmp_path
    )
    assert "rewards/outcome_reward/mean" in output
    configs = [file.read_text() for file in (tmp_path / "trials").glob("*/*/config.json")]
    assert ['"memory_mb": 700' in text for text in configs] == [True, True]
    assert (tmp_path / "run" / ("adapter_model.safetensors" if lora else "model.safetensors")).is_file()
