"""Copy plans against real builds: the same context built, exported and compared path by path.

With `BUILDKIT_HOST` set and `buildctl` on the PATH, a current BuildKit builds and everything is compared. Otherwise the
Docker engine's own frontend does, through the buildx plugin; what it is too old for is not generated: before version 23
heredocs, `--link` and `--chmod`; in any version `--exclude`, `--parents`, symbolic `--chmod`, destinations like `/x/.`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dockerfile_builders import Builder, find_builder
from dockerfile_cases import Case, Node, apply, cases
from harbor_trl import _native

pytestmark = pytest.mark.docker

EXAMPLES = {"deep": 3000, "ci": 60}.get(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else ""), 25)


@pytest.fixture(scope="module")
def builder() -> Builder:
    found = find_builder()
    if found is None:
        pytest.skip("needs the docker-buildx plugin and a running Docker engine, or BUILDKIT_HOST and buildctl")
    return found


def differences(case: Case, builder: Builder) -> object:
    """What the plan says otherwise than a build does; nothing if they agree."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        context = case.write(root)
        plan = _native.copy_plan(root / "Dockerfile", context)
        image, messages = builder.build(root)
        if image is None:
            return None if plan["errors"] or plan["unknowns"] else f"refused: {messages[-600:]}"
        if plan["errors"]:
            return plan["errors"]
        if plan["unknowns"]:
            return None
        model = apply(plan, context)
    found = []
    for path in sorted({*model, *image}):
        planned, built = model.get(path), image.get(path)
        if planned is None and built is not None and built.kind == "directory" and "WORKDIR" in case.dockerfile:
            continue  # WORKDIR makes directories; they are no copies
        if not same(planned, built):
            found.append((path, planned, built))
    return found or None


def same(planned: Node | None, built: Node | None) -> bool:
    if planned is None or built is None or planned.kind != built.kind:
        return False
    if planned.kind == "symlink":
        return (planned.link, planned.owner) == (built.link, built.owner)
    return planned == built


def assert_build_agrees(case: Case, builder: Builder) -> None:
    found = differences(case, builder)
    if found and "modes" in builder.features:
        builder.forget()
        found = differences(case, builder)
    assert not found, f"{case.dockerfile}\n{case.ignore!r}\n{case.context}\n{found}"


def test_builds_agree_with_their_plans(builder: Builder) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(cases(builder.features))
    def check(case: Case) -> None:
        assert_build_agrees(case, builder)

    check()


FILES = {
    "a": Node("directory", 0o755),
    "a/f": Node("file", 0o600, b"f"),
    "a/d": Node("directory", 0o755),
    "a/d/g": Node("file", 0o4755, b"g"),
    "a/link": Node("symlink", link="/a/d"),
    "link": Node("symlink", link="a"),
    ".env": Node("file", 0o644, b"env"),
    "x y": Node("file", 0o640, b"xy"),
    "v.txt": Node("file", 0o644, b"v"),
}

SHORT = [
    "COPY a /x",
    "COPY a/ /x/\nCOPY a/d /x",
    "COPY link /x\nCOPY link/f /y\nCOPY a/link /z/",
    "COPY * /x/",
    'COPY ["x y", "/p q/"]',
    "WORKDIR /w/v\nCOPY v.txt .env ./\nCOPY v.txt ..\nCOPY v.txt u",
    "ENV S=v D=/d\nCOPY ${S}.txt ${D:-/e}/${T:-w}\nCOPY 'v.txt' \"$D\"/q/",
    "COPY --chown=5:6 a /x\nCOPY a /x",
    "COPY no* a* /x/",
    "COPY .e?v [u-w]* /x/",
    "COPY v.txt /x/y/z\nCOPY a /x/y",
    "USER 7\nWORKDIR /w\nCOPY v.txt .",
    "COPY nothing /x",
    "COPY v.txt /x\nCOPY a /x",
    "COPY v.txt /a/f\nCOPY a/d /a/f",
    "ADD --chown=9 v.txt /x/",
    "COPY ../../v.txt /../x",
    "COPY a /x\nCOPY --chown=3 a/f /x/link",
]


@pytest.mark.parametrize("text", SHORT)
def test_a_build_agrees_with_its_plan(builder: Builder, text: str) -> None:
    assert_build_agrees(Case(FILES, "FROM scratch\n" + text + "\n"), builder)


@settings(max_examples=1)
@given(st.none())
def test_a_later_stage_copies_what_an_earlier_one_holds(builder: Builder, _: None) -> None:
    text = (
        "FROM scratch AS One\nCOPY --chown=4:5 a /x\nFROM scratch\nCOPY --from=one /x/d/g /y\nCOPY --from=0 x/* /z/\n"
    )
    assert_build_agrees(Case(FILES, text, "v.txt\n"), builder)
