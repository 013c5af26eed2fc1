"""The bubblewrap sandbox's Dockerfile subset: what it reads as Docker would, and that it refuses the rest by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harbor_trl.environments.dockerfile_subset import Copy, ImagePlan, plan_image
from harbor_trl.errors import UnsupportedTaskError


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "dir" / "deep").mkdir(parents=True)
    (tmp_path / "dir" / "b.txt").write_text("b")
    (tmp_path / "inside").symlink_to("a.txt")
    (tmp_path / "outside").symlink_to("/etc/passwd")
    (tmp_path / "dir" / "out").symlink_to("../..")
    return tmp_path


def plan(context: Path, text: str) -> ImagePlan:
    (context / "Dockerfile").write_text(text)
    return plan_image(context / "Dockerfile", context)


def test_what_the_subset_holds(context: Path) -> None:
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
    assert result.steps == [
        "/srv",
        "/srv/app/x",
        Copy(context / "a.txt", "/srv/app/x/", None, 13),
        Copy(context / "a.txt", "/srv/app/x/bin/", 0o755, 14),
        Copy(context / "dir/b.txt", "/srv/app/x/bin/", 0o755, 14),
        Copy(context / "a.txt", "/with space/a", None, 15),
        Copy(context / "dir", "/srv/app/x/data", None, 16),
        Copy(context, "/", None, 17),
    ]


REFUSED = {
    "RUN apt-get update": "RUN is not supported",
    "run true": "RUN is not supported",
    "ADD a.txt /": "ADD is not supported",
    "VOLUME /data": "VOLUME is not supported",
    'ENTRYPOINT ["/x"]': "ENTRYPOINT is not supported",
    "HEALTHCHECK CMD true": "HEALTHCHECK is not supported",
    "ONBUILD COPY a.txt /": "ONBUILD is not supported",
    "FROM debian:12": "second build stage",
    "COPY --from=other /x /y": "--from=other",
    "COPY --chown=app a.txt /": "--chown=app",
    "COPY --chmod=u+x a.txt /": "--chmod=u+x",
    "COPY --link a.txt /": "--link",
    "COPY *.txt /": "pattern",
    "COPY a.tx? /": "pattern",
    "COPY [a].txt /": "JSON",
    "COPY missing /": "does not exist",
    "COPY outside /": "leaves the build context",
    "COPY dir/out /": "leaves the build context",
    "COPY a.txt dir /x": "several sources",
    "COPY a.txt": "needs a source and a destination",
    'COPY "a b" /': "quotes",
    "COPY <<EOF /x\nhello\nEOF": "heredocs",
    "COPY $UNKNOWN /x": "$UNKNOWN",
    "COPY a.txt ${HOME:-/x}": "variable expression",
    "WORKDIR $HOME": "$HOME",
    "ENV A=$B": "$B",
    "ENV A='$PATH'": "dollar",
    "ENV A=a\\ b": "backslash",
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


def test_a_dockerignore_is_refused_only_where_it_matters(context: Path) -> None:
    (context / ".dockerignore").write_text("*.txt\n")
    assert plan(context, "FROM debian\nWORKDIR /x\n").workdir == "/x"
    with pytest.raises(UnsupportedTaskError, match=r"line 2.*\.dockerignore"):
        plan(context, "FROM debian\nCOPY a.txt /\n")


def test_a_copy_never_leaves_the_context(context: Path) -> None:
    # `..` stops at the context's root, as in Docker.
    assert plan(context, "FROM debian\nCOPY ../../a.txt /x\n").steps == [Copy(context / "a.txt", "/x", None, 2)]


def test_a_named_link_is_followed_inside_the_context(context: Path) -> None:
    assert plan(context, "FROM debian\nCOPY inside /x/\n").steps == [Copy(context / "inside", "/x/", None, 2)]


@pytest.mark.parametrize("text", ["", "# nothing\n", "ARG A=1\n", "COPY a.txt /\n", "# escape=`\nFROM debian\n"])
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
        if isinstance(step, Copy):
            assert step.target.startswith("/")
            assert context.resolve() in [step.source.resolve(), *step.source.resolve().parents]
