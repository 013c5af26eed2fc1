"""`run_command`: whatever a policy runs, a bounded text comes back in bounded time and the sandbox stays usable.

One table of cases for all sandboxes: shells of this machine, bubblewrap, Docker with a Debian and a busybox image.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harbor.environments.base import ExecResult
from hypothesis import given, settings
from hypothesis import strategies as st

from execution_stress import leave_running
from execution_support import (
    BASE_IMAGE,
    BUSYBOX_IMAGE,
    ISOLATED,
    LOCAL,
    MEMORY_MB,
    SANDBOXES,
    Live,
    LocalEnvironment,
    ScriptedEnvironment,
    docker_environment,
    live,
    local_environment,
    started,
)
from harbor_trl import execution
from harbor_trl.errors import SandboxFileError, SandboxNotAnsweringError
from harbor_trl.execution import BoundedOutput, CommandResult, read_file, run_command, write_file


@pytest.fixture(scope="module", params=SANDBOXES)
def sandbox(request, tmp_path_factory) -> Iterator[Live]:
    with live(request.param, tmp_path_factory.mktemp(request.param)) as started_sandbox:
        started_sandbox.name = request.param
        yield started_sandbox


def run(sandbox: Live, command: str, **kwargs: Any) -> CommandResult:
    return sandbox.wait(run_command(sandbox.environment, command, **kwargs))


class Case(NamedTuple):
    name: str
    command: str
    #: The whole text, or a pattern that must match all of it.
    shows: str | re.Pattern[str]
    return_code: int = 0
    #: Tools without which the case has nothing to run.
    needs_tools: bool = True
    kwargs: dict[str, Any] = {}  # noqa: RUF012


CASES = [
    Case("output alone", "echo one; echo two", "one\ntwo\n", needs_tools=False),
    Case("streams in order", "echo a; echo b >&2; echo c; echo d >&2", "a\nb\nc\nd\n", needs_tools=False),
    Case("no line end", "printf x", "x", needs_tools=False),
    Case("a failure shows its code", "echo sorry; exit 3", "sorry\n(rc=3)", 3, needs_tools=False),
    Case("nothing at all", ":", "(empty output, rc=0)", needs_tools=False),
    Case("nothing but a code", "exit 7", "(empty output, rc=7)", 7, needs_tools=False),
    Case("a signal is named", "kill -SEGV $$", "(empty output, rc=139)\n[killed by SIGSEGV]", 139, needs_tools=False),
    Case(
        "an unknown program", "nosuchprogram", re.compile(r".*nosuchprogram.*not found\n\(rc=127\)", re.S), 127, False
    ),
    Case("a syntax error", "if", re.compile(r".*(syntax error|unexpected).*\(rc=2\)", re.S | re.I), 2, False),
    Case("stdin is empty", "cat; read x; echo $?", "1\n"),
    Case("a here-document", "cat <<'END'\n$HOME `x` \\ '\nEND", "$HOME `x` \\ '\n"),
    Case(
        "quotes and characters",
        """printf '%s\n' "it's" 'a "b"' é€😀 '$x' '\\'""",
        'it\'s\na "b"\né€😀\n$x\n\\\n',
        0,
        False,
    ),
    Case("bytes that are not UTF-8", r"printf 'a\377\300b'", "a\ufffd\ufffdb", needs_tools=False),
    Case("the dumb terminal", "echo $TERM $PAGER $GIT_PAGER", "dumb cat cat\n", needs_tools=False),
    Case("colours and redraws", r"printf '\033[31mred\033[0m\n10%%\r100%%\n'", "red\n100%\n", needs_tools=False),
    Case("colours on request", r"printf '\033[31mred'", "\x1b[31mred", needs_tools=False, kwargs={"fold": False}),
    Case("ctrl-C reaches programs", "sh -c 'kill -INT $$; echo no'; echo $?", re.compile(r"130\n"), needs_tools=False),
    Case("killing by name spares us", "kill -TERM $PPID; sleep 0.3; echo alive", "alive\n"),
    Case("a pipe closed early", "yes | head -n 2", "y\ny\n"),
    Case("the mark of another call", "echo @@harbor-trl-0@@ rc=1", "@@harbor-trl-0@@ rc=1\n", needs_tools=False),
    Case("our own files removed", "rm -rf /tmp/harbor-trl-$HARBOR_TRL_EXEC*; echo there", "there\n"),
    Case("a directory removed below us", "mkdir gone && cd gone && rm -rf ../gone && echo here", "here\n"),
    Case("variables of ours", "echo [$HARBOR_TRL_COMMAND$HARBOR_TRL_WRAPPER]", "[]\n", needs_tools=False),
    Case("no terminal to ask at", "(cat </dev/tty) 2>/dev/null; echo $?", re.compile(r"[12]\n"), needs_tools=False),
    Case("an interactive shell", "sh -i 2>/dev/null; echo left", re.compile(r".*left\n", re.S), needs_tools=False),
    Case(
        "a missing shell",
        "exec /no/such/shell",
        re.compile(r".*o such.*\n\(rc=12[67]\)|.*not found\n\(rc=127\)", re.S),
        127,
        False,
    ),
    Case(
        "a missing interpreter", "printf '#!/no/such\n' >x; chmod +x x; ./x; echo $?; rm x", re.compile(r".+\n12[67]\n")
    ),
    Case("a long command", ": '" + "é'\\''x" * 30_000 + "'; echo $0 $# done", re.compile(r"(ba)?sh 0 done\n")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_command_shows(sandbox, case):
    if case.needs_tools and sandbox.name == "nothing-but-sh":
        pytest.skip("the case needs more than a shell")
    result = run(sandbox, case.command, **case.kwargs)
    if isinstance(case.shows, str):
        assert result.text == case.shows
    else:
        assert case.shows.fullmatch(result.text), result.text
    assert (result.return_code, result.timed_out, result.broken) == (case.return_code, False, False)


@pytest.fixture
def tools(sandbox) -> Live:
    if sandbox.name == "nothing-but-sh":
        pytest.skip("needs more than a shell")
    return sandbox


def running(sandbox: Live, mark: str) -> list[str]:
    """Processes `sleep MARK` in the sandbox."""
    script = (
        f"exec 2>/dev/null; a={mark[:4]} b={mark[4:]}; for c in /proc/[0-9]*/cmdline; do p=${{c%/cmdline}}; "
        """case "$(tr '\\0' ' ' <"$c")" in "sleep $a$b "*) echo "${p#/proc/}";; esac; done; :"""
    )
    return (sandbox.wait(sandbox.environment.exec(script)).stdout or "").split()


def unique_seconds() -> str:
    return f"9{time.monotonic_ns() % 10**8:08d}"


@pytest.mark.parametrize(
    "command",
    [
        "echo before; sleep {0} & sleep {0}; echo after",
        "echo before; trap '' TERM HUP INT; (trap '' TERM; sleep {0}) & sleep {0}; while :; do sleep {0}; done",
    ],
)
def test_at_the_deadline_all_of_a_command_is_killed_and_its_output_kept(tools, command):
    seconds = unique_seconds()
    result = run(tools, command.format(seconds), timeout_sec=1)
    assert result.timed_out and result.return_code == 124
    assert result.text == "before\n[timed out after 1 s: the command and all it started were killed]"
    assert running(tools, seconds) == []


def test_at_the_deadline_processes_in_sessions_of_their_own_are_killed_too(tools):
    if tools.name == "no-setsid":
        pytest.skip("no setsid")
    seconds = unique_seconds()
    assert run(tools, f"setsid sleep {seconds} & setsid sleep {seconds} & sleep {seconds}", timeout_sec=1).timed_out
    assert running(tools, seconds) == []


@pytest.mark.parametrize("command", ["sleep {0} & echo started", "(trap '' HUP; echo started; exec sleep {0}) &"])
def test_a_background_process_does_not_hold_the_call_and_lives_on(tools, command):
    seconds = unique_seconds()
    result = run(tools, command.format(seconds), timeout_sec=20)
    try:
        assert result.text.startswith("started\n") and not result.timed_out
        end = time.monotonic() + 10
        while len(found := running(tools, seconds)) != 1 and time.monotonic() < end:
            time.sleep(0.1)  # a shell that forks has two such processes for a moment
        assert len(found) == 1
    finally:
        for pid in running(tools, seconds):
            tools.wait(tools.environment.exec(f"kill {pid}"))


def test_watchdogs_end_with_their_calls(tools):
    """A small run of execution_stress.py."""
    if tools.name not in ("bash", "ash", "docker"):
        pytest.skip("one of each kind is enough")

    async def both() -> Counter[str]:
        runs = (leave_running(tools.environment, 4, at_deadline=late, at_once=4) for late in (False, True))
        return sum(await asyncio.gather(*runs), Counter())

    counts = tools.wait(both())
    assert not counts.keys() & {"killed unasked", "timed out, and yet running"}, counts


def test_what_a_background_process_writes_later_can_be_read(tools):
    result = run(tools, "rm -f go; (until [ -e go ]; do sleep 0.2; done; echo late) & echo now")
    assert result.text.startswith("now\n[a process in the background still holds the output")
    file = re.search(r"is in (\S+)\]", result.text)[1]
    wait = f": >go; until tail -n 1 {file} | grep late; do sleep 0.1; done; rm {file}"
    assert run(tools, wait, timeout_sec=30).text.endswith("late\n")


def test_output_beyond_the_limit_keeps_both_ends_and_the_whole_in_a_file(tools):
    result = run(tools, "seq 1 30000; exit 4")
    head, cut, tail = re.fullmatch(r"(.*\n)(\[.*\])\n(.*\n)\(rc=4\)", result.text, re.S).groups()
    whole = "".join(f"{n}\n" for n in range(1, 30_001))
    assert whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) > 7_000
    file = re.search(r"the whole output is in (\S+) ", cut)[1]
    missing = whole[len(head) : -len(tail)]
    assert f"left out: {len(missing)} bytes, {missing.count(chr(10))} lines;" in cut
    assert run(tools, f"wc -c <{file}; grep -n 15000 {file}; rm {file}").text.split() == [
        str(len(whole)),
        "15000:15000",
    ]


@pytest.mark.parametrize(
    "flood",
    [
        "yes",
        "while :; do echo y; done",
        "trap '' PIPE TERM; yes; yes",
        "cat /dev/urandom",
        "head -c 100000000 /dev/zero",  # one line
    ],
)
def test_a_flood_is_stopped_at_the_cap(tools, flood):
    result = run(tools, flood, output_cap=1 << 18, timeout_sec=60)
    assert not result.timed_out and len(result.text) < 9_000
    note = result.text.splitlines()[-1]
    assert note.startswith("[stopped: the command wrote more than 256 KiB"), note
    run(tools, f"rm -f {re.search(r'/tmp/harbor-trl-[0-9a-z]+[.]out', result.text)[0]}")


def test_killing_all_that_sleeps_is_not_the_deadline(tools):
    if tools.name in LOCAL or tools.name == "scripted":
        pytest.skip("this machine has processes of that name")
    # The first ones keep the container running.
    kill_all = (
        "for c in /proc/[0-9]*/comm; do read -r n <$c; p=${c%/comm} p=${p#/proc/}; "
        '[ "$n" = sleep ] && [ "$p" -gt 15 ] && kill $p; done 2>/dev/null'
    )
    result = run(tools, f"echo before; {kill_all}; sleep 0.2; echo after", timeout_sec=20)
    assert result.text == "before\nafter\n"


def test_a_signal_of_ours_from_elsewhere_is_not_the_deadline(tools):
    if tools.name == "bubblewrap":
        pytest.skip("no shell of ours")
    seconds = unique_seconds()
    result = run(tools, f"sleep {seconds} & echo $!; kill -USR1 $PPID; kill -USR2 $PPID; sleep 0.3", timeout_sec=30)
    assert not result.timed_out and running(tools, seconds) == [result.text.partition("\n")[0]]
    tools.wait(tools.environment.exec(f"kill {result.text}"))


def test_calls_at_the_same_time_do_not_mix(tools):
    async def all_at_once() -> list[CommandResult]:
        commands = [f"echo {n}; sleep 0.2; echo {n} >&2" for n in range(8)]
        return await asyncio.gather(*(run_command(tools.environment, command) for command in commands))

    assert [result.text for result in tools.wait(all_at_once())] == [f"{n}\n{n}\n" for n in range(8)]


@pytest.mark.parametrize("command, says", [("echo a\0b", "NUL byte at character 6"), ("echo \ud800", "no character")])
def test_a_command_that_cannot_be_passed_on_is_not_run(sandbox, command, says):
    result = run(sandbox, command)
    assert result.text.startswith("[not run: ") and says in result.text and not result.broken


def test_a_killed_shell_gives_what_was_written_until_then(tools):
    result = run(tools, "echo written; sleep 0.3; kill -KILL $PPID; sleep 5")
    # Native execution has no shell of ours in front of the command's.
    if "killed by SIGKILL" not in result.text:
        assert result.text == (
            "written\n[the command killed the shell that ran it (rc=137), and maybe other processes of the sandbox]"
        )
    assert not result.broken
    assert run(tools, "echo usable").text == "usable\n"


def test_calls_leave_nothing_behind(tools, monkeypatch):
    numbers = itertools.count(100)
    monkeypatch.setattr(execution.secrets, "token_hex", lambda size: f"{os.getpid()}ca11{next(numbers)}")
    for command in ("echo x", "exit 3", "kill -9 $$", ": " + "x" * 120_000):
        run(tools, command)
    run(tools, "sleep 5", timeout_sec=1)
    assert f"harbor-trl-{os.getpid()}ca11" not in (tools.wait(tools.environment.exec("ls -a /tmp")).stdout or "")


NAMES = ["plain.txt", "with space", "quote'\"$x`", "-rf", "new\nline", "é€😀", "deep/er/down", "*?[a]"]


@pytest.mark.parametrize("name", NAMES)
def test_files_keep_their_bytes_whatever_their_name(tools, name):
    data = bytes(range(256)) * 3 + b"\r\n\x00"
    tools.wait(write_file(tools.environment, name, data))
    assert tools.wait(read_file(tools.environment, name)) == data


@pytest.mark.parametrize("size", [0, 1, 200_000])
def test_files_of_any_size_come_back(tools, size):
    data = os.urandom(size)
    tools.wait(write_file(tools.environment, "some.bin", data))
    assert tools.wait(read_file(tools.environment, "some.bin")) == data


@pytest.mark.parametrize("path", ["nosuchfile", "/tmp", "/dev/zero", "", "a\0b"])
def test_what_cannot_be_read_is_named(tools, path):
    with pytest.raises(SandboxFileError, match=re.escape(repr(path))):
        tools.wait(read_file(tools.environment, path))


def test_a_file_beyond_the_limit_is_not_carried_over(tools):
    tools.wait(write_file(tools.environment, "long.bin", b"x" * 1001))
    with pytest.raises(SandboxFileError, match="longer than max_bytes=1000"):
        tools.wait(read_file(tools.environment, "long.bin", 1000))


# --- the same as the shell itself -------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
QUOTED = TEXT.map(lambda text: "'" + text.replace("'", "'\\''") + "'")
IN_DOUBLE_QUOTES = TEXT.map(lambda text: '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"')
#: Nothing of it runs a program or changes what follows.
TAME = TEXT.filter(lambda text: not re.search(r"[&<>|;`$(){}!*?\[~/]|exec|kill|wait", text))
COMMANDS = st.one_of(
    st.builds("printf '%s\\n' {}".format, st.one_of(QUOTED, IN_DOUBLE_QUOTES)),
    st.builds("printf %s {} >&2".format, QUOTED),
    st.builds("cat <<'E O F'\n{}\nE O F".format, TEXT),
    st.builds("cat <<E-O-F\n{}\nE-O-F".format, TEXT.filter(lambda text: not re.search(r"[`$\\]", text))),
    st.builds('x={}; echo "$x" | tr a b'.format, QUOTED),
    st.builds("(exit {}); echo $?".format, st.integers(0, 255)),
    st.builds("printf '\\{:03o}'".format, st.integers(0, 255)),
    st.builds("seq {} | tail -n 3".format, st.integers(0, 2000)),
    st.builds("for i in 1 2 3; do echo $i {}; done; echo 4 >&2".format, QUOTED),
    st.builds("for i in $(seq {}); do printf '%s\\n' {}; done".format, st.integers(0, 2000), QUOTED),
    st.builds(": {}".format, st.integers(90_000, 140_000).map(lambda n: "'" + "é" * (n // 2) + "'")),
    st.builds(
        "printf %s {} | wc -c".format, st.tuples(TEXT, st.integers(1, 3000)).map(lambda it: shlex.quote(it[0] * it[1]))
    ),
    st.builds("cat <<'E O F' | tail -c 99\n{}\nE O F".format, st.builds(str.__mul__, TEXT, st.integers(1, 3000))),
    st.builds("cat; read x; echo $? {}".format, QUOTED),
    TAME,
)
#: How the last command may end the shell; `{}` is a number.
ENDS = st.one_of(st.just(""), st.builds("\nexit {}".format, st.integers(0, 255)), st.just("\nkill -TERM $$"))


@pytest.fixture(scope="module", params=["bash", "dash", "ash", "bubblewrap"])
def twin(request, tmp_path_factory) -> Iterator[Live]:
    with live(request.param, tmp_path_factory.mktemp("twin")) as started_sandbox:
        started_sandbox.name = request.param
        yield started_sandbox


LONGEST_ARGUMENT = 128 * 1024 - 64


def by_subprocess(sandbox: Live, command: str) -> tuple[str, int]:
    """What the shell of `sandbox`, which is one of this machine, gives: its text, and its code as a shell tells it."""
    # bubblewrap shows this machine's programs; there is no locale.
    env = {"PATH": os.environ["PATH"]} if sandbox.name == "bubblewrap" else sandbox.environment.env
    path = env["PATH"]
    shell = "bash" if shutil.which("bash", path=path) else "sh"
    with tempfile.NamedTemporaryFile("w", prefix="command", newline="") as file:
        file.write(command)
        file.flush()
        done = subprocess.run(
            # Longer than Linux takes an argument to be.
            [shell, file.name] if len(command.encode()) > LONGEST_ARGUMENT else [shell, "-c", command],
            executable=shutil.which(shell, path=path),
            env={**execution.TERMINAL_ENV, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    said = done.stdout.decode(errors="replace").replace(f"{file.name}: ", f"{shell}: ")
    return said, done.returncode if done.returncode >= 0 else 128 - done.returncode


@settings(max_examples=settings().max_examples // 2 if settings().max_examples > 1000 else 25)
@given(parts=st.lists(COMMANDS, min_size=1, max_size=4), end=ENDS)
def test_random_commands_give_what_the_same_shell_gives(parts, end, twin):
    command = "\n".join(parts) + end
    text, code = by_subprocess(twin, command)
    result = run(twin, command, output_limit=10**7, fold=False)
    notes = [f"(rc={code})"] if code and text else []
    notes += ["[killed by SIGTERM]"] if code == 143 else []
    if not text:
        notes.insert(0, f"(empty output, rc={code})")
    if notes and text and not text.endswith("\n"):
        text += "\n"
    # `exit 130` is told as the signal that it means.
    shown = re.sub(r"\n\[killed by SIG(?!TERM)\w+\]\Z", "", result.text)
    text += "\n".join(notes)
    if len(command.encode()) > LONGEST_ARGUMENT:  # evaluated, and some shells tell so in their messages
        shown, text = (re.sub(r"eval: |line \d+: ", "", it) for it in (shown, text))
    assert shown == text
    assert result.return_code == code


# --- backends that delay, cut and fail --------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path) -> LocalEnvironment:
    return local_environment("bash", tmp_path)


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_deadline_that_passes_before_the_command_starts_is_kept(tmp_path, shell):
    environment = local_environment(shell, tmp_path)
    (tmp_path / "slow").mkdir()
    slow = tmp_path / "slow" / "mkfifo"  # as on a machine that is busy beyond measure
    slow.write_text(f'#!/bin/sh\nsleep 2.5\nexec {shutil.which("mkfifo")} "$@"\n')
    slow.chmod(0o755)
    environment.env["PATH"] = f"{slow.parent}:{environment.env['PATH']}"
    result = asyncio.run(run_command(environment, "echo begun; sleep 60", timeout_sec=1))
    assert result.text == "[timed out after 1 s: the command and all it started were killed]"


async def faithful(inner, command, kwargs):
    return await inner.exec(command, **kwargs)


def test_a_backend_that_never_answers_is_given_up(local, monkeypatch):
    async def never(inner, command, kwargs):
        await asyncio.sleep(3600)

    monkeypatch.setattr(execution, "GRACE_SEC", -4.5)
    with pytest.raises(SandboxNotAnsweringError, match="no answer"):
        asyncio.run(run_command(ScriptedEnvironment(local, never), "true", timeout_sec=1))


def test_a_client_that_gives_up_by_itself_means_the_same(local, monkeypatch):
    async def gives_up(inner, command, kwargs):
        await asyncio.sleep(0.2)
        raise RuntimeError(f"Command timed out after {kwargs['timeout_sec']} seconds")

    monkeypatch.setattr(execution, "GRACE_SEC", -0.9)
    with pytest.raises(SandboxNotAnsweringError, match="Command timed out"):
        asyncio.run(run_command(ScriptedEnvironment(local, gives_up), "true", timeout_sec=1))


def test_a_stopped_wrapper_is_given_up_too(local, monkeypatch):
    monkeypatch.setattr(execution, "GRACE_SEC", 1)
    with pytest.raises(SandboxNotAnsweringError):
        asyncio.run(run_command(local, "kill -STOP $PPID", timeout_sec=1))


def test_an_error_of_the_backend_comes_through(local):
    async def fails(inner, command, kwargs):
        raise ConnectionError("the engine is gone")

    with pytest.raises(ConnectionError, match="the engine is gone"):
        asyncio.run(run_command(ScriptedEnvironment(local, fails), "true"))


def test_a_backend_that_drops_variables_is_found_out_once(local):
    async def drops(inner, command, kwargs):
        kwargs.pop("env", None)
        return await inner.exec(command, **kwargs)

    environment = ScriptedEnvironment(local, drops)

    async def twice():
        return [await run_command(environment, f"echo {n}") for n in range(2)]

    assert [result.text for result in asyncio.run(twice())] == ["0\n", "1\n"]
    assert environment.execs == 3


def test_noise_around_the_output_is_not_shown(local):
    async def noisy(inner, command, kwargs):
        result = await inner.exec(command, **kwargs)
        return ExecResult(stdout=f"motd\n{result.stdout}bye\n", stderr="noise", return_code=result.return_code)

    assert asyncio.run(run_command(ScriptedEnvironment(local, noisy), "echo x")).text == "x\n"


@pytest.mark.parametrize("command", ["echo one; echo two >&2; exit 3", "seq 1 30000", "echo x; sleep 60"])
def test_an_answer_cut_anywhere_is_never_taken_for_a_whole_one(local, command, monkeypatch):
    monkeypatch.setattr(execution.secrets, "token_hex", lambda size: "5c" * size)
    answers: list[str] = []

    async def record(inner, line, kwargs):
        result = await inner.exec(line, **kwargs)
        answers.append(result.stdout or "")
        return result

    async def replay(inner, line, kwargs):
        return ExecResult(stdout=answers[-1], return_code=0)

    environment = ScriptedEnvironment(local, record)
    whole = asyncio.run(run_command(environment, command, timeout_sec=1)).text
    (answer,) = answers
    environment.script = [replay]

    async def check() -> None:
        assert (await run_command(environment, command, timeout_sec=1)).text == whole
        for at in {*range(1, 120), *range(1, len(answer), 997), *range(max(1, len(answer) - 250), len(answer))}:
            for answers[-1] in (answer[:at], answer[at:]):
                text = (await run_command(environment, command, timeout_sec=1)).text
                assert "answer was cut short" in text or text.startswith("[not run: "), (at, text)

    asyncio.run(check())
    (Path("/tmp") / f"harbor-trl-{'5c' * 8}.out").unlink(missing_ok=True)


@pytest.mark.parametrize("use", [lambda it: read_file(it, "x"), lambda it: write_file(it, "x", b"data")])
def test_files_of_a_backend_that_never_answers_are_given_up(local, monkeypatch, use):
    async def never(inner, command, kwargs):
        await asyncio.sleep(3600)

    monkeypatch.setattr(execution, "GRACE_SEC", -59.8)
    with pytest.raises(SandboxNotAnsweringError, match="reading or writing a file"):
        asyncio.run(use(ScriptedEnvironment(local, never)))


def test_what_a_sandbox_lacks_is_logged_once_by_name(tmp_path, caplog):
    environment = local_environment("nothing-but-sh", tmp_path)
    with caplog.at_level("INFO", logger="harbor_trl.execution"):
        for _ in range(2):
            asyncio.run(run_command(environment, "echo x"))
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"sandbox {environment.session_id}: commands run with shell=sh group=job mode=file"]


def test_a_lost_answer_is_named(local):
    async def cut(inner, command, kwargs):
        await inner.exec(command, **kwargs)
        return ExecResult(stdout="", return_code=137)

    result = asyncio.run(run_command(ScriptedEnvironment(local, cut, faithful), "echo x"))
    assert result.text == "[not run: the sandbox did not start the command (rc=137): it said nothing]" and result.broken


@pytest.mark.parametrize(
    "said, code, shows",
    [
        ('OCI runtime exec failed: exec: "bash": executable file not found in $PATH: unknown', 127, "has no shell"),
        ("OCI runtime exec failed: fork/exec /proc/self/exe: resource temporarily unavailable", 126, "more processes"),
        ('service "main" is not running', 1, "did not start the command"),
    ],
)
def test_a_sandbox_beyond_use_is_named(local, said, code, shows):
    async def refuses(inner, command, kwargs):
        return ExecResult(stdout=said, return_code=code)

    result = asyncio.run(run_command(ScriptedEnvironment(local, refuses), "true"))
    assert result.broken and shows in result.text and said in result.text


def test_a_native_bounded_exec_is_used(local):
    class Native(ScriptedEnvironment):
        async def bounded_exec(self, command, *, timeout_sec, head_bytes, tail_bytes, cap_bytes, shown_bytes, env):
            assert env["TERM"] == "dumb" and head_bytes >= 4 * 5 and shown_bytes == 10
            return BoundedOutput(b"abcdefghij", b"klm\n", 50, 2, return_code=1, file="/tmp/all")

    result = asyncio.run(run_command(Native(local), "true", output_limit=10))
    assert result.text == ("abcde\n[... left out: 55 bytes, 2 lines; the whole output is in /tmp/all ...]\nklm\n(rc=1)")


def test_what_is_left_of_a_budget_is_rounded(local):
    class Late(ScriptedEnvironment):
        async def bounded_exec(self, command, **kwargs):
            return BoundedOutput(b"", timed_out=True)

    for seconds, shown in ((59.6102, "59.6"), (180, "180"), (1e6, "1000000"), (0.25, "0.25")):
        result = asyncio.run(run_command(Late(local), "true", timeout_sec=seconds))
        assert result.text == f"[timed out after {shown} s: the command and all it started were killed]"


def test_nowhere_to_write(tmp_path):
    """All directories full or read-only: the beginning of the output still comes."""
    if os.geteuid() == 0 and not os.path.exists("/usr/bin/unshare"):
        pytest.skip("root writes everywhere")
    environment = local_environment("bash", tmp_path)
    quota = "mount -t tmpfs -o size=4k,nr_inodes=1 none {0}; "
    places = ["/tmp", "/dev/shm", "/var/tmp"]
    mounts = "".join(quota.format(place) for place in places)
    environment.shell = ["unshare", "-m", "bash", "-c", f'{mounts} cd /proc; HOME=/proc exec bash "$@"', "bash"]
    if asyncio.run(environment.exec("true")).return_code:
        pytest.skip("no mount namespaces here")
    assert asyncio.run(run_command(environment, "echo out; exit 3")).text == "out\n(rc=3)"
    flood = asyncio.run(run_command(environment, "yes", timeout_sec=1))
    assert flood.text.startswith("y\ny\n") and len(flood.text) < 9_000


def test_the_tasks_own_variables_win(tmp_path):
    environment = local_environment("bash", tmp_path, env={"TERM": "xterm", "PAGER": ""})
    assert asyncio.run(run_command(environment, "echo $TERM [$PAGER] $GIT_PAGER")).text == "xterm [] cat\n"


# --- what a sandbox can be made to suffer -----------------------------------------------------------------------------

isolated = pytest.mark.parametrize("sandbox", ISOLATED, indirect=True)


@isolated
def test_every_process_killed_gives_a_text_and_leaves_the_sandbox_usable(sandbox):
    result = run(sandbox, "echo written; sleep 0.3; kill -9 -1; sleep 9", timeout_sec=60)
    assert result.text.startswith("written\n") and "kill" in result.text and not result.broken
    assert run(sandbox, "echo usable").text == "usable\n"


@isolated
@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_the_first_process_outlives_what_it_is_sent(sandbox, signal):
    assert run(sandbox, f"kill -{signal} 1; sleep 0.3; echo usable").text == "usable\n"
    assert run(sandbox, "echo usable").text == "usable\n"


@isolated
def test_a_working_directory_that_is_gone_is_named(sandbox):
    there = run(sandbox, "pwd; rm -rf $PWD").text
    result = run(sandbox, f"pwd; mkdir {there}")
    assert result.text == "/\n[the sandbox's working directory does not exist any more: this ran in /]"
    assert run(sandbox, "pwd").text == there


@isolated
@pytest.mark.parametrize("bomb", [":(){ :|:& };:", "f(){ f|f; }; f", "while :; do sleep 60 & done"])
def test_a_fork_bomb_gives_a_text_and_leaves_the_sandbox_usable(sandbox, bomb):
    assert run(sandbox, f"echo lit; {bomb}", timeout_sec=2).text.startswith(("lit\n", "sh: syntax error"))
    texts = []
    while texts[-1:] != ["usable\n"] and len(texts) < 3:
        texts.append(run(sandbox, "echo usable", timeout_sec=20).text)
    assert texts[-1] == "usable\n", texts
    assert all("could not start any more processes" in text for text in texts[:-1]), texts


@pytest.mark.parametrize("sandbox", ISOLATED[1:], indirect=True)
def test_a_process_killed_for_memory_is_named(sandbox):
    result = run(sandbox, f"dd if=/dev/zero of=/dev/null bs={4 * MEMORY_MB << 20} count=1; echo rc $?")
    assert "rc 137\n" in result.text and "[out of memory" in result.text, result


@contextlib.contextmanager
def container(
    tmp_path: Path, image: str = BASE_IMAGE, compose: str = "", options: dict[str, Any] | None = None, **config: Any
) -> Iterator[Live]:
    options = dict(options or {})
    if compose:
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text(f"services:\n  main:\n{compose}")
        options["extra_docker_compose"] = [overlay]
    with started(docker_environment(tmp_path, image, options=options, **config)) as sandbox:
        yield sandbox


@pytest.mark.docker
@pytest.mark.parametrize("image", [BASE_IMAGE, BUSYBOX_IMAGE])
def test_every_program_deleted_gives_texts(tmp_path, image):
    with container(tmp_path, image) as sandbox:
        # All of `rm -rf /` that matters here, and quick.
        first = run(sandbox, "echo begun; rm -rf /bin /usr/bin /tmp /dev/null; echo done", timeout_sec=60)
        assert first.text == "begun\ndone\n"
        after = run(sandbox, "echo x", timeout_sec=5)
        assert after.broken and after.text.startswith("[not run: the sandbox "), after


@pytest.mark.docker
def test_what_sudo_started_is_killed_at_the_deadline_too(tmp_path):
    with container(tmp_path) as sandbox:
        if sandbox.exec("command -v sudo").return_code:
            pytest.skip("no sudo in the image (see tools/docker_test_images.sh)")
        sandbox.output("echo 'nobody ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/nobody")
        seconds = unique_seconds()
        with sandbox.environment.with_default_user("nobody"):
            result = run(sandbox, f"echo $(sudo id -u); sudo sleep {seconds}; echo no", timeout_sec=1)
        assert result.text == "0\n[timed out after 1 s: the command and all it started were killed]"
        assert running(sandbox, seconds) == []


@pytest.mark.docker
@pytest.mark.parametrize("image", [BASE_IMAGE, BUSYBOX_IMAGE])
def test_a_full_disk_gives_a_text(tmp_path, image):
    compose = (
        "    tmpfs: ['/tmp:size=64k', '/var/tmp:size=64k', '/root:size=64k']\n    shm_size: 64k\n    read_only: true\n"
    )
    with container(tmp_path, image, compose=compose) as sandbox:
        for place in ("/tmp", "/var/tmp", "/root", "/dev/shm"):
            run(sandbox, f"cat /dev/zero >{place}/full 2>/dev/null")
        result = run(sandbox, "echo still; seq 1 5")
        assert result.text.startswith("still\n1\n2\n"), result
        assert run(sandbox, "rm /tmp/full; seq 1 99999").text.endswith("part of it is lost]")
