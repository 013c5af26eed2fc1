"""However the trainer's process ends, its sandboxes go; looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harbor_trl.engine import Engine
from tasks import make_task

HERE = Path(__file__).parent

ENVIRONMENTS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]


class Run:
    """A trainer's process, and what is left of its sandboxes."""

    def __init__(self, how: str, environment_type: str, tmp_path: Path) -> None:
        task = make_task(tmp_path / "task")
        self.trials = tmp_path / "trials"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "process_end.py"), how, environment_type, task, str(self.trials)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.run_id = self.process.stdout.readline().strip()
        if not self.run_id:
            pytest.fail(self.process.communicate(timeout=60)[1])

    def end(self, timeout: float = 90) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def left(self) -> list[str]:
        """Containers and processes that carry the run's id, but for the process that removes them."""
        left = []
        for proc in Path("/proc").iterdir():
            if proc.name.isdigit() and int(proc.name) != self.process.pid:
                try:
                    command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if self.run_id in command and "reaper.py" not in command:
                    left.append(command)
        try:
            names = subprocess.run(
                ["docker", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True, timeout=60
            )
            left += [name for name in names.stdout.split() if name.startswith(self.run_id)]
        except OSError:
            pass  # no Docker here, so no containers
        return left

    def all_gone(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.left():
            time.sleep(0.2)
        return not self.left()


@pytest.mark.parametrize("environment_type", ENVIRONMENTS)
@pytest.mark.parametrize("how", ["exit", "raise", "starting"])
def test_no_sandbox_outlives_a_process_that_ends_by_itself(how, environment_type, tmp_path):
    run = Run(how, environment_type, tmp_path)
    code, errors = run.end()
    assert code == (1 if how == "raise" else 0), errors
    assert not run.left()
    assert how != "raise" or "the user's own mistake" in errors


@pytest.mark.parametrize("environment_type", ENVIRONMENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cleans_up_before_the_process_ends(number, environment_type, tmp_path):
    run = Run("wait", environment_type, tmp_path)
    assert len(run.left()) >= 2  # the looking itself works
    run.process.send_signal(number)
    code, errors = run.end()
    assert code != 0
    assert not run.left(), errors
    # At once, not below the traceback of a Ctrl-C.
    first, *_, last = errors.splitlines()
    assert first == "harbor-trl: stopping 2 sandboxes before the process ends (Ctrl-C again ends it at once)"
    assert last == "harbor-trl: all sandboxes are stopped"
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_sandboxes_that_do_not_stop_are_said_with_who_removes_them(caplog):
    engine = Engine()

    async def trial() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    engine.start_trial(trial(), lambda: None)
    engine.run(asyncio.sleep(0))
    engine.close(timeout_sec=0.2)
    assert re.search("^1 sandbox did not stop within 0 s: .*`harbor-trl clean`", caplog.messages[-1])


@pytest.mark.parametrize("environment_type", ENVIRONMENTS)
def test_a_second_interrupt_ends_the_process_at_once_and_the_sandboxes_still_go(environment_type, tmp_path):
    run = Run("wait", environment_type, tmp_path)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert run.all_gone(30)


@pytest.mark.parametrize("environment_type", ENVIRONMENTS)
def test_sandboxes_go_after_a_kill(environment_type, tmp_path):
    run = Run("wait", environment_type, tmp_path)
    run.process.kill()
    run.end()
    assert run.all_gone(30)


@pytest.mark.parametrize("environment_type", ENVIRONMENTS)
def test_a_forked_child_has_rollouts_of_its_own(environment_type, tmp_path):
    run = Run("fork", environment_type, tmp_path)
    code, errors = run.end()
    assert code == 0, errors
    assert not run.left()
