"""Async tools, and calls at the same time into one sandbox: allowed, unless the harness says otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harbor_trl import HarborEnv
from harbor_trl.options import RolloutOptions
from harbor_trl.testing import check_harness
from tasks import make_task

BACKENDS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
#: Each waits for the other.
RENDEZVOUS = [f"touch {own}; until [ -e {other} ]; do sleep 0.1; done; echo met" for own, other in ("ab", "ba")]
#: Each fails if the other is in between.
EXCLUSIVE = "mkdir taken || exit 1; sleep 0.2; rmdir taken; echo alone"


class Parallel(HarborEnv):
    async def shell(self, command: str) -> str:
        """
        Run a shell command.

        Args:
            command: The shell command.
        """
        return await self._aexec(command, timeout=20)


class Serial(Parallel):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._turn = asyncio.Lock()

    async def shell(self, command: str) -> str:
        """
        Run a shell command; one at a time.

        Args:
            command: The shell command.
        """
        async with self._turn:
            return await self._aexec(command, timeout=20)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., HarborEnv]:
    def start(harness: type[HarborEnv], backend: str) -> HarborEnv:
        env = harness(backend, options=RolloutOptions(trials_dir=str(tmp_path / "trials")))
        env.reset(task_dir=make_task(tmp_path / "task"))
        return env

    return start


async def together(env: Parallel | Serial, *commands: str) -> list[str]:
    return await asyncio.gather(*(env.shell(command) for command in commands))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_of_one_turn_run_at_the_same_time(backend, start):
    env = start(Parallel, backend)
    assert asyncio.run(together(env, *RENDEZVOUS)) == ["met\n"] * 2
    # What a call does not wait for, the caller's loop goes on with.
    assert asyncio.run(together(env, "echo $((6 * 7))", "exit 3", "nosuchprogram 2>/dev/null")) == [
        "42\n",
        "(empty output, rc=3)",
        "(empty output, rc=127)",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_from_two_threads_run_at_the_same_time(backend, start):
    env = start(Parallel, backend)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda it=it: texts.append(env._exec(it, timeout=20))) for it in RENDEZVOUS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["met\n"] * 2


def test_a_harness_may_say_one_at_a_time(start):
    env = start(Serial, "bubblewrap")
    assert asyncio.run(together(env, *[EXCLUSIVE] * 3)) == ["alone\n"] * 3


@pytest.mark.parametrize("harness", [Parallel, Serial])
def test_async_harnesses_conform(harness):
    check_harness(harness, tools={"shell"})
