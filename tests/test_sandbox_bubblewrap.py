"""What a bubblewrap sandbox keeps from whom: the host, other sandboxes, the machine's memory, the rewards."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harbor.models.task.config import NetworkMode

from harbor_trl.environments import _sandbox
from harbor_trl.errors import SandboxUnavailableError, UnsupportedTaskError
from harbor_trl.execution import run_command
from sandbox_support import Live, host_processes, make_environment, require, run_as_nobody, running

LIMITS = {"memory_mb": 256, "storage_mb": 32, "max_processes": 64, "max_output_bytes": 100_000}


@pytest.fixture(autouse=True)
def bubblewrap_here() -> None:
    require("bubblewrap")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    require("bubblewrap")
    os.environ["HARBOR_TRL_TEST_SECRET"] = "do-not-tell"
    try:
        environment = make_environment("bubblewrap", tmp_path_factory.mktemp("shared"), network=NetworkMode.NO_NETWORK)
        with running(environment) as started:
            yield started
    finally:
        del os.environ["HARBOR_TRL_TEST_SECRET"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Live]:
    """A sandbox of its own with little room."""
    with running(make_environment("bubblewrap", tmp_path, options=dict(LIMITS))) as started:
        yield started


def eventually(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- isolation from the host ------------------------------------------------------------------------------------------


def test_no_file_of_the_host_is_visible_but_usr_the_interpreter_and_a_few_of_etc(live: Live) -> None:
    allowed = """
        bin dev etc home lib lib32 lib64 libx32 logs media mnt opt proc root run sbin srv tmp usr var work
    """
    assert set(live.output("ls -A /").split()) <= set(allowed.split())
    for directory in ("/home", "/mnt", "/media", "/srv", "/run", "/tmp", "/var/lib", "/var/log"):
        assert live.output(f"ls -A {directory}") == ""
    allowed = """
        alternatives debian_version group hostname hosts ld.so.cache mime.types nsswitch.conf os-release passwd pki
        protocols services ssl
    """
    assert set(live.output("ls -A /etc").split()) <= set(allowed.split())
    assert live.output("ls -A /etc/ssl") in ("", "certs")


def test_a_file_of_the_trainer_is_not_visible(live: Live, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path, Path(__file__), Path.home() / ".bashrc"):
        assert live.exec(f"cat {shlex.quote(str(path))}").return_code != 0


def test_home_of_the_host_is_not_visible(live: Live) -> None:
    home = Path.home()
    visible = set(live.output(f"ls -A {home} 2>/dev/null || true").split())
    # The way to an interpreter that lies in the home directory, and nothing beside it.
    assert visible <= {
        Path(sys.base_prefix).relative_to(home).parts[0] if home in Path(sys.base_prefix).parents else ""
    }


def test_no_variable_of_the_trainer_is_visible(live: Live) -> None:
    assert "do-not-tell" not in live.output("env")
    assert "do-not-tell" not in live.output("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true")
    names = {line.partition("=")[0] for line in live.output("env").splitlines()}
    assert names == {"HOME", "HOSTNAME", "PATH", "PWD", "SHLVL", "_"}


def test_no_descriptor_of_the_trainer_is_open(live: Live) -> None:
    # 0, 1, 2 and the directory that is being listed.
    assert live.output("ls /proc/self/fd").split() == ["0", "1", "2", "3"]


def test_only_processes_of_the_sandbox_are_visible(live: Live) -> None:
    assert int(live.output("ls -d /proc/[0-9]* | wc -l")) < 8
    assert live.output("readlink /proc/1/ns/pid /proc/self/ns/pid | sort -u | wc -l") == "1"
    for kind in ("pid", "mnt", "ipc", "uts", "net", "user"):
        assert live.output(f"readlink /proc/self/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    assert live.output("cat /proc/sys/kernel/hostname") == "sandbox"


def test_usr_is_writable_inside_and_untouched_outside(live: Live) -> None:
    if not live.environment._sandbox.launcher.overlay:
        pytest.skip("no overlayfs for ordinary users here: /usr is read-only")
    name = f"harbor-trl-{os.getpid()}"
    assert live.output(f"echo 'echo ran' > /usr/local/bin/{name}; chmod +x /usr/local/bin/{name}; {name}") == "ran"
    live.output("rm /usr/bin/env && ! test -e /usr/bin/env")
    assert not Path(f"/usr/local/bin/{name}").exists()
    assert Path("/usr/bin/env").exists()
    # Put back, as other tests use this sandbox.
    live.output(
        'printf \'#!/bin/bash\\nexport -p | sed "s/^declare -x //;s/\\"//g"\\n\' > /usr/bin/env; chmod +x /usr/bin/env'
    )


def test_nothing_inside_may_mount_or_make_a_user_namespace_or_raise_a_limit(live: Live) -> None:
    for command in (
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /dev",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "mknod /tmp/disk b 254 0",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "ulimit -u 100000",
        "ulimit -c 10",
        "nsenter -t 1 -m true",
        "chroot / mount -t proc proc /mnt",
        "dd if=/dev/mem of=/dev/null count=1",
        "dmesg --clear",
        "date -s 2001-01-01",
        "hostname other",
    ):
        assert live.exec(command).return_code != 0, command


def test_pid_1_cannot_be_killed_stopped_traced_or_read(live: Live) -> None:
    live.exec("for s in TERM INT HUP STOP KILL USR1 SEGV CHLD; do kill -$s 1; done")
    assert live.output("echo alive") == "alive"
    for command in (
        "cat /proc/1/environ",
        "cat /proc/1/mem",
        "readlink /proc/1/fd/3",
        "cat /proc/1/fd/4",
        "readlink /proc/1/exe",
        "cat /proc/1/maps",
    ):
        result = live.exec(command)
        assert result.return_code != 0, result
    trace = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.ptrace(16, 1, 0, 0), ctypes.get_errno())"
    assert live.output(f"python3 -c {shlex.quote(trace)}") == "-1 1"


def test_killing_every_process_leaves_a_sandbox_that_answers(live: Live) -> None:
    assert live.exec("kill -9 -1; sleep 60", timeout_sec=30).return_code == 137
    assert live.output("echo alive; ls -d /proc/[0-9]* | wc -l").split()[0] == "alive"


def test_two_sandboxes_see_nothing_of_each_other(live: Live, tmp_path: Path) -> None:
    with running(make_environment("bubblewrap", tmp_path)) as other:
        live.exec("echo x > /tmp/mine; sleep 30 & disown; echo y > /dev/shm/mine; ipcmk -M 4096")
        assert other.output("ls /tmp /dev/shm; pgrep sleep; ipcs -m | grep -c 4096; true").split("\n") == [
            "/dev/shm:",
            "",
            "/tmp:",
            "0",
        ]
        live.exec("pkill sleep; rm -rf /tmp/mine /dev/shm/mine")


def test_a_capability_that_a_user_gives_up_does_not_come_back(live: Live) -> None:
    if not live.environment._sandbox.many_users:
        pytest.skip("a sandbox that an ordinary user starts has one user")
    live.output("cp /usr/bin/bash /tmp/rootshell && chmod 4755 /tmp/rootshell")
    assert live.output("/tmp/rootshell -p -c 'id -u'", user="1000") == "1000"
    assert live.output("grep CapEff /proc/self/status", user="1000").split()[1] == "0" * 16
    live.exec("rm /tmp/rootshell")


def test_root_of_a_sandbox_is_nobody_on_the_host(live: Live) -> None:
    live.output("sleep 7654321 & disown", timeout_sec=30)
    pids = host_processes("sleep 7654321")
    assert len(pids) == 1
    uid = os.stat(f"/proc/{pids[0]}").st_uid
    if os.getuid() == 0:
        assert uid >= 0x6000_0000
    else:
        assert uid == os.getuid()
    live.exec("pkill sleep")


# --- files that lie ---------------------------------------------------------------------------------------------------


def test_a_download_follows_no_link_to_the_host(live: Live, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    target = tmp_path / "out"
    live.output(
        f"rm -rf /d && mkdir -p /d/sub/deep /d/dir && cd /d && echo fine > file && ln -s {secret} absolute"
        " && ln -s ../../../../etc/passwd climbing && ln -s dir/../../secret hidden && ln -s file inside"
        " && ln -s ../../file sub/deep/up && ln -s ../../../secret sub/deep/out && mkfifo pipe && ln -s / root"
    )
    live.wait(live.environment.download_dir("/d", target))
    found = {str(path.relative_to(target)): os.readlink(path) for path in target.rglob("*") if path.is_symlink()}
    assert found == {"inside": "file", "sub/deep/up": "../../file"}
    assert (target / "sub/deep/up").read_text() == "fine\n"
    assert not (target / "pipe").exists()


def test_a_link_from_an_earlier_download_is_not_written_through(live: Live, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    target = tmp_path / "out"
    target.mkdir()
    # What a harness or an older version may have left in the trial's directory.
    (target / "dir").symlink_to(victim)
    (target / "reward.txt").symlink_to(victim / "file")
    live.output("rm -rf /d && mkdir -p /d/dir && echo evil > /d/dir/file && echo 1 > /d/reward.txt")
    live.wait(live.environment.download_dir("/d", target))
    live.wait(live.environment.download_file("/d/reward.txt", target / "again"))
    assert (victim / "file").read_text() == "untouched"
    assert (target / "dir" / "file").read_text() == "evil\n"
    assert (target / "reward.txt").read_text() == "1\n"
    assert not (target / "dir").is_symlink()


def test_an_upload_through_a_link_stays_in_the_sandbox(live: Live, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "test.sh").write_text("x")
    live.output(f"rm -rf /t && ln -s {victim} /t && mkdir -p {victim} && ln -sf {victim}/f /f")
    live.wait(live.environment.upload_file(tmp_path / "test.sh", "/t/test.sh"))
    live.wait(live.environment.upload_file(tmp_path / "test.sh", "/f"))
    assert list(victim.iterdir()) == []
    assert live.output("cat /t/test.sh; test -L /f || cat /f; rm /t /f") == "xx"


def test_a_link_in_an_uploaded_directory_is_not_followed_on_the_host(live: Live, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "link").symlink_to(tmp_path / "secret")
    live.wait(live.environment.upload_dir(tmp_path / "tests", "/t"))
    assert live.output("readlink /t/link") == str(tmp_path / "secret")
    assert live.exec("cat /t/link").return_code != 0
    live.exec("rm -r /t")


@pytest.mark.parametrize("what", ["mkfifo /x", "ln -s /dev/zero /x", "ln -s /x /x", "mkdir /x", "ln -s /proc/1/mem /x"])
def test_a_download_of_something_odd_is_an_error(live: Live, tmp_path: Path, what: str) -> None:
    live.output(f"rm -rf /x; {what}")
    with pytest.raises(RuntimeError):
        live.wait(live.environment.download_file("/x", tmp_path / "x"), timeout=30)
    live.output("rm -rf /x")


def test_an_endless_file_is_refused_not_downloaded(small: Live, tmp_path: Path) -> None:
    small.output("truncate -s 32M /tmp/a; cd /tmp; for n in 1 2 3; do ln a $n; done")
    with pytest.raises(RuntimeError, match="more than may be downloaded"):
        small.wait(small.environment.download_dir("/tmp", tmp_path / "out"))


def test_what_comes_out_of_a_sandbox_is_not_believed(tmp_path: Path) -> None:
    import io

    from harbor_trl.environments import _transfer

    def number(value: int) -> bytes:
        return value.to_bytes(4, "big")

    def record(path: bytes, data: bytes = b"x") -> bytes:
        return b"f" + number(0o644) + number(len(path)) + path + number(len(data)) + data + number(0)

    target = tmp_path / "out"
    for path in (b"../evil", b"/evil", b"a/../../evil", b"a//b", b"", b".", b"a\0b"):
        with pytest.raises(_transfer.TransferError):
            _transfer.unpack_directory(io.BytesIO(record(path) + b"."), target)
    for garbage in (b"", b"f", b"z" + bytes(8), b"f" + number(0) + number(1 << 31), record(b"a")[:-2]):
        with pytest.raises(_transfer.TransferError):
            _transfer.unpack_directory(io.BytesIO(garbage), target)
    assert not (tmp_path / "evil").exists()


def test_a_sandbox_whose_files_of_users_lie_still_answers(tmp_path: Path) -> None:
    with running(make_environment("bubblewrap", tmp_path)) as live:
        live.output("rm /etc/passwd /etc/group; ln -s /dev/zero /etc/group")
        assert live.output("id -u", timeout_sec=30) == "0"
        assert live.output("id -u; echo $HOME", user="root", timeout_sec=30) == "0\n/root"
        for group in ("abc", "²", "99999999999"):
            live.output(f"echo 'root:x:0:{group}::/root:/bin/bash' >/etc/passwd")
            bounded = live.wait(run_command(live.environment, "seq 1 50000; id -g"))
            assert bounded.text.endswith("50000\n0\n"), bounded


KEYRING = """
import asyncio, ctypes, subprocess, sys
from pathlib import Path
from sandbox_support import make_environment

call = ctypes.CDLL(None).syscall
call(250, 1, None)
serial = call(248, b"user", b"token", b"do-not-tell", 11, -3)
read = "import ctypes as c; b = c.create_string_buffer(99)"
read += f"; c.CDLL(None).syscall(250, 11, {serial}, b, 99); print(b.value)"
print(subprocess.run([sys.executable, "-c", read], capture_output=True, text=True).stdout.strip())

async def main():
    environment = make_environment("bubblewrap", Path(sys.argv[1]))
    await environment.start(force_build=False)
    print((await environment.exec(f'python3 -c "{read}"')).stdout.strip())
    await environment.stop(delete=True)

asyncio.run(main())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are those of x86-64")
def test_a_key_in_the_session_keyring_of_the_trainer_cannot_be_read(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KEYRING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # The first line is an ordinary child of the trainer, which can.
    assert result.stdout.splitlines() == ["b'do-not-tell'", "b''"], result


# --- commands that do not end -----------------------------------------------------------------------------------------

ESCAPES = {
    "plain": "sleep 4242424",
    "background": "sleep 4242424 & sleep 4242424",
    "session": "setsid sleep 4242424 & sleep 4242424",
    "daemon": "(setsid bash -c 'trap \"\" TERM HUP; (sleep 4242424 &); sleep 4242424' &> /dev/null &); sleep 4242424",
    "cleared environment": "env -i setsid sleep 4242424 & sleep 4242424",
    "stopped": "sleep 4242424 & kill -STOP $!; kill -STOP $$",
    "killed reaper": "(setsid sleep 4242424 &); kill -9 $PPID; sleep 4242424",
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_of_a_command_outlives_its_timeout(live: Live, escape: str) -> None:
    try:
        live.exec(ESCAPES[escape], timeout_sec=1)
    except RuntimeError as error:
        assert "timed out" in str(error)
    eventually(lambda: host_processes("sleep 4242424") == [])
    assert live.output("echo alive") == "alive"


def test_nothing_of_a_cancelled_command_lives_on(live: Live) -> None:
    command = asyncio.run_coroutine_threadsafe(live.environment.exec("setsid sleep 4242425 & sleep 4242425"), live.loop)
    eventually(lambda: len(host_processes("sleep 4242425")) >= 2)
    command.cancel()
    eventually(lambda: host_processes("sleep 4242425") == [])
    assert live.output("echo alive") == "alive"


def test_a_background_flood_neither_holds_the_command_nor_grows_the_trainer(live: Live) -> None:
    result = live.exec("yes & echo $! > /tmp/yes; sleep 0.1", timeout_sec=30)
    assert result.return_code == 0
    assert live.output("kill $(cat /tmp/yes)") == ""


def test_a_background_server_outlives_its_command_and_may_go_on_writing(live: Live) -> None:
    live.output("(for n in $(seq 20000); do echo line $n; done; sleep 1; touch /tmp/finished) &", timeout_sec=30)
    live.output("until test -e /tmp/finished; do sleep 0.1; done", timeout_sec=60)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_output_beyond_the_limit_keeps_both_ends(small: Live) -> None:
    result = small.exec("echo BEGIN; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo END")
    assert result.stdout is not None
    assert len(result.stdout) < 101_000
    assert result.stdout.startswith("BEGIN\nxxx")
    assert result.stdout.endswith("xxx\nEND\n")
    assert "bytes of output left out" in result.stdout


def test_a_fork_bomb_stays_in_its_sandbox(small: Live) -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        small.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout_sec=3)
    assert small.output("echo alive", timeout_sec=30) == "alive"
    assert int(small.output("ls -d /proc/[0-9]* | wc -l")) < 10


def test_processes_are_counted_per_sandbox(small: Live, tmp_path: Path) -> None:
    many = "import os\nfor n in range(100):\n  if os.fork() == 0: os.execlp('sleep', 'sleep', '100')"
    assert "Resource temporarily unavailable" in (small.exec(f"python3 -c {shlex.quote(many)}").stdout or "")
    with running(make_environment("bubblewrap", tmp_path / "other", options=dict(LIMITS))) as other:
        assert other.output("for n in $(seq 40); do sleep 60 & done; jobs -p | wc -l; kill $(jobs -p)") == "40"


def test_a_memory_hog_is_killed_and_told_why(small: Live) -> None:
    hog = "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'"
    assert small.exec(hog, timeout_sec=60).return_code != 0
    many = "for n in 1 2 3 4 5; do python3 -c 'x = bytearray(100 << 20); import time; time.sleep(60)' & done; wait"
    result = small.exec(many, timeout_sec=60)
    assert result.return_code == 137
    assert "more than its limit of 256 MB" in (result.stdout or "")
    assert small.output("echo alive") == "alive"


def test_shared_memory_counts_too(small: Live) -> None:
    hog = """python3 -c '
import mmap, time
x = mmap.mmap(-1, 400 << 20)
for n in range(0, 400 << 20, 4096): x[n] = 1
time.sleep(60)'"""
    assert small.exec(hog, timeout_sec=60).return_code == 137


@pytest.mark.parametrize("where", ["/tmp", "/", "/usr/local", "/dev/shm", "/var/tmp"])
def test_all_that_a_sandbox_writes_is_bounded(small: Live, where: str) -> None:
    if where == "/usr/local" and not small.environment._sandbox.launcher.overlay:
        pytest.skip("no overlayfs for ordinary users here: /usr is read-only")
    small.exec(f"cd {where}; for n in 1 2 3 4; do head -c 20000000 /dev/zero > big$n; done")
    assert int(small.output(f"du -cb {where}/big* | tail -1").split()[0]) <= 64 * 1024 * 1024
    assert int(small.output("df -B1 --output=size / | tail -1")) == 32 * 1024 * 1024
    assert small.exec("head -c 40000000 /dev/zero > /tmp/x").return_code != 0
    small.exec(f"rm -f {where}/big* /tmp/x")
    assert small.output("echo alive > /tmp/alive; cat /tmp/alive") == "alive"


def test_a_full_sandbox_can_still_be_graded(small: Live, tmp_path: Path) -> None:
    """Filling the disk must cost the policy its reward, not the trainer its loop."""
    small.exec("head -c 100000000 /dev/zero > /tmp/full; head -c 100000000 /dev/zero > /tmp/full2")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "big").write_bytes(b"x" * 100_000)
    with pytest.raises(RuntimeError, match="No space left"):
        small.wait(small.environment.upload_dir(tmp_path / "t", "/tests"))
    assert small.output("echo alive") == "alive"


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one.server_address[1]
        one.shutdown()


def test_no_network_means_loopback_only(live: Live, server: int) -> None:
    assert live.output("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo"
    assert live.exec(f"exec 3<>/dev/tcp/127.0.0.1/{server}").return_code != 0
    assert not live.output("cat /etc/resolv.conf 2>/dev/null; true")
    serve = (
        "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname()); print('ok')"
    )
    assert live.output(f"python3 -c {shlex.quote(serve)}") == "ok"


def test_public_network_is_the_host_s(small: Live, server: int) -> None:
    assert small.exec(f"exec 3<>/dev/tcp/127.0.0.1/{server}").return_code == 0


def test_an_allowlist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowlist"):
        make_environment("bubblewrap", tmp_path, network=NetworkMode.ALLOWLIST, allowed_hosts=["example.org"])


# --- other hosts ------------------------------------------------------------------------------------------------------

HOST_WITHOUT_PYTHON = """
import asyncio, os, sys
from pathlib import Path
from sandbox_nobody import mount, MS_PRIVATE, MS_REC
from sandbox_support import make_environment

os.unshare(os.CLONE_NEWNS)
mount("none", "/", None, MS_REC | MS_PRIVATE)
top = sys.argv[1]
mount("tmpfs", top, "tmpfs", 0)
for layer in range(int(sys.argv[2])):
    for name in ("upper", "work"):
        os.makedirs(f"{top}/{layer}/{name}")
    mount("overlay", "/usr", "overlay", 0, f"lowerdir=/usr,upperdir={top}/{layer}/upper,workdir={top}/{layer}/work")
for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
    if os.path.lexists(path):
        os.unlink(path)

async def main():
    environment = make_environment("bubblewrap", Path(top) / "task")
    await environment.start(force_build=False)
    for command in ("python3 -c 'import json, ssl; print(6 * 7)'", "echo > /usr/local/x && echo writable"):
        print((await environment.exec(command)).stdout)
    print(environment._sandbox.launcher.overlay)
    await environment.stop(delete=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(("layers", "overlay"), [(1, True), (2, False)])
def test_python3_is_there_on_a_host_without_one_and_usr_is_read_only_where_the_kernel_cannot_stack(
    tmp_path: Path, layers: int, overlay: bool
) -> None:
    """The kernel stacks two overlays at most: below a second one, the sandbox gets none of its own."""
    if os.getuid():
        pytest.skip("needs root")
    result = subprocess.run(
        [sys.executable, "-c", HOST_WITHOUT_PYTHON, str(tmp_path), str(layers)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "mount /usr" in result.stderr:
        pytest.skip("this machine's /usr cannot be covered")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "42", result
    assert ("writable" in lines) is overlay
    assert lines[-1] == str(overlay)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_task_that_needs_an_image_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTaskError, match=r"docker_image = 'python:3.11'.*environment_type='docker'"):
        make_environment("bubblewrap", tmp_path / "1", docker_image="python:3.11")
    with pytest.raises(UnsupportedTaskError, match=r"docker-compose\.yaml.*environment_type='docker'"):
        make_environment("bubblewrap", tmp_path / "2", files={"docker-compose.yaml": "services: {}\n"})
    with pytest.raises(UnsupportedTaskError, match=r"Dockerfile, line 2: RUN.*environment_type='docker'"):
        make_environment("bubblewrap", tmp_path / "3", dockerfile="FROM debian\nRUN apt-get update\n")
    with pytest.raises(UnsupportedTaskError, match="mounts"):
        mount = {"type": "bind", "source": "/etc", "target": "/x"}
        make_environment("bubblewrap", tmp_path / "4", options={"mounts": [mount]})


@pytest.mark.parametrize(
    "config",
    ['[agent]\nuser = "agent"\n', '[verifier]\nuser = "agent"\n', '[[steps]]\nname = "a"\nagent.user = "agent"\n'],
)
def test_a_user_that_does_not_exist_is_refused_at_start_with_its_key(tmp_path: Path, config: str) -> None:
    environment = make_environment("bubblewrap", tmp_path)
    (tmp_path / "task" / "task.toml").write_text(config)
    with pytest.raises(UnsupportedTaskError, match=r"task\.toml: \[\w+\]\.user = 'agent': no user 'agent'"):
        asyncio.run(environment.start(force_build=False))


def test_an_unknown_option_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory"):
        make_environment("bubblewrap", tmp_path, options={"memory": 5})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kernel.unprivileged_userns_clone", "0"),
        ("user.max_user_namespaces", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
    ],
)
def test_the_error_names_the_kernel_setting(monkeypatch: pytest.MonkeyPatch, setting: str, value: str) -> None:
    monkeypatch.setattr(_sandbox, "_kernel_setting", lambda name: value if name == setting else None)
    assert f"sysctl -w {setting}=" in _sandbox._explain("user namespace", 1)


def test_a_kernel_without_user_namespaces_is_an_error_that_says_so(tmp_path: Path) -> None:
    """In a namespace of its own, this machine is made one."""
    if os.getuid():
        pytest.skip("needs root")
    script = """
        import os
        os.unshare(os.CLONE_NEWUSER)
        open("/proc/self/setgroups", "w").write("deny")
        open("/proc/self/gid_map", "w").write("0 0 1")
        open("/proc/self/uid_map", "w").write("0 0 1")
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        from harbor_trl.environments.bubblewrap import check_available
        from harbor_trl.errors import SandboxUnavailableError
        try:
            check_available()
        except SandboxUnavailableError as error:
            print(error)
        """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert "user.max_user_namespaces is 0" in result.stdout, result


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match=r"need Linux.*environment_type='docker'"):
        make_environment("bubblewrap", tmp_path)


def test_a_workdir_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    environment = make_environment("bubblewrap", tmp_path, dockerfile="FROM debian\nWORKDIR /etc/passwd/x\n")
    with pytest.raises(RuntimeError, match="/etc/passwd/x"):
        asyncio.run(environment.start(force_build=False))


# --- the end of the trainer -------------------------------------------------------------------------------------------

TRAINER = """
import asyncio, os, signal, sys
from pathlib import Path
from sandbox_support import make_environment

async def main():
    environments = [make_environment("bubblewrap", Path(sys.argv[1]) / str(n)) for n in range(3)]
    await asyncio.gather(*(one.start(force_build=False) for one in environments))
    await asyncio.gather(*(one.exec("setsid sleep 5550" + sys.argv[2] + " & disown") for one in environments))
    if sys.argv[3] == "fork" and os.fork() == 0:
        # Holds a copy of every descriptor, and lives on.
        import time
        time.sleep(60)
        os._exit(0)
    print("up", flush=True)
    await environments[0].exec("sleep 600")

asyncio.run(main())
"""


@pytest.mark.parametrize("extra", ["alone", "fork"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_trainer_leaves_nothing(tmp_path: Path, number: signal.Signals, extra: str) -> None:
    mark = str(os.getpid() * 10 + number)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), mark, extra],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        assert len(host_processes(f"sleep 5550{mark}")) == 3
        launchers = [pid for pid in host_processes(_sandbox.LAUNCHER_NAME) if parent(pid) == trainer.pid]
        assert len(launchers) == 1
        trainer.send_signal(number)
        trainer.wait()
        eventually(lambda: host_processes(f"sleep 5550{mark}") == [])
        eventually(lambda: launchers[0] not in host_processes(_sandbox.LAUNCHER_NAME))
        assert list(temporary.iterdir()) == []
    finally:
        # The fork that was left on purpose.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_stopped_launcher_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sandbox, "_STOP_SEC", 0.1)
    process = _sandbox.current_launcher()._process
    process.send_signal(signal.SIGSTOP)
    try:
        environment = make_environment("bubblewrap", tmp_path, options={"start_timeout_sec": 0.5})
        with pytest.raises(RuntimeError, match=f"within 0.5 seconds: its launcher .process {process.pid}. is stopped"):
            asyncio.run(environment.start(force_build=False))
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_killed_launcher_ends_its_sandboxes_and_the_next_start_works(tmp_path: Path) -> None:
    with running(make_environment("bubblewrap", tmp_path / "1")) as live:
        launcher = live.environment._sandbox.launcher
        launcher._process.kill()
        launcher._process.wait()
        with pytest.raises(RuntimeError, match="gone"):
            for _ in range(100):
                live.exec("sleep 0.1")
        with running(make_environment("bubblewrap", tmp_path / "2")) as other:
            assert other.output("echo alive") == "alive"


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        environment = make_environment("bubblewrap", tmp_path)
        for delay in (0, 0.001, 0.01, 0.02, 0.04):
            start = asyncio.ensure_future(environment.start(force_build=False))
            await asyncio.sleep(delay)
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await start
            await environment.stop(delete=True)

    launcher = _sandbox.current_launcher()._process.pid
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    before = set(children.read_text().split())
    asyncio.run(scenario())
    eventually(lambda: set(children.read_text().split()) <= before)


def test_many_sandboxes_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def rounds(count: int) -> None:
        for number in range(count):
            environment = make_environment("bubblewrap", tmp_path / str(number))
            await environment.start(force_build=False)
            await environment.exec("true")
            await environment.upload_file(__file__, "/tmp/x")
            await environment.stop(delete=True)

    asyncio.run(rounds(2))
    launcher = _sandbox.current_launcher()._process.pid
    before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", launcher)]
    asyncio.run(rounds(6))
    assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", launcher)] == before


# --- as an ordinary user ----------------------------------------------------------------------------------------------


def test_all_of_this_holds_for_an_ordinary_user_too() -> None:
    if os.getuid():
        pytest.skip("this is an ordinary user")
    tests = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        result = run_as_nobody(
            [
                *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", "/dev/null", "-W", "ignore"),
                *(f"--rootdir={directory}", f"--basetemp={directory}/t", "-o", f"pythonpath={tests}"),
                *("-k", "not docker", str(tests / "test_sandbox_conformance.py")),
                *(str(tests / "test_sandbox_bounded.py"), __file__),
            ],
            Path(directory),
            timeout=300,
        )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
