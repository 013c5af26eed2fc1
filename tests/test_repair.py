"""COPY repair, in a real container that was started from an image without the copies."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harbor_trl.dockerfile import copy_plan
from harbor_trl.errors import SandboxUnavailableError
from harbor_trl.repair import needs_repair, repair_copies

IMAGE = "debian:bookworm-slim"


class Container:
    """A container whose image build dropped every COPY; uploads as an ordinary user."""

    def __init__(self) -> None:
        command = ["docker", "run", "-d", "--rm", "--label", "harbor-trl-test=repair", IMAGE, "sleep", "600"]
        self.id = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        tar = subprocess.run(["tar", "-C", source_dir, "-c", "."], check=True, capture_output=True).stdout
        script = f"mkdir -p {target_dir} && tar -C {target_dir} -xo"
        command = ["docker", "exec", "-i", "-u", "nobody", self.id, "sh", "-c", script]
        subprocess.run(command, check=True, input=tar)

    async def exec(self, command: str, *, user: str | int | None = None) -> SimpleNamespace:
        args = ["docker", "exec", *(["-u", str(user)] if user is not None else ["-u", "nobody"]), self.id]
        done = subprocess.run([*args, "sh", "-c", command], capture_output=True, text=True)
        return SimpleNamespace(return_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def look(self, path: str) -> str:
        command = ["docker", "exec", self.id, "stat", "-c", "%F %a %u:%g %N", path]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def read(self, path: str) -> bytes:
        return subprocess.run(["docker", "exec", self.id, "cat", path], check=True, capture_output=True).stdout


@pytest.fixture
def container() -> Iterator[Container]:
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"needs a Docker engine with {IMAGE}")
    found = Container()
    yield found
    subprocess.run(["docker", "rm", "-f", found.id], capture_output=True)


DOCKERFILE = """FROM debian:bookworm-slim
RUN apt-get install -y git
WORKDIR /work
COPY data /app/data
COPY --chown=1:2 --chmod=4750 ["its a name.sh", "/opt/x y/"]
COPY plain /srv
COPY --chown=games <<END /etc/note
hello $HOME
END
COPY <<'END' /etc/note
hello
END
COPY fix.patch /tmp/fix.patch
RUN patch -p1 < /tmp/fix.patch && rm /tmp/fix.patch
COPY plain /etc/hostname
"""


@pytest.mark.docker
def test_files_come_back_with_modes_and_owners_but_never_what_a_run_touched(
    container: Container, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir(mode=0o711)
    (tmp_path / "data/a$b").write_text("dollar")
    (tmp_path / "data/link").symlink_to("a$b")
    (tmp_path / "its a name.sh").write_text("quoted")
    (tmp_path / "plain").write_text("plain")
    (tmp_path / "fix.patch").write_text("answer")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(DOCKERFILE)
    before = container.read("/etc/hostname")
    report = asyncio.run(repair_copies(container, copy_plan(dockerfile, tmp_path), tmp_path))
    assert container.read("/app/data/a$b") == b"dollar"
    assert container.look("/app/data/link").startswith("symbolic link 777 0:0")
    assert container.look("/opt/x y/its a name.sh").startswith("regular file 4750 1:2")
    assert container.look("/opt/x y").startswith("directory 750 1:2")
    assert container.read("/srv/plain") == b"plain"
    assert container.read("/etc/note") == b"hello\n"
    assert container.look("/tmp/fix.patch") == ""
    assert "/tmp/fix.patch" in [entry.destination for entry in report.withheld]
    assert container.read("/etc/hostname") == before
    assert container.look("/srv").startswith("directory 755 0:0")


@pytest.mark.docker
def test_any_name_is_put_in_place(container: Container, tmp_path: Path) -> None:
    names = ["it's", 'say "hi"', "a b", "$HOME", "`id`", "new\nline", "-n", "*", "é"]
    (tmp_path / "d").mkdir()
    for name in names:
        (tmp_path / "d" / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY d /x/\n")
    asyncio.run(repair_copies(container, copy_plan(tmp_path / "Dockerfile", tmp_path), tmp_path))
    assert [container.read(f"/x/{name}") for name in names] == [name.encode() for name in names]


@pytest.mark.docker
def test_a_user_who_may_not_write_gives_an_error_that_says_so(container: Container, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY f /root/f\n")
    plan = copy_plan(tmp_path / "Dockerfile", tmp_path)
    with pytest.raises(SandboxUnavailableError, match="denied"):
        asyncio.run(repair_copies(container, plan, tmp_path, exec_user=None))


def test_only_backends_known_to_drop_copies_are_repaired() -> None:
    assert [needs_repair(name) for name in ("e2b", "docker", "daytona", "bubblewrap")] == [True, False, False, False]
