"""The terminal_notes harness: background processes in the sandbox, notes on the trainer's side."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harbor_trl.harnesses.terminal_notes import env as terminal_notes
from harbor_trl.harnesses.terminal_notes.env import TerminalNotesEnv
from harbor_trl.options import RolloutOptions
from tasks import make_task

# Harbor calls `bash`; a stand-in for it leaves the harness with nothing but busybox's sh.
ONLY_SH = "FROM harbor-trl-busybox:latest\nRUN printf '#!/bin/sh\\nexec sh \"$@\"\\n' >/bin/bash; chmod +x /bin/bash\n"
COUNT_SLEEPS = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null | grep -cx 'sleep 876 '"
SANDBOXES = [
    pytest.param(("bubblewrap", {}), id="bubblewrap"),
    pytest.param(("docker", {}), id="docker", marks=pytest.mark.docker),
    pytest.param(("docker", {"dockerfile": ONLY_SH}), id="busybox", marks=pytest.mark.docker),
]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., TerminalNotesEnv]:
    def start(backend: str = "bubblewrap", **task: str) -> TerminalNotesEnv:
        env = TerminalNotesEnv(backend, options=RolloutOptions(trials_dir=str(tmp_path / "trials")))
        env.reset(task_dir=make_task(tmp_path / "task", **task))
        return env

    return start


def read_until(env: TerminalNotesEnv, process: int, wanted: str, tries: int = 10) -> str:
    """What `read_output` gives until `wanted` is in it."""
    text = ""
    for _ in range(tries):
        text += env.read_output(process)
        if wanted in text:
            return text
    raise AssertionError(f"{wanted!r} never came: {text}")


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_the_life_of_background_processes(sandbox, start):
    backend, task = sandbox
    env = start(backend, **task)
    assert "1 of them" not in env.list_processes() and "no background processes" in env.list_processes()
    # New output comes once.
    assert env.start_process("echo up; while read -r line; do echo got $line; done; echo end; exit 3").startswith(
        "[process 1 started, running]\nup"
    )
    assert env.send_input(1, 'it\'s "$HOME" `id`') == 'got it\'s "$HOME" `id`\n[process 1: running]'
    assert env.send_input(1, "two\nlines") == "got two\ngot lines\n[process 1: running]"
    assert env.read_output(1, 0) == "[no new output]\n[process 1: running]"
    # Another one, and a child that leaves the group.
    assert "[process 2 started, running]" in env.start_process(
        "trap '' TERM; (setsid sleep 876 || sleep 876) & cat; sleep 876"
    )
    assert env.list_processes().splitlines()[1].startswith("2: running: trap")
    assert env.run_command(COUNT_SLEEPS).startswith("1\n")
    assert "[process 2: ended by signal 9" in env.stop_process(2)
    assert env.run_command(COUNT_SLEEPS).startswith("0\n")
    assert "no process 2. The processes are: 1" in env.read_output(2)
    # The end of the input, and the exit code.
    text = env.send_input(1, "", press_enter=False, end_of_input=True)
    assert "ended with exit code 3" in (text if "ended" in text else read_until(env, 1, "ended"))
    assert "the process has ended" in env.send_input(1, "more")
    assert "127" in (text := env.start_process("no-such-program")) and "not found" in text
    assert "ended with exit code 127: no-such-program" in env.list_processes()
    env.run_command("echo -n 42 > /workdir/answer.txt")
    assert env.reward == 1.0


def test_a_server_lives_on_between_calls(start):
    env = start()
    text = env.start_process("python3 -u -m http.server 8765 --bind 127.0.0.1 --directory /etc")
    assert "Serving HTTP" in text or read_until(env, 1, "Serving HTTP")
    fetch = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8765/hostname\").status)'"
    assert env.run_command(fetch) == "200\n"
    assert "GET /hostname" in env.read_output(1)


def test_a_process_that_talks_without_end_is_capped_on_disk_and_goes_on(start, monkeypatch):
    monkeypatch.setattr(terminal_notes, "MAX_PROCESS_OUTPUT_BYTES", 1 << 20)
    env = start()
    env.start_process("yes | head -c 5000000; echo done > /tmp/done; sleep 60")
    end = time.monotonic() + 30
    while env.run_command("cat /tmp/done") != "done\n" and time.monotonic() < end:
        pass
    text = env.read_output(1)
    assert "output beyond 1 MiB is thrown away" in text and "running" in text
    assert len(text) < env._options.output_limit + 1000
    assert env.run_command("cat /tmp/.harbor-trl-*/1/out | wc -c").strip() == str(1 << 20)


def test_reading_waits_for_output_no_longer_than_asked(start):
    env = start()
    env.start_process("sleep 1.5; echo late; sleep 60")
    assert env.read_output(1, wait_seconds=0) == "[no new output]\n[process 1: running]"
    assert env.read_output(1, wait_seconds=20).startswith("late\n")


def test_the_number_of_processes_is_bounded_and_ended_ones_make_room(start):
    env = start()
    for number in range(terminal_notes.MAX_PROCESSES):
        env.start_process("true" if number == 3 else "sleep 300")
    assert f"[process {terminal_notes.MAX_PROCESSES + 1} started" in env.start_process("sleep 300")
    assert "not started" in (text := env.start_process("sleep 300")) and "stop_process" in text
    assert "4: " not in env.list_processes()


def test_a_policy_that_removes_the_files_or_kills_all_gets_a_text(start):
    env = start()
    env.start_process("cat")
    env.run_command("rm -rf /tmp/.harbor*")
    assert "gone" in env.read_output(1)
    assert "gone" in env.list_processes()
    assert "gone" in env.stop_process(1)
    env.start_process("cat")
    env.run_command("pkill -9 cat; pkill -9 -f processes.sh; pkill -9 sleep; true")
    assert "ended" in env.read_output(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda env: env.run_command("  "), "`command` must be"),
        (lambda env: env.start_process(None), "`command` must be"),
        (lambda env: env.read_output("x"), "no process 'x'. The processes are: 1"),
        (lambda env: env.read_output(1, "soon"), "`wait_seconds` must be"),
        (lambda env: env.send_input(1, "a\0b"), "`text` must be"),
        (lambda env: env.stop_process(7), "no process 7. The processes are: 1"),
        (lambda env: env.read_output("1", "0"), "[process 1: running]"),
        (lambda env: env.read_output(1.0, 0), "[process 1: running]"),
    ],
)
def test_wrong_arguments_get_a_text_that_says_what_to_do(start, call, says):
    env = start()
    env.start_process("sleep 60")
    assert says in call(env)


# ── notes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_notes_are_written_read_searched_and_deleted():
    env = TerminalNotesEnv("bubblewrap")
    assert "there are no notes" in env.search_notes()
    assert env.write_note("Plan", "first look\nthen fix") == "[note 'Plan' kept; 1 of 50 notes]"
    env.write_note("Ports", "the server listens on 8080")
    assert env.write_note("Plan", "look\nfix it") == "[note 'Plan' replaced; 2 of 50 notes]"
    assert env.read_note("plan") == "look\nfix it"
    assert env.search_notes() == "Plan: look\nPorts: the server listens on 8080"
    assert env.search_notes("FIX") == "Plan: fix it"
    assert env.search_notes("port") == "Ports: the server listens on 8080"
    assert "none of the 2 notes contains 'zebra'" in env.search_notes("zebra")
    assert "no note 'Todo'. The notes are: 'Plan', 'Ports'" in env.read_note("Todo")
    assert env.delete_note("Plan") == "[note 'Plan' removed; 1 left]"
    assert "no note 'Plan'" in env.delete_note("Plan")


def test_notes_are_bounded_in_number_and_size():
    env = TerminalNotesEnv("bubblewrap")
    assert "4000" in (text := env.write_note("long", "x" * 4001)) and "not kept" in text
    assert "`title` must be" in env.write_note("x" * 101, "text")
    assert "`title` must be" in env.write_note("", "text")
    for number in range(terminal_notes.MAX_NOTES):
        assert "kept" in env.write_note(f"note {number}", "x" * 4000)
    assert "delete_note" in env.write_note("one more", "x")
    assert "replaced" in env.write_note("note 7", "shorter")
    assert len(env.search_notes()) < 50 * 250


def test_notes_outlive_the_sandbox_and_are_gone_with_the_next_rollout(start, tmp_path):
    env = start()
    env.write_note("plan", "keep me")
    env.start_process("sleep 60")
    env.run_command("kill -9 -1")
    assert env.read_note("plan") == "keep me"
    env.reset(task_dir=str(tmp_path / "task"))
    assert "there is no note 'plan'" in env.read_note("plan")
    assert "no background processes" in env.list_processes()
    assert env.run_command("ls -d /tmp/.harbor*").startswith("ls: cannot access")
