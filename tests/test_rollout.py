"""A rollout is a Harbor trial: what its reward is, when the trainer waits, and what failures mean."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from harbor_trl import HarborBashEnv, HarborEnv, HarborTerminalEnv
from harbor_trl.errors import NothingWorksError, RewardKeyError, SandboxFileError, SandboxLostError
from harbor_trl.options import RolloutOptions
from harbor_trl.rewards import outcome_reward
from harbor_trl.rollout import FailureKind
from tasks import make_task, write_reward

pytest.importorskip("harbor_trl.environments.bubblewrap")


@pytest.fixture
def options(tmp_path: Path) -> RolloutOptions:
    return RolloutOptions(trials_dir=str(tmp_path / "trials"))


def bash_env(options: RolloutOptions, environment_type: str = "bubblewrap") -> HarborBashEnv:
    return HarborBashEnv(environment_type, options=options)


def eventually(condition, seconds: float = 30) -> bool:
    """Whether `condition()` becomes true; for what happens in the background."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


# ── rewards ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reward_is_the_verifiers_scalar(tmp_path, options):
    task = make_task(tmp_path / "task")
    right, wrong = bash_env(options), bash_env(options)
    for env in (right, wrong):
        assert env.reset(task_dir=task) == "Write 42.\n" + HarborBashEnv.PROMPT_SUFFIX
    assert right.bash("echo -n 42 > /workdir/answer.txt") == "(empty output, rc=0)"
    wrong.bash("echo -n 41 > /workdir/answer.txt")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right._failure is None
    assert right.reward == 1.0  # computed once


@pytest.mark.parametrize(("text", "reward"), [("0.25", 0.25), ("2.5", 2.5), ("-1.5", -1.5)])
def test_reward_is_never_clipped(tmp_path, options, text, reward):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", test=write_reward(text)))
    assert env.reward == reward


def test_all_reward_keys_are_readable(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", test=write_reward('{"reward": 0.5, "style": 1}', "reward.json")))
    assert env.reward == 0.5
    assert env._reward_details() == {"reward": 0.5, "style": 1.0}


def test_reward_json_wins_over_reward_txt(tmp_path, options):
    test = write_reward("1") + write_reward('{"only": 0.25}', "reward.json").removeprefix("#!/bin/bash\n")
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", test=test))
    assert env.reward == 0.25


def test_several_keys_without_reward_say_how_to_choose(tmp_path, options, no_keys_seen, caplog):
    task = make_task(tmp_path / "task", test=write_reward('{"a": 1, "b": 0}', "reward.json"))
    env = bash_env(options)
    env.reset(task_dir=task)
    with pytest.raises(RewardKeyError, match=r"'a', 'b'.*reward_key"):
        outcome_reward(environments=[env])
    assert "reward_invalid" not in caplog.text
    chosen = bash_env(RolloutOptions(trials_dir=options.trials_dir, reward_key="b"))
    chosen.reset(task_dir=task)
    assert chosen.reward == 0.0 and chosen._failure is None


ODD = """#!/bin/bash
if [ -e /tmp/odd ]; then echo '{"x": 1, "y": 1}'; else echo '{"reward": 1}'; fi > /logs/verifier/reward.json
"""


def odd_reward(task, options):
    env = bash_env(options)
    env.reset(task_dir=task)
    env.bash("touch /tmp/odd")
    return env


def test_a_policy_cannot_end_the_run_with_odd_reward_keys_in_the_first_rollout(tmp_path, options, no_keys_seen):
    task = make_task(tmp_path / "task", test=ODD)
    odd, fine = odd_reward(task, options), bash_env(options)
    fine.reset(task_dir=task)
    assert outcome_reward(environments=[odd, fine]) == [0.0, 1.0]
    assert odd._failure.kind is FailureKind.REWARD_INVALID
    # Nor later, however often, on this task or on one that was never tried.
    other = make_task(tmp_path / "other", test=ODD)
    envs = [odd_reward(one, options) for one in (task, other) for _ in range(3)]
    assert outcome_reward(environments=envs) == [0.0] * 6


def test_a_suite_that_never_gives_the_key_ends_the_run_although_policies_ran_commands(tmp_path, options, no_keys_seen):
    task = make_task(tmp_path / "task", test=write_reward('{"a": 1, "b": 0}', "reward.json"))
    envs = [bash_env(options) for _ in range(4)]
    for env in envs:
        env.reset(task_dir=task)
        env.bash("true")
    with pytest.raises(RewardKeyError, match=r"'a', 'b'.*reward_key"):
        outcome_reward(environments=envs)


def test_another_reward_key_is_not_known_from_the_first(tmp_path, options, no_keys_seen):
    task = make_task(tmp_path / "task", test=write_reward('{"a": 1, "b": 0}', "reward.json"))
    for key, expected in (("a", 1.0), ("typo", None)):
        env = bash_env(RolloutOptions(trials_dir=options.trials_dir, reward_key=key))
        env.reset(task_dir=task)
        if expected is not None:
            assert env.reward == expected
            continue
        with pytest.raises(RewardKeyError, match="'typo'"):
            _ = env.reward


def test_an_environment_kwarg_that_harbor_would_ignore_is_refused(tmp_path):
    env = bash_env(RolloutOptions(trials_dir=str(tmp_path), environment_kwargs={"memory_mb": 64}))
    with pytest.raises(ValueError, match=r"memory_mb.*'kwargs'"):
        env.reset(task_dir=make_task(tmp_path / "task"))


def test_an_environment_that_was_never_reset_has_reward_zero():
    env = HarborBashEnv("bubblewrap")
    assert env.reward == 0.0
    assert env._env is None
    assert "reset() was never called" in env.bash("ls")


def test_reset_without_task_dir_is_a_value_error():
    with pytest.raises(ValueError, match="task_dir"):
        HarborBashEnv("bubblewrap").reset(prompt="x")


# ── failures that the policy can cause: 0.0 ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        pytest.param("#!/bin/bash\ntrue\n", FailureKind.REWARD_MISSING, id="no reward file"),
        pytest.param("#!/bin/bash\n: > /logs/verifier/reward.txt\n", FailureKind.REWARD_INVALID, id="empty"),
        pytest.param(write_reward("good"), FailureKind.REWARD_INVALID, id="no number"),
        pytest.param(write_reward("nan"), FailureKind.REWARD_INVALID, id="not a number"),
        pytest.param(write_reward("inf"), FailureKind.REWARD_INVALID, id="infinite"),
        pytest.param(write_reward("-1e308"), FailureKind.REWARD_INVALID, id="infinite for the trainer"),
        pytest.param(write_reward('{"reward": "1"}', "reward.json"), FailureKind.REWARD_INVALID, id="text in json"),
        pytest.param(write_reward('{"reward": ', "reward.json"), FailureKind.REWARD_INVALID, id="broken json"),
        pytest.param(write_reward("[1]", "reward.json"), FailureKind.REWARD_INVALID, id="json list"),
        pytest.param(
            write_reward("[" * 100_000 + "]" * 100_000, "reward.json"), FailureKind.REWARD_INVALID, id="deep json"
        ),
        pytest.param(write_reward("{}", "reward.json"), FailureKind.REWARD_MISSING, id="no keys"),
        pytest.param(
            write_reward(f'{{"reward": 1{"0" * 400}}}', "reward.json"),
            FailureKind.REWARD_INVALID,
            id="no float holds it",
        ),
        pytest.param(
            "#!/bin/bash\n(echo 1; head -c 2M /dev/zero | tr '\\0' ' ') > /logs/verifier/reward.txt\n",
            FailureKind.REWARD_INVALID,
            id="huge",
        ),
        pytest.param("#!/bin/bash\nmkdir /logs/verifier/reward.json\n", FailureKind.REWARD_INVALID, id="a directory"),
        pytest.param("#!/bin/bash\nln -s /etc/hostname /logs/verifier/reward.txt\n", None, id="a link"),
    ],
)
def test_a_missing_or_broken_reward_is_zero(tmp_path, options, test, kind):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", test=test))
    assert env.reward == 0.0
    assert not env._failure.kind.masked
    assert kind is None or env._failure.kind is kind


@pytest.mark.parametrize(
    ("test", "end"),
    [
        ("nothing-like-it", "test.sh: line 1: nothing-like-it: command not found"),
        ("true", "; it printed nothing"),
        ("printf 'bad \\033[31m\\ncolour'", "its output ends with: bad [31m colour"),
        ("seq 100000", " 99999 100000"),
        ("cd /logs/verifier; rm test-stdout.txt; ln -s /etc/passwd test-stdout.txt", "into /logs/verifier"),
    ],
)
def test_a_missing_reward_comes_with_what_the_verifier_said_last(tmp_path, options, test, end):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", test=test))
    assert env.reward == 0.0
    kind, message = env._failure
    assert kind is FailureKind.REWARD_MISSING
    assert message.startswith("the verifier wrote neither reward.txt nor reward.json into /logs/verifier")
    assert message.endswith(end) and len(message) < 500


def test_a_verifier_timeout_is_zero(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", test="sleep 60\n", toml="[verifier]\ntimeout_sec = 1\n"))
    assert env.reward == 0.0
    assert env._failure.kind is FailureKind.VERIFIER_TIMEOUT


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 -1",
        "rm -rf /usr /bin /lib /lib64 2>/dev/null",
        "rm -rf /logs; ln -s /nowhere /logs",
        "rm -rf /logs/verifier; mkdir -p /logs; echo x > /logs/verifier",
        "rm -rf /tests; echo x > /tests",
    ],
)
def test_a_sandbox_that_the_policy_broke_is_never_better_than_a_wrong_answer(tmp_path, options, command):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash(command)
    assert env.reward == 0.0


def test_a_failure_after_commands_is_the_policys_doing(tmp_path, options):
    task = make_task(tmp_path / "task")
    env, idle = (bash_env(options, "faults:TestsUploadFails") for _ in range(2))
    for each in (env, idle):
        each.reset(task_dir=task)
    env.bash("true")
    assert env.reward == 0.0
    assert env._failure.kind is FailureKind.SANDBOX_BROKEN
    assert idle.reward is None
    assert idle._failure.kind is FailureKind.SANDBOX_LOST


def test_a_sandbox_beyond_use_ends_as_zero_without_waiting_for_a_verifier(tmp_path, options, monkeypatch):
    import faults

    monkeypatch.setattr("harbor_trl.execution.GRACE_SEC", 1)
    faults.StopsAnswering.silent.clear()
    env = bash_env(options, "faults:StopsAnswering")
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash("true")
    faults.StopsAnswering.silent.set()
    assert "does not answer" in env._exec("true", timeout=1)
    assert "beyond use" in env.bash("true")
    assert env.reward == 0.0
    assert env._failure.kind is FailureKind.SANDBOX_BROKEN
    faults.StopsAnswering.silent.clear()


@pytest.mark.parametrize("used", [False, True])
def test_a_sandbox_that_ended_before_the_first_command_is_no_policys_doing(tmp_path, options, used):
    import faults

    faults.EndsByItself.ended.clear()
    env = bash_env(options, "faults:EndsByItself")
    env.reset(task_dir=make_task(tmp_path / "task"))
    if used:
        env.bash("true")
    env._current.engine.run(env._current.sandbox())
    faults.EndsByItself.ended.set()
    assert env.bash("true") == (
        "[not run: the sandbox has ended: Error response from daemon: container 3f2a is not running]"
    )
    assert env.reward == (0.0 if used else None)
    assert env._failure.kind is (FailureKind.SANDBOX_BROKEN if used else FailureKind.SANDBOX_LOST)


def test_direct_use_of_the_sandbox_counts_as_a_command(tmp_path, options):
    env = bash_env(options, "faults:TestsUploadFails")
    env.reset(task_dir=make_task(tmp_path / "task"))
    env._run(env._env.exec("true"))
    assert env.reward == 0.0


# ── failures of the infrastructure: None ────────────────────────────────────────────────────────────────────────────


def test_a_sandbox_that_does_not_start_is_masked(tmp_path, options, caplog):
    task = make_task(tmp_path / "task")
    broken, fine = bash_env(options, "faults:StartFails"), bash_env(options)
    broken.reset(task_dir=task)
    fine.reset(task_dir=task)
    assert "no machine could be had" in broken.bash("echo -n 42 > /workdir/answer.txt")
    fine.bash("echo -n 42 > /workdir/answer.txt")
    logged: dict[str, float] = {}
    assert outcome_reward(environments=[broken, fine], log_metric=logged.__setitem__) == [None, 1.0]
    assert broken._failure.kind is FailureKind.START_FAILED
    assert logged["harbor/failed"] == logged["harbor/masked"] == logged["harbor/failed/start_failed"] == 0.5
    assert logged["harbor/failed/sandbox_broken"] == 0.0
    with pytest.raises(SandboxLostError):
        _ = broken._env


def test_a_start_that_hangs_is_masked_after_start_timeout(tmp_path):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), start_timeout=1)
    env = bash_env(options, "faults:StartHangs")
    env.reset(task_dir=make_task(tmp_path / "task"))
    assert env.reward is None
    assert env._failure.kind is FailureKind.START_FAILED
    assert "start_timeout=1" in env._failure.message


def test_a_failed_healthcheck_is_masked(tmp_path, options):
    toml = '[environment.healthcheck]\ncommand = "false"\nretries = 1\ninterval_sec = 0.1\nstart_period_sec = 0.0\n'
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", toml=toml))
    assert env.reward is None
    assert env._failure.kind is FailureKind.START_FAILED


class BrokenSetup(HarborTerminalEnv):
    async def _setup(self) -> None:
        raise ZeroDivisionError("a bug in the harness")


def test_a_setup_that_raises_is_masked_and_named(tmp_path, options, caplog):
    env = BrokenSetup("bubblewrap", options=options)
    with caplog.at_level(logging.INFO):
        env.reset(task_dir=make_task(tmp_path / "task"))
        assert env.reward is None
    assert env._failure.kind is FailureKind.SETUP_FAILED
    assert "a bug in the harness" in env._failure.message
    assert "a bug in the harness" in caplog.text


def test_a_task_that_harbor_refuses_is_masked(tmp_path, options):
    env = bash_env(options)
    text = env.reset(task_dir=str(tmp_path / "nothing"))
    assert "cannot be read" in text
    assert env.reward is None
    assert env._failure.kind is FailureKind.TASK_REFUSED


def test_a_killed_launcher_is_no_policys_doing(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash("echo -n 42 > /workdir/answer.txt")
    env._env._sandbox.launcher._process.kill()
    assert env.reward is None
    assert env._failure.kind is FailureKind.BACKEND_DOWN


def test_a_backend_that_is_down_for_others_too_is_masked(tmp_path, options):
    import faults

    faults.GoesDown.down.clear()
    envs = [bash_env(options, "faults:GoesDown") for _ in range(4)]
    task = make_task(tmp_path / "task")
    for env in envs:
        env.reset(task_dir=task)
    for env in envs:
        env.bash("true")
    faults.GoesDown.down.set()
    assert "did not answer" in envs[0].bash("true")
    assert outcome_reward(environments=envs) == [None] * 4
    assert {env._failure.kind for env in envs} == {FailureKind.BACKEND_DOWN}


@pytest.fixture
def fresh_backends(monkeypatch):
    """As in a fresh process: no rollout has been tried yet."""
    monkeypatch.setattr("harbor_trl.rollout._backends", {})


def batch(options, count, task_dir, environment_type="bubblewrap"):
    envs = [bash_env(options, environment_type) for _ in range(count)]
    for env in envs:
        env.reset(task_dir=str(task_dir))
    return envs


def custom_rewards(environments):
    return [env.reward for env in environments]


@pytest.mark.parametrize("function", [lambda envs: outcome_reward(environments=envs), custom_rewards])
def test_a_run_in_which_nothing_works_ends_after_its_first_rollouts(tmp_path, fresh_backends, function):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), give_up_after=6)
    assert function(batch(options, 4, tmp_path / "nothing")) == [None] * 4
    with pytest.raises(
        NothingWorksError, match=r"first \d rollouts on 'bubblewrap'.*\n  \d x task_refused.*nothing"
    ) as caught:
        function(batch(options, 4, tmp_path / "nothing"))
    assert "give_up_after=None" in str(caught.value)


def test_a_run_goes_on_if_one_rollout_of_the_first_batch_works_or_it_is_told_to(tmp_path, fresh_backends, caplog):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), give_up_after=4)
    slow = batch(options, 1, make_task(tmp_path / "task"))
    assert outcome_reward(environments=[*batch(options, 8, tmp_path / "nothing"), *slow]) == [None] * 8 + [0.0]
    assert "8 of 9 rollouts have no reward and are left out: 8 task_refused" in caplog.text
    # From now on it is an outage, which passes.
    caplog.clear()
    assert outcome_reward(environments=batch(options, 8, tmp_path / "nothing")) == [None] * 8
    assert "8 of 8 rollouts" in caplog.text
    never = RolloutOptions(trials_dir=str(tmp_path / "trials"), give_up_after=None)
    assert outcome_reward(environments=batch(never, 8, make_task(tmp_path / "x"), "faults:StartFails")) == [None] * 8


def test_rollouts_that_the_trainer_gave_up_say_nothing_of_the_configuration(tmp_path, fresh_backends):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), give_up_after=2)
    task = make_task(tmp_path / "task")
    env = bash_env(options)
    for _ in range(4):
        env.reset(task_dir=task)
    assert env.reward == 0.0


def test_an_engine_that_answers_too_late_is_down_also_if_its_client_ends_just_then(monkeypatch):
    from harbor_trl.environments import health

    class EndsJustThen:
        async def wait(self):
            await asyncio.sleep(60)

        def kill(self):
            raise ProcessLookupError

    async def start(*args, **kwargs):
        return EndsJustThen()

    monkeypatch.setattr(health, "_PROBE_TIMEOUT_SEC", 0.01)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    assert asyncio.run(health._engine_answers("docker")) is False


# ── full disks ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def fill(disk: Path) -> None:
    with open(disk / "other data", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass


@pytest.mark.parametrize("environment_type", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def test_a_full_disk_of_this_machine_is_not_the_policys_fault(small_disk, tmp_path, environment_type):
    task = make_task(tmp_path / "task")
    options = RolloutOptions(trials_dir=str(small_disk / "trials"))
    env, late = (bash_env(options, environment_type) for _ in range(2))
    env.reset(task_dir=task)
    env.bash("echo -n 42 > /workdir/answer.txt")
    fill(small_disk)
    late.reset(task_dir=task)
    assert outcome_reward(environments=[env, late]) == [None, None]
    assert [one._failure.kind for one in (env, late)] == [FailureKind.DISK_FULL] * 2
    assert str(small_disk) in env._failure.message


def test_a_disk_that_the_policy_filled_in_its_own_sandbox_is_the_policys_doing(tmp_path):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), environment_kwargs={"kwargs": {"storage_mb": 8}})
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    assert "No space left" in env.bash("cat /dev/zero > /tmp/zeros")
    assert env.reward == 0.0
    assert env._failure is None or not env._failure.kind.masked


def test_a_disk_that_the_policy_filled_through_its_logs_is_the_policys_doing(small_disk, tmp_path):
    env = bash_env(RolloutOptions(trials_dir=str(small_disk / "trials")))
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash("echo -n 42 > /workdir/answer.txt")
    fill(env._trial_dir / "agent")  # as a policy can where a container mounts this directory
    assert env.reward == 0.0
    assert env._failure.kind is FailureKind.SANDBOX_BROKEN


@pytest.mark.docker
def test_what_a_policy_wrote_to_its_containers_disk_is_counted(tmp_path, options):
    from harbor_trl.disk import container_bytes

    env = bash_env(options, "docker")
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash("head -c 20M /dev/urandom > /opt/noise")
    assert 20 << 20 <= env._run(container_bytes(env._rollout.id)) < 40 << 20
    assert env._run(container_bytes(f"{env._rollout.id}-other")) == 0


def test_a_broken_sandbox_among_live_ones_is_not_an_outage(tmp_path, options):
    task = make_task(tmp_path / "task")
    broken = bash_env(options, "faults:TestsUploadFails")
    others = [bash_env(options, "faults:TestsUploadFails") for _ in range(3)]
    for env in (broken, *others):
        env.reset(task_dir=task)
    for env in others:
        assert env.bash("true") == "(empty output, rc=0)"
    broken.bash("true")
    assert broken.reward == 0.0


# ── when the trainer waits ──────────────────────────────────────────────────────────────────────────────────────────


def test_all_sandboxes_of_a_batch_start_together(tmp_path, options):
    import faults

    faults.StartsTogether.begun = 0
    envs = [bash_env(options, "faults:StartsTogether") for _ in range(faults.StartsTogether.parties)]
    task = make_task(tmp_path / "task")
    for env in envs:  # one start after the other would wait for ever
        env.reset(task_dir=task)
    assert [env.bash("echo up") for env in envs] == ["up\n"] * len(envs)


def custom_reward(environments, **kwargs):
    return [env.reward for env in environments]


def hidden_custom_reward(**kwargs):
    return list(map(lambda env: env.reward, kwargs["environments"]))


class Trainer:
    """What a reward function's frames look like under TRL: the trainer holds the batch."""

    def __init__(self, environments):
        self.environments = environments

    def calculate_rewards(self, function):
        return function(environments=self.environments, completions=[])


@pytest.mark.parametrize("function", [outcome_reward, custom_reward, hidden_custom_reward])
def test_a_batch_is_verified_at_once(tmp_path, options, function):
    import faults

    faults.VerifiesTogether.begun = 0
    envs = [bash_env(options, "faults:VerifiesTogether") for _ in range(faults.VerifiesTogether.parties)]
    task = make_task(tmp_path / "task", toml="[verifier]\ntimeout_sec = 20\n", test=write_reward("1"))
    for env in envs:
        env.reset(task_dir=task)
    assert Trainer(envs).calculate_rewards(function) == [1.0] * len(envs)


def test_nobody_waits_for_a_sandbox_to_stop(tmp_path, options):
    import faults

    faults.StopsSlowly.may_stop.clear()
    faults.StopsSlowly.stopped = 0
    env = bash_env(options, "faults:StopsSlowly")
    task = make_task(tmp_path / "task", test=write_reward("1"))
    env.reset(task_dir=task)
    assert env.reward == 1.0
    env.reset(task_dir=task)
    assert env.bash("echo next") == "next\n"
    assert env.reward == 1.0
    assert faults.StopsSlowly.stopped == 0
    faults.StopsSlowly.may_stop.set()
    assert eventually(lambda: faults.StopsSlowly.stopped == 2)


def test_the_agents_timeout_counts_commands_not_the_wall_clock(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", toml="[agent]\ntimeout_sec = 2\n"))
    env.bash("true")
    time.sleep(2.5)  # the model thinks
    assert env.bash("echo -n 42 > /workdir/answer.txt; echo alive") == "alive\n"
    started = time.monotonic()
    env.bash("sleep 30")
    assert time.monotonic() - started < 25
    assert "no time left" in env.bash("true")
    assert env.reward == 1.0


@pytest.mark.parametrize(("repair", "seen"), [(True, "data\n"), (None, "none\n")])
def test_copies_that_a_backend_drops_are_repaired_before_the_healthcheck(tmp_path, repair, seen):
    task = make_task(
        tmp_path / "task",
        dockerfile='FROM debian:bookworm-slim\nWORKDIR /app\nCOPY ["a file", "/opt/b c/"]\n',
        files={"environment/a file": "data\n"},
        toml=""
        if repair is None
        else "[environment.healthcheck]\ncommand = \"test -e '/opt/b c/a file'\"\nretries = 1\n",
    )
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), repair_copies=repair)
    env = bash_env(options, "faults:DropsCopies")
    env.reset(task_dir=task)
    assert env.bash("cat '/opt/b c/a file' 2>/dev/null || echo none") == seen


# ── reuse of environments ───────────────────────────────────────────────────────────────────────────────────────────


class SlowSetup(HarborTerminalEnv):
    """Remembers what each `_setup` saw."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._seen: list[object] = []

    async def _setup(self) -> None:
        before = self._env
        await asyncio.sleep(0.3)
        assert self._env is before
        self._seen.append(before)


def test_a_late_setup_of_the_old_rollout_never_touches_the_new_one(tmp_path, options):
    task = make_task(tmp_path / "task", test=write_reward("1"))
    env = SlowSetup("bubblewrap", options=options)
    for _ in range(3):
        env.reset(task_dir=task)
        time.sleep(0.1)
    env.reset(task_dir=task)
    live = env._env
    assert env.reward == 1.0
    assert env._seen[-1] is live
    assert len(set(map(id, env._seen))) == len(env._seen)


def test_reset_gives_up_an_unfinished_rollout(tmp_path, options):
    env = bash_env(options)
    task = make_task(tmp_path / "task")
    env.reset(task_dir=task)
    env.bash("echo -n 42 > /workdir/answer.txt")
    old = env._rollout
    env.reset(task_dir=task)
    assert env.reward == 0.0  # nothing of the old answer
    assert old.result.failure.kind is FailureKind.ABANDONED
    assert eventually(lambda: not old.trial_dir.exists())


def test_a_tool_call_after_the_reward_is_refused(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    assert env.reward == 0.0
    assert "rollout is over" in env.bash("echo -n 42 > /workdir/answer.txt")
    assert env.reward == 0.0


def test_an_environment_that_is_dropped_stops_its_sandbox(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash("true")
    rollout = env._rollout
    del env
    gc.collect()
    assert eventually(lambda: rollout.result is not None)
    assert rollout.result.failure.kind is FailureKind.ABANDONED


# ── loops, threads, limits, directories ─────────────────────────────────────────────────────────────────────────────


def test_works_inside_a_running_loop_as_in_a_notebook(tmp_path, options):
    async def cell() -> float | None:
        env = bash_env(options)
        env.reset(task_dir=make_task(tmp_path / "task"))
        env.bash("echo -n 42 > /workdir/answer.txt")
        assert await env._aexec("echo async") == "async\n"
        return env.reward

    assert asyncio.run(cell()) == 1.0


class BlockingSetup(HarborTerminalEnv):
    async def _setup(self) -> None:
        self._exec("true")


def test_a_blocking_call_on_the_engines_loop_is_an_error_not_a_hang(tmp_path, options):
    env = BlockingSetup("bubblewrap", options=options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    assert env.reward is None
    assert "await" in env._failure.message


def test_a_harness_reads_and_writes_files_of_any_name_and_content(tmp_path, options):
    env = bash_env(options)
    with pytest.raises(SandboxLostError, match="never called"):
        env._read_file("x")
    env.reset(task_dir=make_task(tmp_path / "task"))
    for name, data in {"a b/'c'\n": b"\0\xff\r\n", "-n": b"", "/tmp/deep/er": bytes(range(256)) * 2000}.items():
        env._write_file(name, data)
        assert env._read_file(name) == data
    env._write_file("/workdir/answer.txt", "42")
    with pytest.raises(SandboxFileError, match="longer"):
        env._read_file("/tmp/deep/er", max_bytes=100)
    with pytest.raises(SandboxFileError, match="no such file"):
        env._read_file("/tmp/none")
    assert env.reward == 1.0
    with pytest.raises(SandboxLostError):
        env._read_file("/workdir/answer.txt")


def test_files_of_a_sandbox_that_was_stopped_are_lost_with_it(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    env._run(env._env.stop(delete=True))
    for call in (
        lambda: env._read_file("/etc/passwd"),
        lambda: env._write_file("x", b""),
        lambda: env._run(env._env.upload_file(__file__, "/x")),
    ):
        with pytest.raises(SandboxLostError):
            call()


def test_the_output_limit_holds_per_rollout_and_per_call(tmp_path, options):
    env = bash_env(RolloutOptions(trials_dir=options.trials_dir, output_limit=400))
    env.reset(task_dir=make_task(tmp_path / "task"))
    text = env.bash("echo begin; seq 10000; echo end")
    assert text.startswith("begin\n1\n") and "end\n" in text[-200:] and len(text) < 700
    assert 1000 < len(env._exec("seq 10000", output_limit=1000)) < 1300


def test_max_sandboxes_below_the_batch_says_so_instead_of_hanging(tmp_path):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), max_sandboxes=1, start_timeout=8)
    task = make_task(tmp_path / "task")
    first, second = bash_env(options), bash_env(options)
    first.reset(task_dir=task)
    first.bash("true")
    second.reset(task_dir=task)
    assert "max_sandboxes=1" in second.bash("true")
    assert second.reward is None
    assert first.reward == 0.0
    third = bash_env(options)
    third.reset(task_dir=task)
    assert third.bash("echo free again") == "free again\n"


@pytest.mark.parametrize(("keep", "kept"), [("failed", [False, True]), ("all", [True, True]), ("none", [False, False])])
def test_keep_trials(tmp_path, keep, kept):
    options = RolloutOptions(trials_dir=str(tmp_path / "trials"), keep_trials=keep)
    fine, failed = bash_env(options), bash_env(options)
    fine.reset(task_dir=make_task(tmp_path / "fine"))
    failed.reset(task_dir=make_task(tmp_path / "failed", test="true\n"))
    assert (fine.reward, failed.reward) == (0.0, 0.0)
    dirs = [fine._trial_dir, failed._trial_dir]
    for trial_dir, stays in zip(dirs, kept, strict=True):
        if stays:
            assert eventually((trial_dir / "result.json").exists)
        else:
            assert eventually(lambda d=trial_dir: not d.exists())
    assert keep != "none" or eventually(lambda: not list(Path(options.trials_dir).iterdir()))


@pytest.mark.parametrize("depth", [1200, 6000])
def test_a_deep_tree_of_logs_leaves_nothing_behind(tmp_path, options, depth):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    assert env.bash("true") == "(empty output, rc=0)"
    trial_dir = env._trial_dir
    here = os.open(trial_dir / "agent", os.O_RDONLY)
    for _ in range(depth):  # as a policy can where a container mounts this directory
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        assert env.reward == 0.0
        assert eventually(lambda: not trial_dir.exists())
    finally:
        subprocess.run(["rm", "-rf", trial_dir], check=True)  # pytest's own cleaning up cannot


def test_rollouts_that_cannot_start_do_not_keep_each_other_alive(tmp_path, options):
    env = bash_env(options)
    rollouts = []
    for _ in range(5):
        env.reset(task_dir=str(tmp_path / "nothing"))
        assert env.reward is None
        rollouts.append(weakref.ref(env._rollout))
    gc.collect()
    assert eventually(lambda: [rollout() for rollout in rollouts[:-2]] == [None] * 3)


def test_no_logger_outlives_its_trial(tmp_path, options):
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task"))
    env.bash("true")
    name, trial_logger = env._rollout.id, weakref.ref(env._rollout._trial.logger)
    known = logging.root.manager.loggerDict
    assert any(name in one for one in known)  # else this would test nothing
    assert env.reward == 0.0
    env.reset(task_dir=make_task(tmp_path / "another"))
    assert eventually(lambda: not any(name in one for one in list(known)))

    def is_gone() -> bool:
        gc.collect()
        return trial_logger() is None

    assert eventually(is_gone)


def test_tasks_that_bring_mcp_servers_and_skills_stay_trainable(tmp_path, options):
    toml = '[environment]\nskills_dir = "/skills"\n[[environment.mcp_servers]]\nname = "x"\ntransport = "sse"\nurl = "http://x/"\n'
    env = bash_env(options)
    env.reset(task_dir=make_task(tmp_path / "task", toml=toml, test=write_reward("1")))
    assert env.reward == 1.0


def test_64_rollouts_at_once(tmp_path, options):
    envs = [bash_env(options) for _ in range(64)]
    task = make_task(tmp_path / "task")
    for env in envs:
        env.reset(task_dir=task)
    for number, env in enumerate(envs):
        env.bash(f"echo -n {42 if number % 2 else number} > /workdir/answer.txt")
    rewards = outcome_reward(environments=envs)
    assert rewards == [1.0 if number % 2 or number == 42 else 0.0 for number in range(64)]


def test_tools_are_the_public_methods_and_nothing_else():
    import inspect

    for harness in (HarborBashEnv, HarborTerminalEnv):
        public = {name for name, _ in inspect.getmembers(harness, inspect.isfunction) if not name.startswith("_")}
        assert public == {"reset", "bash"}
    assert not [name for name, _ in inspect.getmembers(HarborEnv, inspect.isfunction) if name == "get_reward"]
