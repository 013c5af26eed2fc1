"""Copy plans against real builds: the same context built, exported and compared path by path.

With `BUILDKIT_HOST` set and `buildctl` on the PATH, a current BuildKit builds and everything is compared. Otherwise the
Docker engine's own frontend does, through the buildx plugin; what it is too old for is not generated: before version 23
heredocs and `--link`, before 29 `--chmod`; in any version `--exclude`, `--parents`, symbolic `--chmod`, destinations
like `/x/.`.

Builds FROM scratch must be as planned in every path, bytes, mode and owner. On the base image, with RUNs in between,
what the plan says no RUN has touched must be there as planned, and where there is no RUN, nothing else may be new.
"""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from dockerfile_builders import Builder, find_builder
from dockerfile_cases import BASE_IMAGE, Case, Node, apply, case_batches
from harbor_trl import _native

pytestmark = pytest.mark.docker

BATCH = 24
BATCHES = {"deep": 150, "ci": 12}.get(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else ""), 2)
#: Of each batch.
REFUSALS = 2
#: Links of the base image, to what copies may go through.
BASE_LINKS = {"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64", "/var/run": "/run"}


@pytest.fixture(scope="module")
def builder() -> Builder:
    found = find_builder()
    if found is None:
        pytest.skip("needs the docker-buildx plugin and a running Docker engine, or BUILDKIT_HOST and buildctl")
    return found


def plan_of(case: Case) -> tuple[dict[str, Any], dict[str, Node]]:
    """The plan, and what it leaves in an empty image."""
    with tempfile.TemporaryDirectory() as directory:
        context = case.write(Path(directory))
        # What the configuration of the base image says; on other images it is unknown.
        known = {"base_workdir": "/", "base_user": "root"} if BASE_IMAGE in case.dockerfile else {}
        plan: Any = _native.copy_plan(Path(directory) / "Dockerfile", context, **known)
        return plan, {} if plan["errors"] else apply(plan, context)


def has_empty_stage(case: Case) -> bool:
    """Engine 20.10 gives a COPY from an empty stage the files of whatever stage it copied before."""
    with tempfile.TemporaryDirectory() as directory:
        context = case.write(Path(directory))
        stages = re.findall(r"(?m)^FROM scratch AS (\w+)|^FROM s\d AS (\w+)", case.dockerfile)
        plans = [
            _native.copy_plan(Path(directory) / "Dockerfile", context, first or second) for first, second in stages
        ]
        return not all(plan["entries"] for plan in plans)


def differences(case: Case, builder: Builder) -> object:
    """What the plan says otherwise than a build does; nothing if they agree."""
    plan, model = plan_of(case)
    with tempfile.TemporaryDirectory() as directory:
        case.write(Path(directory))
        image, messages = builder.build(Path(directory))
    if image is None:
        # Of what stands in the base image the plan knows nothing, so nor of what cannot be put there.
        known = plan["errors"] or plan["unknowns"] or BASE_IMAGE in case.dockerfile
        return None if known else f"refused: {messages[-600:]}"
    if plan["errors"]:
        return plan["errors"]
    return None if BASE_IMAGE in case.dockerfile else differences_from_scratch(case, plan, model, image)


def differences_from_scratch(
    case: Case, plan: dict[str, Any], model: dict[str, Node], image: dict[str, Node]
) -> list[Any]:
    if plan["unknowns"]:
        return []
    found = []
    for path in sorted({*model, *image}):
        planned, built = model.get(path), image.get(path)
        if planned is None and built is not None and built.kind == "directory" and "WORKDIR" in case.dockerfile:
            continue  # WORKDIR makes directories; they are no copies
        if not same(planned, built):
            found.append((path, planned, built))
    return found


def differences_from_base(case: Case, plan: dict[str, Any], image: dict[str, Node]) -> list[Any]:
    """`image` holds what is not in the base image, or otherwise."""
    expected: dict[str, dict[str, Any] | None] = {}
    for entry in plan["entries"]:
        path = resolve(entry["destination"], image)
        if entry["if_directory"] and (image[path].kind == "directory" if path in image else path in BASE_DIRECTORIES):
            path = resolve(entry["if_directory"], image)
        if entry["touched"]:
            expected[path] = None
        elif entry["kind"] == "directory" and entry["if_missing"] and expected.get(path, {}) is not None:
            expected.setdefault(path, {**entry, "mode": None, "owner": None})
        else:
            expected[path] = entry
    found: list[Any] = []
    for path, entry in expected.items():
        built = image.get(path)
        if entry is None or (built is None and entry["kind"] == "directory" and path in BASE_DIRECTORIES):
            continue
        if built is None or built.kind != entry["kind"]:
            found.append((path, entry, built))
            continue
        content = b""
        if built.kind == "file":
            ignore_file = entry["source"] == ".dockerignore"
            content = (case.ignore or "").encode() if ignore_file else case.context[entry["source"]].content
        claims = [
            (entry["owner"], built.owner),
            (entry["mode"] if built.kind != "symlink" else None, built.mode),
            (entry["link"], built.link or None),
            (content, built.content),
        ]
        if any(claim is not None and claim != real for claim, real in claims):
            found.append((path, entry, built))
    if "RUN" not in case.dockerfile and not plan["unknowns"]:
        for path, built in image.items():
            made = built.kind == "directory" and "WORKDIR" in case.dockerfile
            # A directory of the base image is newer once something is put into it; its metadata stay.
            if path not in expected and not made and path not in BASE_DIRECTORIES:
                found.append((path, None, built))
    return found


def resolve(path: str, image: dict[str, Node]) -> str:
    """The path with links above its last part followed."""
    done = "/"
    parts = [part for part in path.split("/") if part]
    for _ in range(40):
        if not parts:
            break
        next_path = posixpath.join(done, parts.pop(0))
        link = image[next_path].link if next_path in image else BASE_LINKS.get(next_path)
        if link and parts:
            parts = [part for part in link.split("/") if part] + parts
            done = "/" if link.startswith("/") else done
        else:
            done = posixpath.normpath(next_path)
    return done


#: Of the base image, as far as these tests reach them.
BASE_DIRECTORIES = {
    *(
        "/",
        "/etc",
        "/home",
        "/opt",
        "/root",
        "/run",
        "/srv",
        "/tmp",
        "/usr",
        "/usr/bin",
        "/usr/lib",
        "/usr/local",
        "/var",
    ),
    *("/usr/local/bin", "/usr/sbin", "/bin", "/lib", "/sbin", "/var/run"),
}


def same(planned: Node | None, built: Node | None) -> bool:
    if planned is None or built is None or planned.kind != built.kind:
        return False
    if planned.kind == "symlink":
        return (planned.link, planned.owner) == (built.link, built.owner)
    return planned == built


def differences_in(image: dict[str, Node], case: Case, plan: dict[str, Any], model: dict[str, Node]) -> list[Any]:
    """For a case of a batch."""
    if BASE_IMAGE in case.dockerfile:
        return differences_from_base(case, plan, image)
    return differences_from_scratch(case, plan, model, image)


def told(case: Case, found: object) -> str:
    return f"{case.dockerfile}\n{case.ignore!r}\n{case.context}\n{found}"


def assert_build_agrees(case: Case, builder: Builder) -> None:
    found = differences(case, builder)
    if found and "modes" in builder.features:
        builder.forget()
        found = differences(case, builder)
    assert not found, told(case, found)


def test_builds_agree_with_their_plans(builder: Builder) -> None:
    built = Counter[str]()

    # A batch is not shrunk: each case of it is small, and told by itself.
    @settings(
        max_examples=BATCHES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
    )
    @given(case_batches(builder.features, BATCH))
    def check(cases: list[Case]) -> None:
        planned = [(case, *plan_of(case)) for case in cases]
        # A refusal ends the whole build, so what is to be refused is tried alone, and only the first few.
        for case in [case for case, plan, _ in planned if plan["errors"]][:REFUSALS]:
            assert_build_agrees(case, builder)
            built.update(refused=1)
        good = [(case, plan, model) for case, plan, model in planned if not plan["errors"]]
        if "modes" not in builder.features:
            good = [(case, plan, model) for case, plan, model in good if not has_empty_stage(case)]
        images = builder.build_all([case for case, _, _ in good])
        for (case, plan, model), image in zip(good, images, strict=True):
            if image is None:
                assert_build_agrees(case, builder)
                built.update(surprises=1)
                continue
            found = differences_in(image, case, plan, model)
            if found and "modes" in builder.features:
                builder.forget()
                image = builder.build_all([case])[0]
                found = image is None or differences_in(image, case, plan, model)
            assert not found, told(case, found)
            if BASE_IMAGE in case.dockerfile:
                touched = sum(entry["touched"] is not None for entry in plan["entries"])
                built.update(base=1, entries=len(plan["entries"]), touched=touched)
            else:
                built.update(scratch=1, entries=len(model))

    try:
        check()
    finally:
        print(dict(built))
    assert built["base"] + built["scratch"] >= BATCH * BATCHES / 4, built
    # What is in the base image already, and unknown to the plan, is rarely in the way.
    assert built["surprises"] <= built["base"] / 10 + 1, built


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
