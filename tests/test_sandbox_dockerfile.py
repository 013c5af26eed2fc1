"""The bubblewrap sandbox's Dockerfile subset: what it reads as Docker would, and that it refuses the rest by line."""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harbor_trl.environments.dockerfile_subset import ImagePlan, owner_of, plan_image
from harbor_trl.errors import UnsupportedTaskError


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "dir" / "deep").mkdir(parents=True)
    (tmp_path / "dir" / "b.txt").write_text("b")
    (tmp_path / "inside").symlink_to("a.txt")
    os.mkfifo(tmp_path / "fifo")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "a.txt", "packed")
    for path in (tmp_path, tmp_path / "dir", tmp_path / "dir" / "deep"):
        path.chmod(0o755)
    for path in (tmp_path / "a.txt", tmp_path / "dir" / "b.txt"):
        path.chmod(0o644)
    (tmp_path / "outside").symlink_to("/etc/passwd")
    (tmp_path / "dir" / "out").symlink_to("../..")
    return tmp_path


def plan(context: Path, text: str) -> ImagePlan:
    (context / "Dockerfile").write_text(text)
    return plan_image(context / "Dockerfile", context)


def brought(result: ImagePlan) -> list[tuple[str, object, str, int]]:
    """Where, what, with which mode and owner: all but the directories on the way."""
    return [
        (
            step.destination,
            step.source or step.content or step.link,
            f"{step.mode or 0:o} {owner_of(step)[0]}:{owner_of(step)[1]}",
            step.line,
        )
        for step in result.steps
        if not step.if_missing
    ]


def made(result: ImagePlan) -> list[str]:
    return [step.destination for step in result.steps if step.if_missing]


def test_what_the_subset_holds(context: Path) -> None:
    (context / "fifo").unlink()
    result = plan(
        context,
        """\
# syntax=docker/dockerfile:1
ARG TAG=bookworm-slim
FROM --platform=linux/amd64 debian:${TAG} AS base
LABEL a=b
ENV A=1 B="two words" \\
    # a comment inside

    C=$PATH:/x
env OLD the whole rest
ARG NAME=app
WORKDIR /srv
WORKDIR ${NAME}/x
COPY a.txt ./
COPY --chmod=0755 a.txt dir/b.txt bin/
copy ["a.txt", "/with space/a"]
COPY dir data
COPY . /
USER 1000:1000
EXPOSE 80
CMD ["sleep", "1"]
HEALTHCHECK NONE
""",
    )
    assert result.workdir == "/srv/app/x"
    assert result.user == "1000:1000"
    assert result.env == {
        "A": "1",
        "B": "two words",
        "C": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/x",
        "OLD": "the whole rest",
    }
    assert made(result)[:2] == ["/srv", "/srv/app/x"]
    assert brought(result)[:5] == [
        ("/srv/app/x/a.txt", "a.txt", "644 0:0", 13),
        ("/srv/app/x/bin/a.txt", "a.txt", "755 0:0", 14),
        ("/srv/app/x/bin/b.txt", "dir/b.txt", "755 0:0", 14),
        ("/with space/a", "a.txt", "644 0:0", 15),
        ("/srv/app/x/data/b.txt", "dir/b.txt", "644 0:0", 16),
    ]
    assert ("/dir/b.txt", "dir/b.txt", "644 0:0", 17) in brought(result)


def test_what_the_planner_adds(context: Path) -> None:
    (context / ".dockerignore").write_text("dir/deep\n**/out\noutside\n")
    result = plan(
        context,
        """\
FROM debian:12
ARG WHO=7
ENV BASE=/opt MORE="a b" LIST=${WHO:-none}
COPY --chown=$WHO:8 --chmod=u=rwx,go= *.txt ${BASE:-/tmp}/
COPY ["dir", "/quoted"]
COPY --link [a].tx? /
COPY <<EOF <<'RAW' /docs/
$BASE
EOF
$BASE
RAW
ADD a.txt /added
COPY inside outside* dir/../a.txt /etc/
""",
    )
    assert brought(result) == [
        ("/opt/a.txt", "a.txt", "700 7:8", 4),
        ("/quoted/b.txt", "dir/b.txt", "644 0:0", 5),
        ("/a.txt", "a.txt", "644 0:0", 6),
        ("/docs/EOF", b"/opt\n", "644 0:0", 7),
        ("/docs/RAW", b"$BASE\n", "644 0:0", 7),
        ("/added", "a.txt", "644 0:0", 12),
        ("/etc/inside", "a.txt", "644 0:0", 13),
        ("/etc/a.txt", "a.txt", "644 0:0", 13),
    ]


def test_the_path_of_the_image_is_known(context: Path) -> None:
    result = plan(context, "FROM debian\nENV VENV=/opt/v\nENV PATH=$VENV/bin:$PATH\nCOPY a.txt x/\n")
    assert result.env["PATH"] == "/opt/v/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert brought(result) == [("/x/a.txt", "a.txt", "644 0:0", 4)]


REFUSED = {
    "RUN apt-get update": "RUN is not supported",
    "run true": "RUN is not supported",
    "VOLUME /data": "VOLUME is not supported",
    'ENTRYPOINT ["/x"]': "ENTRYPOINT is not supported",
    "HEALTHCHECK CMD true": "HEALTHCHECK is not supported",
    "ONBUILD COPY a.txt /": "ONBUILD is not supported",
    "FROM debian:12": "second build stage",
    "COPY --from=other /x /y": 'comes from "other"',
    "ADD http://example.org/x /": "network",
    "ADD --unpack=true a.tar /": "archive",
    "COPY fifo /": "neither a file",
    "COPY --chown=app a.txt /": "(app)",
    "COPY missing /": '"missing" is not in the build context',
    "COPY outside /": "is not in the build context",
    "COPY dir/out/etc/passwd /": "is not in the build context",
    "COPY a.txt dir /x": "several sources",
    "COPY a.txt": "at least one source and a destination",
    'COPY "a b" /': "double quote is not closed",
    "COPY $UNKNOWN /x": "$UNKNOWN",
    "COPY a.txt ${HOME:-/x}": "$HOME",
    "WORKDIR $HOME": "$HOME",
    "ENV A=$B": "$B",
    "NONSENSE": "NONSENSE is not supported",
}


@pytest.mark.parametrize("line", REFUSED)
def test_the_rest_is_refused_with_its_line(context: Path, line: str) -> None:
    with pytest.raises(UnsupportedTaskError, match=re.escape(REFUSED[line])) as error:
        plan(context, f"FROM debian:12\n\n# comment\n{line}\n")
    assert "Dockerfile, line 4: " in str(error.value)
    assert "environment_type='docker'" in str(error.value)


@pytest.mark.parametrize("image", ["python:3.12", "alpine", "scratch", "myorg/debian:1", "debian-like", "ubuntu2"])
def test_an_image_that_usr_cannot_stand_in_for_is_refused(context: Path, image: str) -> None:
    with pytest.raises(UnsupportedTaskError, match=f"line 1: FROM {image}.*accept_images"):
        plan(context, f"FROM {image}\n")
    assert plan_image(context / "Dockerfile", context, ("*",)) == ImagePlan()


@pytest.mark.parametrize("image", ["debian", "docker.io/library/ubuntu:24.04", "debian:12@sha256:00"])
def test_debian_and_ubuntu_are_taken(context: Path, image: str) -> None:
    assert plan(context, f"FROM {image}") == ImagePlan()


def test_a_copy_never_leaves_the_context(context: Path) -> None:
    # `..` stops at the context's root, as in Docker; a link is resolved inside.
    assert brought(plan(context, "FROM debian\nCOPY ../../a.txt /x\n")) == [("/x", "a.txt", "644 0:0", 2)]
    assert brought(plan(context, "FROM debian\nCOPY dir/out/a.txt /x\n")) == [("/x", "a.txt", "644 0:0", 2)]


def test_a_named_link_is_followed_inside_the_context(context: Path) -> None:
    assert brought(plan(context, "FROM debian\nCOPY inside /x/\n")) == [("/x/inside", "a.txt", "644 0:0", 2)]


@pytest.mark.parametrize("text", ["", "# nothing\n", "ARG A=1\n", "COPY a.txt /\n", "# escape=`\n"])
def test_a_file_without_a_stage_is_refused(context: Path, text: str) -> None:
    with pytest.raises(UnsupportedTaskError):
        plan(context, text)


def test_bytes_that_are_not_utf8_are_refused(context: Path) -> None:
    (context / "Dockerfile").write_bytes(b"FROM debian\nENV A=\xff\n")
    with pytest.raises(UnsupportedTaskError, match="UTF-8"):
        plan_image(context / "Dockerfile", context)


WORDS = st.sampled_from(
    [
        *("FROM", "debian:12", "COPY", "ENV", "ARG", "WORKDIR", "USER", "a.txt", "dir", "/x", "./", "--chmod=644"),
        *("A=1", "$A", "${A}", "\\", "\n", "\\\n", "#", "<<EOF", '"', "'", "[", "]", " ", "\t", ",", "é", "=", ".."),
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, max_size=25))
def test_any_text_is_planned_or_refused(context: Path, words: list[str]) -> None:
    try:
        result = plan(context, "FROM debian\n" + " ".join(words))
    except UnsupportedTaskError:
        return
    assert result.workdir.startswith("/")
    for step in result.steps:
        assert step.destination.startswith("/")
        if step.source is not None:
            assert context.resolve() in [(context / step.source).resolve(), *(context / step.source).resolve().parents]
