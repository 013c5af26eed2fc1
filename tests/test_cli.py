"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harbor_trl.cli import main
from tasks import make_task
from test_check import TOML, write

KEYS = ["task_id", "severity", "code", "file", "line", "column", "message", "remedy"]
CLI = [sys.executable, "-m", "harbor_trl.cli"]


def suite(root: Path) -> Path:
    write(root / "good", instruction="One.")
    write(root / "late", toml="", instruction="Two.")
    write(root / "wrong", toml=TOML.replace("cpus = 1", "cpus = []"), instruction="Three.")
    return root


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_check_exits_0_without_findings_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 task: 1 without a finding, 0 with errors, 0 with warnings\n"
    assert main(["check", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_check_exits_1_and_counts_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(suite(tmp_path))]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path}/wrong/task.toml:13:1: error: environment.cpus" in out
    assert "\x1b" not in out
    assert out.splitlines()[-3:] == [
        "      1  error    config-value",
        "      1  warning  no-timeout",
        "3 tasks: 1 without a finding, 1 with errors, 1 with warnings",
    ]


def test_check_writes_one_json_object_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", str(suite(tmp_path))]) == 1
    found = objects(capsys.readouterr().out)
    assert [list(one) for one in found] == [KEYS, KEYS]
    assert [(one["task_id"], one["severity"], one["line"]) for one in found] == [
        ("late", "warning", None),
        ("wrong", "error", 13),
    ]


def test_what_cannot_be_checked_is_exit_2_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    for arguments in (
        ["check", str(tmp_path / "gone")],
        ["index", str(tmp_path / "empty")],
        ["check", str(tmp_path), "--backend", "x"],
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("harbor-trl: ") and err.count("\n") == 1
    for usage in ([], ["check"], ["index", "x", "--json", "--parquet", "y"]):
        with pytest.raises(SystemExit) as ended:
            main(usage)
        assert ended.value.code == 2


def test_colours_are_for_terminals_and_NO_COLOR_is_heeded(tmp_path: Path) -> None:
    suite(tmp_path)

    def on_a_terminal(**env: str) -> bytes:
        leader, follower = pty.openpty()
        with subprocess.Popen(
            [*CLI, "check", str(tmp_path)], stdout=follower, env={**os.environ, "TERM": "xterm", **env}
        ):
            os.close(follower)
            shown = b""
            while True:
                try:
                    part = os.read(leader, 65536)
                except OSError:
                    break
                if not part:
                    break
                shown += part
        os.close(leader)
        return shown

    assert b"\x1b[31merror" in on_a_terminal(NO_COLOR="")
    assert b"\x1b" not in on_a_terminal(NO_COLOR="1")


def test_index_prints_the_table_of_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harbor_trl.suite import index_suite

    make_task(tmp_path / "a", toml="[metadata]\nlevel = 1\nwhen = 2026-01-02\n")
    make_task(tmp_path / "b", toml="[metadata]\ntags = ['x']\n")
    assert main(["index", str(tmp_path), "--json"]) == 0
    rows = objects(capsys.readouterr().out)
    expected = index_suite(tmp_path).table.to_pylist()
    assert rows == json.loads(json.dumps(expected, default=lambda date: date.isoformat()))
    assert (rows[0]["when"], rows[1]["tags"]) == ("2026-01-02", ["x"])

    assert main(["index", str(tmp_path), "--parquet", str(tmp_path / "out.parquet")]) == 0
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == expected
    out = capsys.readouterr().out
    assert "2 tasks: 2 in the table, 0 refused\n" in out
    assert out.endswith(f"written to {tmp_path}/out.parquet\n")


def test_index_names_refused_tasks_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(tmp_path / "a")
    make_task(tmp_path / "b", toml="x = \n")
    assert main(["index", str(tmp_path), "--json"]) == 1
    captured = capsys.readouterr()
    assert [row["task_id"] for row in objects(captured.out)] == ["a"]
    assert f"{tmp_path}/b/task.toml:1:5" in captured.err


def test_index_leaves_out_what_a_run_would_refuse_as_on_invalid_skip_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harbor_trl import HarborSpec

    for name in "abc":
        make_task(tmp_path / name)
    (tmp_path / "b" / "instruction.md").unlink()
    (tmp_path / "c" / "environment" / "Dockerfile").write_text("FROM x\nCOPY gone /\n")
    with pytest.warns(UserWarning, match="2 of 3 tasks"):
        expected = HarborSpec(tmp_path, on_invalid="skip").train_dataset["task_id"][:]
    assert main(["index", str(tmp_path), "--json"]) == 1
    captured = capsys.readouterr()
    assert [row["task_id"] for row in objects(captured.out)] == expected == ["a"]
    assert f"{tmp_path}/b/instruction.md" in captured.err and f"{tmp_path}/c/environment/Dockerfile:2" in captured.err
    assert main(["index", str(tmp_path)]) == 1
    assert "3 tasks: 1 in the table, 2 refused and left out" in capsys.readouterr().out


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a\n\x1b[31mred")
    (tmp_path / "a\n\x1b[31mred" / "instruction.md").unlink()
    for command in ("check", "index"):
        assert main([command, str(tmp_path)]) == 1
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        assert r"/a\n\x1b[31mred/instruction.md" in captured.out + captured.err
    assert main(["check", str(tmp_path), "--json"]) == 1
    [finding] = objects(capsys.readouterr().out)
    assert finding["file"] == f"{tmp_path}/a\n\x1b[31mred/instruction.md"


def test_a_file_instead_of_a_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(tmp_path / "a")
    assert main(["check", str(tmp_path / "a" / "task.toml")]) == 2
    assert f"{tmp_path}/a/task.toml is a file" in (err := capsys.readouterr().err) and err.endswith(f" {tmp_path}/a\n")


def test_a_repo_of_the_hub_is_no_directory_and_the_message_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for command in ("check", "index"):
        assert main([command, "owner/name"]) == 2
        err = capsys.readouterr().err
        assert "hf download owner/name --repo-type dataset" in err and 'HarborSpec("owner/name")' in err
        for path in ("data/suite", "./owner/name", "gone", str(tmp_path / "gone")):
            assert main([command, path]) == 2
            err = capsys.readouterr().err
            assert "there is no such directory" in err and "hf download" not in err


@pytest.mark.parametrize("target", ["/dev/null", "itself"])
def test_what_is_no_directory_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    (tmp_path / "itself").symlink_to(target)
    assert main(["check", str(tmp_path / "itself")]) == 2
    assert capsys.readouterr().err.startswith(f"harbor-trl: {tmp_path}/itself")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"harbor-trl {version('harbor-trl')}\n"


def many(root: Path, count: int) -> Path:
    for number in range(count):
        make_task(root / f"t{number:05}", instruction=str(number))
    return root


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    many(tmp_path, 1500)
    with subprocess.Popen(
        [*CLI, "check", "--json", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as done:
        assert done.stdout is not None and done.stderr is not None
        assert json.loads(done.stdout.readline())["code"] == "no-timeout"
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == 128 + signal.SIGPIPE


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    many(tmp_path, 1500)
    with subprocess.Popen(
        [*CLI, "check", "--json", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as done:
        assert done.stdout is not None and done.stderr is not None
        # It waits for its reader now.
        done.stdout.read(1)
        time.sleep(0.2)
        done.send_signal(signal.SIGINT)
        assert b"Traceback" not in done.stderr.read()
    assert done.returncode == 128 + signal.SIGINT


def test_the_command_is_installed_and_its_help_loads_nothing_heavy(tmp_path: Path) -> None:
    write(tmp_path / "a")
    code = (
        "import sys; from harbor_trl.cli import main\n"
        f"code = main(['check', {str(tmp_path)!r}])\n"
        "print(code, [name for name in ('harbor', 'torch', 'trl', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


# --- clean


def test_a_run_is_alive_while_its_process_is(tmp_path: Path) -> None:
    from harbor_trl.runs import is_alive, run_directory

    code = (
        "from harbor_trl.engine import engine\nimport sys, time\nprint(engine().run_id, flush=True)\nsys.stdin.read()\n"
    )

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    killed, killed_run = start()
    ended, ended_run = start()
    assert is_alive(killed_run) is True and is_alive(ended_run) is True
    killed.kill()
    killed.communicate()
    ended.communicate("")
    assert is_alive(killed_run) is False, "its file is left, but nobody holds the lock"
    assert is_alive(ended_run) is None, "it removed its file"
    assert is_alive("ht00000000") is None
    (run_directory() / killed_run).unlink()


@pytest.mark.docker
def test_clean_removes_what_dead_runs_left_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    from harbor_trl.runs import hold_run, release_run, run_directory

    def docker(*arguments: str) -> str:
        return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def leave(run: str) -> tuple[str, str]:
        label = f"com.docker.compose.project={run}-000001-check-test"
        name = f"{run}-000001-check-test-main-1"
        docker("run", "-d", "--name", name, "--label", label, "debian:bookworm-slim", "sleep", "600")
        docker("network", "create", "--label", label, name)
        return name, name

    dead, alive, unknown = "ht0c0c0c01", "ht0c0c0c02", "ht0c0c0c03"
    lock = hold_run(alive)
    (run_directory() / dead).touch()
    names = {run: leave(run)[0] for run in (dead, alive, unknown)}
    try:
        assert main(["clean", "--json"]) == 0
        removed = {(one["kind"], one["name"]) for one in objects(capsys.readouterr().out) if one["run"] in names}
        assert removed == {("container", names[dead]), ("network", names[dead])}
        left = docker("ps", "-a", "--format", "{{.Names}}").split()
        assert names[alive] in left and names[unknown] in left and names[dead] not in left
        assert not (run_directory() / dead).exists()
    finally:
        release_run(alive, lock)
        for name in names.values():
            subprocess.run(["docker", "rm", "-f", name], capture_output=True)
            subprocess.run(["docker", "network", "rm", name], capture_output=True)
        (run_directory() / dead).unlink(missing_ok=True)
