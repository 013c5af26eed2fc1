"""Harbor's Docker backend, made fast: still Harbor's own, one build per content, nothing left but the shared image."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from harbor.models.environment_type import EnvironmentType

from harbor_trl.environments import docker as fast
from harbor_trl.environments import environment_for
from harbor_trl.environments.docker import FastDockerEnvironment, context_digest
from harbor_trl.errors import SandboxUnavailableError
from harbor_trl.execution import run_command
from harbor_trl.rollout import preflight
from sandbox_support import Live, make_environment, own_images, require, run_trial, running, write_task

# --- choosing a backend (no engine needed) ----------------------------------------------------------------------------


def test_names_choose_backends() -> None:
    from harbor.models.trial.config import EnvironmentConfig

    for name, path in (("docker", "docker:FastDockerEnvironment"), ("bubblewrap", "bubblewrap:BubblewrapEnvironment")):
        fields = environment_for(name, {"kwargs": {"x": 1}})
        assert fields == {"import_path": f"harbor_trl.environments.{path}", "kwargs": {"x": 1}}
        EnvironmentConfig(**fields)
    assert environment_for("modal") == {"type": EnvironmentType.MODAL}
    assert environment_for("my.module:Class")["import_path"] == "my.module:Class"
    with pytest.raises(
        SandboxUnavailableError, match=r"'dokcer'.*apple-container.*bubblewrap.*docker.*package\.module:Class"
    ):
        environment_for("dokcer")


def test_choosing_does_not_import_harbor() -> None:
    import sys

    program = "import sys, harbor_trl.environments as e; e.environment_for('docker'); print('harbor' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_the_digest_sees_all_that_a_build_sees(tmp_path: Path) -> None:
    def build(directory: str, change: Any = None) -> str:
        top = tmp_path / directory
        (top / "sub").mkdir(parents=True)
        (top / "sub" / "file").write_text("x")
        (top / "link").symlink_to("sub")
        if change:
            change(top)
        return context_digest(top)

    same = build("same")
    assert build("again") == same
    changes = [
        lambda top: (top / "sub" / "file").write_text("y"),
        lambda top: (top / "sub" / "file").chmod(0o755),
        lambda top: (top / "sub" / "file").rename(top / "sub" / "other"),
        lambda top: (top / "empty").mkdir(),
        lambda top: ((top / "link").unlink(), (top / "link").symlink_to("sub/")),
        lambda top: (top / "sub").chmod(0o700),
    ]
    digests = {build(str(number), change) for number, change in enumerate(changes)}
    assert len(digests | {same}) == len(changes) + 1


# --- on an engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    require("docker")
    with own_images():
        yield


PID_1 = "cat /proc/1/cmdline | tr '\\0' ' '"


def images() -> list[str]:
    """Images that rollouts of this test run have left."""
    listed = ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", fast.IMAGE_REPOSITORY]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()


def test_images_can_be_removed_all_at_once(engine: None, tmp_path: Path) -> None:
    with running(make_environment("docker", tmp_path)) as live:
        left = images()
        assert left
        # In use: stays.
        assert not set(left) <= set(fast.remove_task_images())
        live.output("true")
    fast.remove_task_images()
    assert images() == []


@pytest.mark.docker
def test_pid_1_is_ours_unless_told_or_the_task_says_so(engine: None, tmp_path: Path) -> None:
    with running(make_environment("docker", tmp_path / "1")) as live:
        assert "trap" in live.output(PID_1)
    with running(make_environment("docker", tmp_path / "2", options={"init": False})) as live:
        assert live.output(PID_1) == "sh -c sleep infinity "
    compose = {"docker-compose.yaml": "services:\n  main:\n    command: [sleep, '999']\n"}
    with running(make_environment("docker", tmp_path / "3", files=compose)) as live:
        assert live.output(PID_1) == "sleep 999 "


@pytest.fixture(scope="module", params=["debian:bookworm-slim", "harbor-trl-busybox:latest"])
def live(request: pytest.FixtureRequest, engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if subprocess.run(["docker", "image", "inspect", request.param], capture_output=True).returncode:
        pytest.skip(f"no image {request.param}")
    directory = tmp_path_factory.mktemp("images")
    with running(make_environment("docker", directory, dockerfile=f"FROM {request.param}\nWORKDIR /work\n")) as started:
        yield started


@pytest.mark.docker
@pytest.mark.parametrize(
    ("options", "compose", "limit"),
    [
        ({}, "", str(max(1024, 128 * (os.cpu_count() or 1)))),
        ({"max_processes": 77}, "", "77"),
        ({"max_processes": 77}, "services: {main: {pids_limit: 55}}\n", "55"),
    ],
)
def test_processes_are_limited(engine: None, tmp_path: Path, options: dict, compose: str, limit: str) -> None:
    files = {"docker-compose.yaml": compose} if compose else {}
    environment = make_environment("docker", tmp_path, files=files, options=options)
    with running(environment) as live:
        shown = "cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max 2>/dev/null; :"
        assert live.output(shown).split() == [limit]


@pytest.mark.docker
def test_commands_run_in_bash_or_else_in_sh(live: Live) -> None:
    has_bash = live.exec("command -v bash").return_code == 0
    assert live.output("echo $0; pwd; exit 0") == ("bash\n/work" if has_bash else "sh\n/work")
    assert live.exec("exit 7").return_code == 7
    assert live.exec("no-such-command").return_code == 127
    assert live.output("echo $X; id -u", env={"X": "y z"}, cwd="/tmp", user="root") == "y z\n0"


@pytest.mark.docker
def test_kill_9_1_leaves_the_sandbox_alive_and_without_zombies(live: Live) -> None:
    assert live.exec("kill -9 -1").return_code in (0, 137)
    live.output("(sleep 0.1 &) ; sleep 0.5")
    assert "Z" not in live.output("cat /proc/[0-9]*/stat | cut -d' ' -f3")


@pytest.mark.docker
def test_bounded_commands_work_in_each_image(live: Live) -> None:
    result = live.wait(run_command(live.environment, "echo out; echo err >&2; exit 3"))
    assert sorted(result.text.split("\n")) == ["(rc=3)", "err", "out"]
    assert live.wait(run_command(live.environment, "sleep 60", timeout_sec=1)).timed_out


@pytest.mark.docker
def test_what_comes_out_of_a_sandbox_stays_in_its_directory(live: Live, tmp_path: Path) -> None:
    live.output(
        "mkdir -p /out/d && cd /out && echo a >d/f && ln d/f hard && ln -s d/f in && ln -s /etc/passwd abs && "
        "ln -s ../.. up && mkfifo pipe && chmod 750 d/f"
    )
    target = tmp_path / "target"
    target.mkdir()
    (target / "d").symlink_to(tmp_path)
    live.wait(live.environment.download_dir("/out", target))
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == ["d", "d/f", "hard", "in"]
    assert (target / "in").read_text() == (target / "hard").read_text() == "a\n"
    assert (target / "d" / "f").stat().st_mode & 0o777 == 0o750
    live.wait(live.environment.download_file("/out/in", tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "a\n"
    with pytest.raises(RuntimeError, match="/out/nothing"):
        live.wait(live.environment.download_file("/out/nothing", tmp_path / "nothing"))


@pytest.mark.docker
def test_what_is_copied_out_is_bounded_in_all(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_MAX_FILE_BYTES", 1 << 20)
    live.output("mkdir -p /many && cd /many && for i in 1 2 3 4; do head -c 300000 /dev/zero >$i; done")
    with pytest.raises(RuntimeError, match="more than 1048576 bytes"):
        live.wait(live.environment.download_dir("/many", tmp_path / "out"))
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 1 << 20


@pytest.mark.docker
def test_an_engine_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(SandboxUnavailableError, match=r"DOCKER_HOST=tcp://127.0.0.1:1: Cannot connect to the Docker"):
        preflight("docker", {})


@pytest.mark.docker
@pytest.mark.parametrize(("delay", "runs"), [("", False), ("sleep 0.4;", False), ("", True)])
def test_a_container_that_ends_at_its_start_is_an_error(engine: None, tmp_path: Path, delay: str, runs: bool) -> None:
    script = f"{delay} echo no config found >&2\n" + ('exec "$@"' if runs else "exit 5")
    dockerfile = 'FROM debian:bookworm-slim\nCOPY start.sh /\nENTRYPOINT ["sh", "/start.sh"]\n'
    environment = make_environment("docker", tmp_path, dockerfile=dockerfile, files={"start.sh": script})
    if runs:
        with running(environment) as live:
            live.output("true")
        return
    with (
        pytest.raises(SandboxUnavailableError, match=r"(?s)ended by itself.*exit code 5.*ENTRYPOINT.*no config found"),
        running(environment),
    ):
        pass


@pytest.mark.docker
def test_a_group_of_rollouts_builds_once_and_a_change_builds_again(engine: None, tmp_path: Path) -> None:
    builds = []

    class Counting(FastDockerEnvironment):
        async def _run_docker_compose_command(self, command: list[str], *args: Any, **kwargs: Any) -> Any:
            if command[0] == "build":
                builds.append(self.session_id)
            return await super()._run_docker_compose_command(command, *args, **kwargs)

    def environment(name: str, text: str) -> Counting:
        made = make_environment(
            "docker", tmp_path / name, dockerfile="FROM debian:bookworm-slim\nCOPY x /x\n", files={"x": text}
        )
        made.__class__ = Counting
        return made  # type: ignore[return-value]

    content = uuid4().hex

    async def group(*members: Counting) -> list[str | None]:
        try:
            await asyncio.gather(*(one.start(force_build=False) for one in members))
            return [(await one.exec("cat /x")).stdout for one in members]
        finally:
            await asyncio.gather(*(one.stop(delete=True) for one in members))

    before = len(images())
    assert asyncio.run(group(environment("1", content), environment("2", content))) == [content] * 2
    assert len(builds) == 1
    assert len(images()) == before + 1
    assert asyncio.run(group(environment("3", content))) == [content]
    assert len(builds) == 1
    assert asyncio.run(group(environment("4", content + "changed"))) == [content + "changed"]
    assert len(builds) == 2
    # An image that somebody deleted is built again.
    tag = f"{fast.IMAGE_REPOSITORY}:{context_digest(tmp_path / '1' / 'task' / 'environment')}"
    subprocess.run(["docker", "image", "rm", tag], check=True, capture_output=True)
    assert asyncio.run(group(environment("5", content))) == [content]
    assert len(builds) == 3


@pytest.mark.docker
def test_a_failed_build_is_an_error_and_leaves_nothing(engine: None, tmp_path: Path) -> None:
    environment = make_environment("docker", tmp_path, dockerfile="FROM debian:bookworm-slim\nRUN exit 3\n")

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match=r"build"):
            await environment.start(force_build=False)
        await environment.stop(delete=True)

    before = images()
    asyncio.run(scenario())
    assert images() == before


@pytest.mark.docker
def test_a_healthcheck_is_waited_for(engine: None, tmp_path: Path) -> None:
    check = "test -e /ready || { touch /ready; exit 1; }"
    dockerfile = f"FROM debian:bookworm-slim\nHEALTHCHECK --interval=1s --retries=20 CMD {check}\n"
    with running(make_environment("docker", tmp_path, dockerfile=dockerfile)) as live:
        live.output("test -e /ready")


@pytest.mark.docker
def test_a_second_service_starts_and_stops_with_the_task(engine: None, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        solution="until getent hosts side; do sleep 0.2; done > /tmp/answer",
        test="test -s /tmp/answer; echo $((1 - $?)) > /logs/verifier/reward.txt",
    )
    (task / "environment" / "docker-compose.yaml").write_text(
        "services:\n  side:\n    image: debian:bookworm-slim\n    command: [sleep, infinity]\n"
    )
    result = asyncio.run(run_trial(task, tmp_path / "trials", "docker"))
    assert result.exception_info is None
    assert result.verifier_result is not None
    assert result.verifier_result.rewards == {"reward": 1.0}
    listed = subprocess.run(["docker", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True)
    assert result.trial_name.lower() not in listed.stdout


@pytest.mark.docker
def test_stale_containers_of_the_same_name_are_replaced(engine: None, tmp_path: Path) -> None:
    with running(make_environment("docker", tmp_path / "1")) as old:
        old.output("echo stale > /stale")
        again = make_environment("docker", tmp_path / "2")
        again.session_id = old.environment.session_id
        with running(again) as new:
            assert new.exec("cat /stale").return_code != 0


@pytest.mark.docker
def test_a_sparse_file_does_not_fill_the_disk_of_the_trainer(live: Live, tmp_path: Path) -> None:
    live.output("mkdir -p /sparse && dd if=/dev/zero of=/sparse/file bs=1 count=0 seek=8589934592")
    with pytest.raises(RuntimeError, match="more than"):
        live.wait(live.environment.download_dir("/sparse", tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.docker
def test_a_build_that_hangs_ends_when_nobody_waits_for_it(engine: None, tmp_path: Path) -> None:
    mark = f"sleep 9{uuid4().int % 10**6:06d}"
    environment = make_environment("docker", tmp_path, dockerfile=f"FROM debian:bookworm-slim\nRUN {mark}\n")

    def builds() -> str:
        return subprocess.run(["pgrep", "-f", environment.session_id], capture_output=True, text=True).stdout

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await environment.start(force_build=False)
        await environment.stop(delete=True)

    asyncio.run(scenario())
    assert builds() == ""


@pytest.mark.docker
def test_tasks_with_the_same_context_share_an_image_that_stays(tmp_path: Path) -> None:
    from harbor_trl import HarborTerminalEnv
    from harbor_trl.options import RolloutOptions
    from tasks import make_task, write_reward

    dockerfile = f"FROM debian:bookworm-slim\nENV MARK={tmp_path.name}\n"
    tasks = [make_task(tmp_path / name, test=write_reward("1"), dockerfile=dockerfile) for name in "ab"]
    env = HarborTerminalEnv("docker", options=RolloutOptions(trials_dir=str(tmp_path / "trials")))
    for task in (*tasks, *tasks):
        env.reset(task_dir=task)
        assert env.bash("echo $MARK") == f"{tmp_path.name}\n"
        assert env.reward == 1.0, env._failure
