"""What every sandbox backend must do, held against each of them. A difference that is meant is stated where it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harbor.models.task.config import NetworkMode

from sandbox_support import (
    BACKENDS,
    Live,
    make_environment,
    own_images,
    require,
    run_trial,
    running,
    why_not,
    write_task,
)

ODD_NAMES = [
    "plain",
    "with space",
    "ünïcode-名前",
    "-dash",
    "quote'\"",
    "new\nline",
    "semi;colon$HOME",
    ".hidden",
    "a" * 200,
]


@pytest.fixture(scope="module", autouse=True)
def images_of_this_module() -> Iterator[None]:
    if why_not("docker"):
        yield
        return
    with own_images():
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One sandbox for all tests that leave it as they found it."""
    require(request.param)
    environment = make_environment(
        request.param,
        tmp_path_factory.mktemp("shared"),
        dockerfile="FROM debian:bookworm-slim\nENV FROM_IMAGE=image BOTH=image\nWORKDIR /work/deep\nCOPY a.txt b/\n",
        files={"a.txt": "copied\n"},
        persistent_env={"PERSISTENT": "yes", "BOTH": "persistent"},
    )
    with running(environment) as started:
        yield started


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [("true", 0), ("exit 3", 3), ("false", 1), ("no-such-command", 127), ("/etc/passwd", 126), ("kill -9 $$", 137)],
)
def test_the_exit_code_is_the_shell_s(live: Live, command: str, code: int) -> None:
    assert live.exec(command).return_code == code


def test_stdout_and_stderr_come_together_in_stdout(live: Live) -> None:
    result = live.exec("echo one; echo two >&2; echo three")
    lines = (result.stdout or "").splitlines()
    # Docker carries two streams, and their order is lost.
    assert (lines if live.environment.type() == "bubblewrap" else sorted(lines, key="one two three".find)) == [
        "one",
        "two",
        "three",
    ]
    assert not result.stderr


def test_a_command_is_run_by_bash(live: Live) -> None:
    assert live.output("a=(1 2 3); echo ${#a[@]} $0") == "3 bash"


def test_no_output_is_none(live: Live) -> None:
    assert live.exec("true").stdout is None


def test_stdin_is_empty(live: Live) -> None:
    assert live.output("cat; echo end", timeout_sec=30) == "end"


def test_bad_utf8_is_replaced(live: Live) -> None:
    assert live.exec(r"printf 'a\xff\xfeb\xc3'").stdout == "a\ufffd\ufffdb\ufffd"


def test_unicode_goes_in_and_out(live: Live) -> None:
    assert live.output("echo 'ünïcode 名前 🙂'") == "ünïcode 名前 🙂"


def test_a_hundred_megabytes_of_output_arrive_with_both_ends(live: Live) -> None:
    result = live.exec("echo BEGIN; head -c 100000000 /dev/zero; echo; echo END")
    assert result.return_code == 0
    assert result.stdout is not None
    assert result.stdout.startswith("BEGIN\n")
    assert result.stdout.endswith("\nEND\n")


def test_working_directory_is_workdir_unless_told(live: Live) -> None:
    assert live.output("pwd") == "/work/deep"
    assert live.output("pwd", cwd="/tmp") == "/tmp"
    assert live.exec("true", cwd="/no/such/directory").return_code != 0


def test_variables_come_from_the_image_the_environment_and_the_call_in_this_order(live: Live) -> None:
    assert live.output("echo $FROM_IMAGE $PERSISTENT $BOTH") == "image yes persistent"
    assert live.output("echo $BOTH $HERE", env={"BOTH": "call", "HERE": "a 'b' \"c\" $d\ne"}) == "call a 'b' \"c\" $d e"


def test_home_and_path_are_those_of_the_user(live: Live) -> None:
    assert live.output("echo $HOME $PATH").startswith("/root /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin")


def test_commands_run_side_by_side(live: Live) -> None:
    async def both() -> list[str | None]:
        # Each waits for what the other does: one after the other would never end.
        first = "mkdir /tmp/one; until [ -e /tmp/two ]; do sleep 0.01; done; echo first; rmdir /tmp/one"
        second = "until [ -e /tmp/one ]; do sleep 0.01; done; mkdir /tmp/two; echo second"
        results = await asyncio.gather(*(live.environment.exec(one, timeout_sec=60) for one in (first, second)))
        return [result.stdout for result in results]

    assert live.wait(both()) == ["first\n", "second\n"]
    live.exec("rmdir /tmp/two")


def test_a_timeout_is_an_error_with_harbor_s_words(live: Live) -> None:
    with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
        live.exec("echo before; sleep 60", timeout_sec=1)
    assert live.output("echo alive") == "alive"


def test_a_background_process_does_not_hold_the_command_and_lives_on(live: Live) -> None:
    live.output("sleep 600 & echo $! > /tmp/background", timeout_sec=60)
    live.output("kill -0 $(cat /tmp/background) && kill $(cat /tmp/background)")


# --- users ------------------------------------------------------------------------------------------------------------


def test_the_default_user_is_root(live: Live) -> None:
    assert live.output("id -u; id -un; id -g") == "0\nroot\n0"


def test_harbor_s_default_user_is_used_and_an_explicit_one_wins(live: Live) -> None:
    if not getattr(getattr(live.environment, "_sandbox", None), "many_users", True):
        pytest.skip("a sandbox that an ordinary user starts has one user")
    with live.environment.with_default_user("1000"):
        assert live.output("id -u") == "1000"
        assert live.output("id -u", user="root") == "0"
        assert live.exec("echo x > /root-only").return_code != 0
        assert live.output("cd /tmp && touch mine && stat -c %u mine && rm mine") == "1000"
    assert live.output("id -un", user="nobody") == "nobody"
    assert live.output("id -u; id -g", user="1000:1001") == "1000\n1001"
    assert live.output("umask; cd /tmp; touch f; chown 1234 f; stat -c %u f; rm f") == "0022\n1234"


def test_an_unknown_user_makes_the_command_fail(live: Live) -> None:
    if not getattr(getattr(live.environment, "_sandbox", None), "many_users", True):
        pytest.skip("a sandbox that an ordinary user starts has one user")
    result = live.exec("id", user="no-such-user")
    assert result.return_code != 0
    assert "no-such-user" in (result.stdout or "")


# --- files ------------------------------------------------------------------------------------------------------------


def test_copy_of_the_dockerfile_is_there(live: Live) -> None:
    assert live.output("cat /work/deep/b/a.txt") == "copied"


def test_what_a_dockerfile_copies_is_the_same(backend: str, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("a sandbox that an ordinary user starts has one user")
    files = {
        "a.txt": "a",
        "b.txt": "b",
        "dir/run.sh": "run",
        "dir/deep/c": "c",
        "dir/hidden/d": "d",
        ".dockerignore": "**/hidden\n!dir/hidden/keep\n",
        "dir/hidden/keep": "k",
    }
    context = tmp_path / "task" / "environment"
    for name, text in files.items():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(text)
    for path in context.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o751 if path.name == "run.sh" else 0o640)
    (context / "dir" / "link").symlink_to("run.sh")
    (context / "named").symlink_to("b.txt")
    environment = make_environment(
        backend,
        tmp_path,
        dockerfile="""\
FROM debian:bookworm-slim
ARG NAME=data
ENV TOP=/srv/$NAME
WORKDIR /made/first
WORKDIR $TOP
COPY *.txt txt/
COPY ["named", "a name"]
COPY --chown=7:8 dir owned
COPY dir/../a.txt /tmp
COPY a.txt /etc/hostname.d/
COPY b.txt /etc/hostname.d/a.txt
ADD dir/deep ./
WORKDIR ../last
""",
    )
    with running(environment) as live:
        listing = "find /srv /made /tmp/a.txt /etc/hostname.d -printf '%p %y %m %U:%G %l\\n' | sort; pwd"
        assert live.output(listing).replace(" \n", "\n").splitlines() == [
            "/etc/hostname.d d 755 0:0",
            "/etc/hostname.d/a.txt f 640 0:0",
            "/made d 755 0:0",
            "/made/first d 755 0:0",
            "/srv d 755 0:0",
            "/srv/data d 755 0:0",
            "/srv/data/a name f 640 0:0",
            "/srv/data/c f 640 0:0",
            "/srv/data/owned d 755 7:8",
            "/srv/data/owned/deep d 755 7:8",
            "/srv/data/owned/deep/c f 640 7:8",
            "/srv/data/owned/hidden d 755 7:8",
            "/srv/data/owned/hidden/keep f 640 7:8",
            "/srv/data/owned/link l 777 7:8 run.sh",
            "/srv/data/owned/run.sh f 751 7:8",
            "/srv/data/txt d 755 0:0",
            "/srv/data/txt/a.txt f 640 0:0",
            "/srv/data/txt/b.txt f 640 0:0",
            "/srv/last d 755 0:0",
            "/tmp/a.txt f 640 0:0",
            "/srv/last",
        ]
        assert live.output("cat '/srv/data/a name' /etc/hostname.d/a.txt /tmp/a.txt") == "bba"


def test_a_file_goes_in_and_out_with_its_mode(live: Live, tmp_path: Path) -> None:
    source = tmp_path / "script.sh"
    source.write_bytes(b"#!/bin/sh\necho ran\n" + bytes(range(256)))
    source.chmod(0o751)
    live.wait(live.environment.upload_file(source_path=source, target_path="/work/up/script.sh"))
    assert live.output("stat -c '%a %u' /work/up/script.sh") == "751 0"
    live.wait(live.environment.download_file(source_path="/work/up/script.sh", target_path=tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o751


def test_a_file_uploaded_to_a_directory_lands_in_it(live: Live, tmp_path: Path) -> None:
    (tmp_path / "name.txt").write_text("x")
    live.wait(live.environment.upload_file(tmp_path / "name.txt", "/tmp"))
    assert live.output("cat /tmp/name.txt; rm /tmp/name.txt") == "x"


def test_a_directory_comes_back_as_it_went(live: Live, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number, name in enumerate(ODD_NAMES):
        (source / name).mkdir(parents=True)
        (source / name / name).write_bytes(os.urandom(number * 70_000))
    (source / "plain" / "run").write_text("x")
    (source / "plain" / "run").chmod(0o755)
    (source / "link").symlink_to("plain/run")
    live.wait(live.environment.upload_dir(source_dir=source, target_dir="/work/tree"))
    assert live.output("ls -A /work/tree | wc -l; readlink /work/tree/link; test -x /work/tree/plain/run") != ""
    back = tmp_path / "back"
    back.mkdir()
    live.wait(live.environment.download_dir(source_dir="/work/tree", target_dir=back))
    assert tree(back) == tree(source)
    live.exec("rm -rf /work/tree")


def tree(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
        else:
            found[name] = None
    return found


def test_an_upload_replaces_files_and_keeps_neighbours(live: Live, tmp_path: Path) -> None:
    live.output("mkdir -p /work/merge/sub && echo old > /work/merge/sub/file && echo other > /work/merge/other")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("new\n")
    live.wait(live.environment.upload_dir(tmp_path, "/work/merge"))
    assert live.output("cat /work/merge/sub/file /work/merge/other; rm -r /work/merge") == "new\nother"


@pytest.mark.parametrize("path", ["/no/such/file", "/work"])
def test_a_download_of_what_is_no_file_is_an_error_or_a_directory(live: Live, tmp_path: Path, path: str) -> None:
    if path == "/work" and live.environment.type() != "bubblewrap":
        pytest.skip("docker cp copies a directory where a file was asked for")
    with pytest.raises(RuntimeError):
        live.wait(live.environment.download_file(path, tmp_path / "file"))


def test_harbor_s_filtered_download_works(live: Live, tmp_path: Path) -> None:
    live.output("mkdir -p /work/logs && cd /work/logs && echo a > keep.txt && echo b > drop.log")
    live.wait(live.environment.download_dir_filtered(source_dir="/work/logs", target_dir=tmp_path, include=["*.txt"]))
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]
    assert live.wait(live.environment.is_dir("/work/logs"))
    assert not live.wait(live.environment.is_file("/work/logs"))


def test_harbor_s_log_directories_are_there_and_open_to_all(live: Live) -> None:
    assert live.output("stat -c %a /logs/agent /logs/verifier /logs/artifacts") == "777\n777\n777"


def test_python3_is_there(live: Live) -> None:
    assert live.output("python3 -c 'import os, sys; print(6 * 7)'") == "42"


# --- network ----------------------------------------------------------------------------------------------------------


def test_a_sandbox_without_network_has_loopback_only(backend: str, tmp_path: Path) -> None:
    with running(make_environment(backend, tmp_path, network=NetworkMode.NO_NETWORK)) as live:
        assert live.output("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo"
        assert live.exec("exec 3<>/dev/tcp/192.0.2.1/80", timeout_sec=30).return_code != 0


# --- the end ----------------------------------------------------------------------------------------------------------


def test_stop_may_be_repeated_and_ends_commands_that_run(backend: str, tmp_path: Path) -> None:
    with running(make_environment(backend, tmp_path)) as live:
        command = asyncio.run_coroutine_threadsafe(live.environment.exec("echo up; sleep 600"), live.loop)
        live.output("until pgrep -x sleep; do sleep 0.05; done", timeout_sec=60)
        live.wait(live.environment.stop(delete=True))
        try:
            result = command.result(60)
        except RuntimeError:
            pass
        else:
            assert result.return_code != 0
        live.wait(live.environment.stop(delete=True))
        # Docker answers with a code, bubblewrap with an error: both say that there is nothing to run a command in.
        try:
            after = live.exec("true")
        except RuntimeError:
            return
        assert after.return_code != 0


def test_a_stopped_sandbox_leaves_nothing_on_the_host(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    environment = make_environment(backend, tmp_path)
    with running(environment) as live:
        live.exec("sleep 1234567 & setsid sleep 1234567 & disown -a; echo x > /tmp/y", timeout_sec=60)
    assert sleepers() == []
    assert list(temporary.iterdir()) == []
    if backend == "bubblewrap":
        assert "/tmp/layer" not in Path("/proc/self/mounts").read_text()
    else:
        project = environment.session_id.lower()
        for what in (["ps", "-aq"], ["network", "ls", "-q"]):
            label = f"label=com.docker.compose.project={project}"
            listed = subprocess.run(["docker", *what, "--filter", label], capture_output=True, text=True, check=True)
            assert listed.stdout == ""


def sleepers() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if Path("/proc", name, "cmdline").read_bytes() == b"sleep\0001234567\0":
                    found.append(int(name))
            except OSError:
                pass
    return found


# --- whole Harbor trials ----------------------------------------------------------------------------------------------

SOLUTION = "python3 -c 'print(int(open(\"/app/data.txt\").read()) + 1)' > /tmp/answer; id -u > /logs/artifacts/user"
TEST = 'if [ "$(cat /tmp/answer)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


def rewards(result: object) -> object:
    exception = getattr(result, "exception_info", None)
    assert exception is None, exception
    return getattr(result, "verifier_result").rewards  # noqa: B009 - may be missing, then this is the failure


def test_a_trial_with_a_shared_verifier(backend: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", solution=SOLUTION, test=TEST)
    assert rewards(asyncio.run(run_trial(task, tmp_path / "trials", backend))) == {"reward": 1.0}
    assert [path.read_text() for path in (tmp_path / "trials").rglob("user")] == ["0\n"]


def test_a_trial_whose_solution_is_wrong(backend: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", solution="echo 41 > /tmp/answer", test=TEST)
    assert rewards(asyncio.run(run_trial(task, tmp_path / "trials", backend))) == {"reward": 0.0}


def test_a_trial_with_a_separate_verifier(backend: str, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        config='artifacts = ["/tmp/answer"]\n[verifier]\nenvironment_mode = "separate"\n',
        solution=SOLUTION,
        test="test ! -e /app || exit 1\n" + TEST,
        tests__Dockerfile="FROM debian:bookworm-slim\nCOPY . /tests\n",
    )
    assert rewards(asyncio.run(run_trial(task, tmp_path / "trials", backend))) == {"reward": 1.0}


def test_a_trial_with_an_agent_user(backend: str, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("a sandbox that an ordinary user starts has one user")
    task = write_task(tmp_path / "task", config='[agent]\nuser = "1000"\n', solution=SOLUTION, test=TEST)
    assert rewards(asyncio.run(run_trial(task, tmp_path / "trials", backend))) == {"reward": 1.0}
    assert [path.read_text() for path in (tmp_path / "trials").rglob("user")] == ["1000\n"]


def test_a_trial_without_network(backend: str, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        config='[environment]\nnetwork_mode = "no-network"\n',
        solution=SOLUTION,
        test='[ "$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d " ")" = lo ] || exit 1\n' + TEST,
    )
    assert rewards(asyncio.run(run_trial(task, tmp_path / "trials", backend))) == {"reward": 1.0}


def test_a_trial_of_several_steps(backend: str, tmp_path: Path) -> None:
    step = "#!/bin/bash\necho {} >> /app/log; "
    check = '#!/bin/bash\n[ "$(cat /app/log | tr -d "\\n")" = {} ] && echo 1 > /logs/verifier/reward.txt\n'
    task = write_task(
        tmp_path / "task",
        config='[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n',
        solution="true",
        test="true",
        steps__first__instruction_dot_md="one\n",
        steps__first__solution__solve_dot_sh=step.format("a"),
        steps__first__tests__test_dot_sh=check.format("a"),
        steps__second__instruction_dot_md="two\n",
        steps__second__solution__solve_dot_sh=step.format("b"),
        steps__second__tests__test_dot_sh=check.format("ab"),
    )
    assert rewards(asyncio.run(run_trial(task, tmp_path / "trials", backend))) == {"reward": 1.0}


def test_rollouts_of_one_task_side_by_side(backend: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", solution=SOLUTION, test=TEST)
    count = 16 if backend == "bubblewrap" else 3

    async def group() -> list[object]:
        return list(await asyncio.gather(*(run_trial(task, tmp_path / "trials", backend) for _ in range(count))))

    assert [rewards(result) for result in asyncio.run(group())] == [{"reward": 1.0}] * count
