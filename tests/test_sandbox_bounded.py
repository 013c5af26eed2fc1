"""`run_command` in a bubblewrap sandbox, which bounds commands itself: what a sandbox can be made to suffer."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harbor_trl.execution import CommandResult, RunsBounded, run_command
from sandbox_support import Live, host_processes, make_environment, require, running

LIMITS = {"memory_mb": 256, "storage_mb": 8, "max_processes": 64}


@pytest.fixture(autouse=True)
def bubblewrap_here() -> None:
    require("bubblewrap")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with running(make_environment("bubblewrap", tmp_path, options=dict(LIMITS), workdir="/work")) as started:
        assert isinstance(started.environment, RunsBounded)
        yield started


def run(live: Live, command: str, **kwargs: Any) -> CommandResult:
    return live.wait(run_command(live.environment, command, **kwargs))


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def descriptors_of_pid_1(live: Live) -> int:
    return len(list(Path(f"/proc/{pid_1(live)}/fd").iterdir()))


def pid_1(live: Live) -> int:
    """On the host."""
    (child,) = (
        Path(f"/proc/{live.environment._sandbox.pid}/task/{live.environment._sandbox.pid}/children").read_text().split()
    )
    return int(child)


def test_signals_that_end_programs_end_them(live: Live) -> None:
    for signal in ("TERM", "HUP", "INT"):
        assert run(live, f"bash -c 'kill -{signal} $$; echo ignored'; echo $?").text.split()[-1] in (
            "143",
            "129",
            "130",
        )
    assert run(live, "sleep 60 & kill $!; wait $!; echo $?").text == "143\n"


def test_the_tasks_own_variables_win(tmp_path: Path) -> None:
    environment = make_environment(
        "bubblewrap",
        tmp_path,
        dockerfile="FROM debian\nENV TERM=xterm\n",
        persistent_env={"PAGER": "less"},
    )
    with running(environment) as live:
        assert run(live, "echo $TERM $PAGER $GIT_PAGER").text == "xterm less cat\n"


def test_an_output_is_owned_by_the_user_of_the_command(live: Live) -> None:
    if not live.environment._sandbox.many_users:
        pytest.skip("a sandbox that an ordinary user starts has one user")
    with live.environment.with_default_user("1000"):
        file = re.search(r"/tmp/harbor-trl-\w+\.out", run(live, "id -u; seq 9999").text)[0]
        assert run(live, f"stat -c '%u %a' {file}; head -n 2 {file}; rm {file}").text == "1000 644\n1000\n1\n"


def test_a_killed_reaper_costs_no_output(live: Live) -> None:
    result = run(live, "echo written; (setsid sleep 4343431 &); kill -KILL $PPID; sleep 4343431")
    assert result.text == "written\n(rc=137)\n[killed by SIGKILL]"
    assert host_processes("sleep 4343431") == []


def test_a_stopped_reaper_is_ended_at_the_deadline(live: Live) -> None:
    assert run(live, "kill -STOP $PPID; echo done", timeout_sec=1).text.startswith("done\n[timed out after 1 s")
    assert run(live, "echo usable").text == "usable\n"


@pytest.mark.parametrize(
    "escape", ["kill -STOP $$", "(env -i setsid bash -c 'trap \"\" TERM; sleep 4343432' &); sleep 60"]
)
def test_nothing_escapes_the_deadline(live: Live, escape: str) -> None:
    result = run(live, f"echo before; {escape}", timeout_sec=1)
    assert result.text == "before\n[timed out after 1 s: the command and all it started were killed]"
    assert host_processes("sleep 4343432") == []


def test_a_command_may_clean_up_at_the_deadline(live: Live) -> None:
    result = run(live, "trap 'echo cleaned; exit' TERM; sleep 60 & wait", timeout_sec=1)
    assert result.text == "cleaned\n[timed out after 1 s: the command and all it started were killed]"


def test_a_cancelled_command_is_killed(live: Live) -> None:
    call = asyncio.run_coroutine_threadsafe(
        run_command(live.environment, "setsid sleep 4343433 & sleep 4343433"), live.loop
    )
    eventually(lambda: len(host_processes("sleep 4343433")) >= 2)
    call.cancel()
    eventually(lambda: host_processes("sleep 4343433") == [])
    assert run(live, "echo usable").text == "usable\n"


def test_a_sandbox_without_bash_uses_sh_and_without_either_says_so(live: Live) -> None:
    if not live.environment._sandbox.launcher.overlay:
        pytest.skip("no overlayfs for ordinary users here: /usr is read-only")
    assert run(live, "rm /bin/bash; echo begun").text == "begun\n"
    assert run(live, "echo $0").text == "sh\n"
    assert run(live, ": '" + "é'\\''x" * 30_000 + "'; echo $0 $# done").text == "sh 0 done\n"
    run(live, "rm -rf /bin/* /usr/bin /tmp")
    result = run(live, "echo x")
    assert result.broken and result.text.startswith("[not run: the sandbox has no shell that its backend can start")


@pytest.mark.parametrize("bomb", [":(){ :|:& };:", "while :; do sleep 60 & done"])
def test_a_fork_bomb_of_another_user_leaves_the_sandbox_usable(live: Live, bomb: str) -> None:
    if not live.environment._sandbox.many_users:
        pytest.skip("a sandbox that an ordinary user starts has one user")
    with live.environment.with_default_user("1000"):
        assert run(live, f"echo lit; {bomb}", timeout_sec=2).text.startswith("lit\n")
        second = run(live, "/bin/echo usable", timeout_sec=20)
        assert second.text.startswith("usable\n"), second
        assert second.text == "usable\n" or "could not start any more processes: all that" in second.text
        assert run(live, "/bin/echo usable", timeout_sec=20).text == "usable\n"


def test_threads_left_in_the_background_are_killed_and_named(live: Live) -> None:
    setup = "import threading as t, time; t.stack_size(1 << 16)"
    threads = f"{setup}\nwhile True: t.Thread(target=time.sleep, args=(4343434,)).start()"
    assert run(live, f"python3 -c {shlex.quote(threads)} 2>/dev/null & sleep 1").return_code == 0
    result = run(live, "/bin/echo ran")
    assert result.text.startswith("ran\n[the sandbox could not start any more processes"), result
    assert host_processes("4343434") == []


@pytest.mark.parametrize("name", ["hog", "RssAnon:0kB", "RssAnon:x"])
def test_a_memory_kill_is_said_with_the_output_so_far(live: Live, name: str) -> None:
    named = f"open('/proc/self/comm', 'w').write('{name}')"
    hogs = f'for n in 1 2 3 4; do python3 -c "{named}; x = bytearray(100 << 20); import time; time.sleep(60)" & done'
    result = run(live, f"echo before; {hogs}; wait", timeout_sec=60)
    assert re.fullmatch(
        r"before\n\(rc=137\)\n\[killed by SIGKILL\]\n"
        r"\[the sandbox used \d+ MB of memory, more than its limit of 256 MB: all its processes were killed\]",
        result.text,
    )
    assert run(live, "echo usable").text == "usable\n"


def test_a_full_disk_costs_the_middle_of_an_output_and_says_so(live: Live) -> None:
    for place in ("/tmp", "/dev/shm"):
        run(live, f"cat /dev/zero >{place}/full 2>/dev/null")
    assert run(live, "echo still; seq 1 3").text == "still\n1\n2\n3\n"
    result = run(live, "seq 1 30000")
    assert result.text.startswith("1\n2\n") and "\n30000\n[the sandbox had no room for the output" in result.text
    held = run(live, "sleep 5 & echo x")
    assert held.text == "x\n[a process in the background still holds the output]"
    run(live, "rm /tmp/full /dev/shm/full")
    assert "/tmp/harbor-trl-" in run(live, "seq 1 30000").text


def test_an_output_that_fills_the_disk_makes_room_again(live: Live) -> None:
    result = run(live, "echo begin; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo end")
    assert result.text.startswith("begin\nxxx") and "xxx\nend\n[the sandbox had no room" in result.text
    assert run(live, "ls /tmp; echo x > /tmp/fits && cat /tmp/fits").text == "x\n"


def test_the_cap_is_what_the_file_holds(live: Live) -> None:
    result = run(live, "yes", output_cap=1_000_000)
    assert result.text.splitlines()[-1].startswith("[stopped: the command wrote more than 976 KiB")
    file = re.search(r"/tmp/harbor-trl-\w+\.out", result.text)[0]
    assert run(live, f"wc -c < {file}").text == "1000000\n"
    # Just as much is not more.
    assert "stopped" not in run(live, "head -c 1000000 /dev/zero", output_cap=1_000_000).text


def test_a_background_flood_does_not_hold_the_call_and_lives_on(live: Live) -> None:
    result = run(live, "yes & echo $! > /tmp/pid; sleep 0.1; yes 2>&1 | head -c 10", timeout_sec=20, output_cap=1 << 30)
    assert "[a process in the background still holds the output" in result.text
    assert run(live, "kill $(cat /tmp/pid)").return_code == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees what PID 1 has open")
def test_calls_leave_no_descriptor_in_pid_1(live: Live) -> None:
    run(live, "true")
    before = descriptors_of_pid_1(live)
    for command in ("true", "seq 9999", "sleep 0.3 & echo x", "kill -9 $PPID", "nosuch", "yes"):
        run(live, command, output_cap=100_000)
    run(live, "sleep 9", timeout_sec=0.2)
    eventually(lambda: descriptors_of_pid_1(live) == before)


def test_a_stopped_sandbox_fails_its_calls(live: Live) -> None:
    call = asyncio.run_coroutine_threadsafe(run_command(live.environment, "sleep 60"), live.loop)
    time.sleep(0.3)
    live.wait(live.environment.stop(delete=True))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            call.result(20)
        call = asyncio.run_coroutine_threadsafe(run_command(live.environment, "sleep 60"), live.loop)


def test_many_calls_at_once_keep_their_output(live: Live) -> None:
    async def all_at_once() -> list[CommandResult]:
        return await asyncio.gather(
            *(run_command(live.environment, f"seq {n} {n + 999}", output_limit=20_000) for n in range(20))
        )

    for number, result in enumerate(live.wait(all_at_once())):
        assert result.text == "".join(f"{n}\n" for n in range(number, number + 1000))
