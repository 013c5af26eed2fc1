"""`check` gives Harbor's verdict, names what no build accepts, and raises no false alarm."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import harbor_trl
from harbor_trl import _native
from harbor_trl.checks import CODES, Finding, check
from harbor_trl.errors import SandboxUnavailableError, SuiteError
from tasks import make_task

TOML = """version = "1.0"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 512
"""
#: Errors about the build, of which Harbor's own loading knows nothing.
OF_THE_BUILD = {"copy-missing", "copy-ignored", "dockerfile-invalid", "dockerfile-unreadable", "missing-dockerfile"}


def write(task: Path, **options: Any) -> Path:
    make_task(task, **{"toml": TOML, **options})
    return task


def codes(path: Path, **options: Any) -> list[str]:
    return [finding.code for finding in check(path, **options)]


def the_only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def test_a_good_task_has_no_finding(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert check(tmp_path) == []
    assert harbor_trl.check is check


def change(file: str, text: str) -> Callable[[Path], object]:
    def apply(task: Path) -> None:
        path = task / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return apply


def remove(*names: str) -> Callable[[Path], object]:
    def apply(task: Path) -> None:
        for name in names:
            path = task / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    def apply(task: Path) -> None:
        for one in changes:
            one(task)

    return apply


def link(name: str, target: str) -> Callable[[Path], object]:
    return lambda task: (task / name).symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "code", "file", "line", "column"),
    [
        (change("task.toml", 'version = "1.0"\nx = = 1\n'), "toml-syntax", "task.toml", 2, 5),
        (change("task.toml", TOML.replace("cpus = 1", 'cpus = "many"')), "config-value", "task.toml", 13, 1),
        (change("task.toml", TOML + "\n[task]\nname = 'no-slash'\n"), "config-value", "task.toml", 17, 1),
        (change("task.toml", TOML + "network_mode = 'no'\n"), "config-value", "task.toml", 15, 1),
        (
            change("task.toml", TOML + "[[steps]]\nname = 'a'\n[[steps]]\nname = '..'\n"),
            "config-value",
            "task.toml",
            18,
            1,
        ),
        (remove("instruction.md"), "missing-instruction", "instruction.md", None, None),
        (
            both(remove("instruction.md"), link("instruction.md", "gone")),
            "missing-instruction",
            "instruction.md",
            None,
            None,
        ),
        (
            lambda task: (task / "instruction.md").write_bytes(b"ok\n\xff"),
            "instruction-unreadable",
            "instruction.md",
            2,
            1,
        ),
        (
            both(remove("instruction.md"), lambda task: os.mkfifo(task / "instruction.md")),
            "instruction-unreadable",
            "instruction.md",
            None,
            None,
        ),
        (remove("tests"), "missing-tests", "tests/test.sh", None, None),
        (change("task.toml", TOML + "os = 'windows'\n"), "missing-tests", "tests/test.bat", None, None),
        (remove("environment"), "missing-environment", "environment", None, None),
        (remove("environment/Dockerfile"), "missing-dockerfile", "environment", None, None),
        (link("tests/out", "/etc"), "path-forbidden", "tests/out", None, None),
        (link("solution", "../.."), "path-forbidden", "solution", None, None),
        (link("tests/loop", "."), "path-forbidden", "tests/loop", None, None),
        (change("tests/.harborignore", "*.sh\n"), "path-forbidden", "tests/test.sh", None, None),
        (
            change("environment/Dockerfile", "FROM debian\nCOPY  gone.txt /app/\n"),
            "copy-missing",
            "environment/Dockerfile",
            2,
            7,
        ),
        (
            both(
                change("environment/Dockerfile", "FROM debian\nCOPY data.txt /app/\n"),
                change("environment/data.txt", "1"),
                change("environment/.dockerignore", "*.txt\n"),
            ),
            "copy-ignored",
            "environment/Dockerfile",
            2,
            6,
        ),
        (
            change("environment/Dockerfile", "FROM debian\nCOPPY a b\n"),
            "dockerfile-invalid",
            "environment/Dockerfile",
            2,
            None,
        ),
        (change("environment/Dockerfile", "# nothing\n"), "dockerfile-invalid", "environment/Dockerfile", 1, None),
        (change("instruction.md", "<!-- a canary -->\n\n \n"), "instruction-empty", "instruction.md", None, None),
        (change("task.toml", ""), "no-timeout", "task.toml", None, None),
        (change("tests/test.sh", "#!/bin/bash\npytest /tests/test_x.py\n"), "no-reward", "tests/test.sh", None, None),
        (
            both(
                change("environment/inner/task.toml", ""),
                change("environment/inner/instruction.md", "Do it."),
            ),
            "nested-task",
            "environment/inner/task.toml",
            None,
            None,
        ),
        (
            both(
                change("environment/Dockerfile", "FROM debian\nCOPY fix.patch /tmp/\nRUN patch -p1 < /tmp/fix.patch\n"),
                change("environment/fix.patch", "--- a\n"),
            ),
            "answer-copied",
            "environment/Dockerfile",
            2,
            None,
        ),
        (
            both(
                change("environment/Dockerfile", "FROM debian\nCOPY . /app/\n"),
                change("environment/run/solve.sh", "echo 42\n"),
                change("solution/solve.sh", "echo 42\n"),
            ),
            "answer-copied",
            "environment/Dockerfile",
            2,
            None,
        ),
    ],
)
def test_each_kind_of_damage_is_found_where_it_is(
    tmp_path: Path, damage: Callable[[Path], object], code: str, file: str, line: int | None, column: int | None
) -> None:
    task = write(tmp_path / "suite" / "a")
    damage(task)
    finding = the_only(check(tmp_path / "suite"))
    place = (finding.code, finding.file, finding.line, finding.column)
    assert place == (code, str(task / file), line, column), finding
    assert finding.task_id == "a"
    assert (finding.severity, finding.remedy) == CODES[code]


@pytest.mark.parametrize(
    "change_it",
    [
        # A file that is removed after its use, or may have been.
        both(
            change("environment/Dockerfile", "FROM x\nCOPY a.patch /\nRUN patch < /a.patch && rm /a.patch\n"),
            change("environment/a.patch", "-"),
        ),
        both(
            change("environment/Dockerfile", "FROM x\nCOPY a.patch /\nRUN ./setup.sh /a.patch\n"),
            change("environment/a.patch", "-"),
        ),
        # Names that only sound like an answer.
        both(
            change("environment/Dockerfile", "FROM x\nCOPY . /app\n"),
            change("environment/answer_template.json", "{}"),
            change("environment/dispatch.py", ""),
            change("environment/node_modules/left-pad/patches/a.patch", "-"),
        ),
        # The repository's own tests.
        both(
            change("environment/Dockerfile", "FROM x\nCOPY . /app\n"),
            change("environment/tests/test_own.py", "def test(): ...\n"),
        ),
        # With an image at hand its Dockerfile is not built, and compose may build another.
        both(
            change("task.toml", TOML + "docker_image = 'x'\n"),
            change("environment/Dockerfile", "FROM x\nCOPY gone /\n"),
        ),
        both(
            change("environment/docker-compose.yaml", "services: {main: {build: {context: ..}}}\n"),
            change("environment/Dockerfile", "FROM x\nCOPY gone /\n"),
        ),
        both(change("task.toml", TOML + "docker_image = 'x'\n"), remove("environment")),
        # Verifiers whose reward comes from elsewhere.
        change("tests/test.sh", "/opt/grade.sh\n"),
        change("tests/test.sh", "python -m grader\n"),
        change("tests/test.sh", "cd /app && make grade\n"),
        both(
            change("tests/test.sh", "python /tests/t.py\n"), change("tests/t.py", "open('/logs/verifier/reward.json')")
        ),
        # Files that tests need.
        both(
            change("environment/x/task.toml", ""), change("tests/t/task.toml", ""), change("tests/t/instruction.md", "")
        ),
        change("tests/.harborignore", "*.log\n"),
        link("tests/again", "test.sh"),
        both(
            change("task.toml", TOML + "[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n"),
            remove("instruction.md"),
            change("steps/a/instruction.md", "A"),
            change("steps/b/instruction.md", "B"),
            change("steps/b/tests/test.sh", "echo 1 > /logs/verifier/reward.txt"),
        ),
        both(
            change("task.toml", TOML + "[verifier.environment]\ndocker_image = 'x'\n"),
            remove("tests"),
        ),
    ],
)
def test_what_only_looks_wrong_is_no_finding(tmp_path: Path, change_it: Callable[[Path], object]) -> None:
    change_it(write(tmp_path / "suite" / "a"))
    assert check(tmp_path / "suite") == []


def test_a_source_that_lies_in_the_tasks_root_is_named_as_such(tmp_path: Path) -> None:
    write(tmp_path, dockerfile="FROM x\nCOPY data/a.csv /a.csv\n", files={"data/a.csv": "1"})
    assert (
        the_only(check(tmp_path)).message
        == '"data/a.csv" is in the task\'s root, but the build context is environment/'
    )


def test_the_same_content_twice_is_found_whatever_the_tasks_are_called(tmp_path: Path) -> None:
    write(tmp_path / "a", toml=TOML + "[task]\nname = 'org/a'\n")
    write(tmp_path / "b", toml="[task]\nname = 'org/b'\n" + TOML)
    write(tmp_path / "c", files={"tests/data": "differs"})
    write(tmp_path / "d", toml=TOML.replace("512", "1024"))
    finding = the_only(check(tmp_path))
    assert (finding.task_id, finding.code, finding.message) == ("b", "duplicate", "the same content as a")


def test_files_of_one_name_and_size_are_compared_by_content(tmp_path: Path) -> None:
    for name, text in {"a": "one", "b": "two", "c": "one"}.items():
        write(tmp_path / name, files={"tests/data": text})
        (tmp_path / name / "tests" / "link").symlink_to("data")
    (tmp_path / "a" / "tests" / "link").unlink()
    (tmp_path / "a" / "tests" / "link").symlink_to("test.sh")
    assert check(tmp_path) == []
    shutil.copytree(tmp_path / "b", tmp_path / "d", symlinks=True)
    assert [(finding.task_id, finding.message) for finding in check(tmp_path)] == [("d", "the same content as b")]


def test_what_is_too_large_to_compare_is_no_duplicate_and_is_not_read(tmp_path: Path) -> None:
    for name in "ab":
        with (write(tmp_path / name) / "environment" / "weights.bin").open("wb") as file:
            file.truncate(1 << 40)
    assert check(tmp_path) == []


def special(path: Path, kind: str) -> None:
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
                bound.bind(path.name)
        case "directory":
            path.mkdir()
        case "link to a pipe":
            os.mkfifo(path.parent / "pipe")
            path.symlink_to("pipe")
        case target:
            path.symlink_to(target)


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "link to a pipe", "/dev/zero", "itself", "nowhere"])
@pytest.mark.parametrize(
    ("file", "unreadable", "missing"),
    [
        ("task.toml", "toml-unreadable", "toml-unreadable"),
        ("instruction.md", "instruction-unreadable", "missing-instruction"),
        ("tests/test.sh", "tests-unreadable", "missing-tests"),
        ("environment/Dockerfile", "dockerfile-unreadable", "missing-dockerfile"),
        ("steps/s/instruction.md", "instruction-unreadable", "missing-instruction"),
        ("steps/s/tests/test.sh", "tests-unreadable", None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*1 of 2 tasks cannot be used")
def test_what_is_no_file_is_an_error_and_never_waited_for(
    tmp_path: Path, file: str, unreadable: str, missing: str | None, kind: str
) -> None:
    write(tmp_path / "good")
    toml = TOML + ("[[steps]]\nname = 's'\n" if file.startswith("steps") else "")
    files = {"steps/s/instruction.md": "Do.", "steps/s/tests/test.sh": "echo 1 > /logs/verifier/reward.txt"}
    task = write(tmp_path / "odd", toml=toml, files=files)
    special(task / file, Path(file).name if kind == "itself" else kind)
    expected = missing if kind == "nowhere" else unreadable
    if kind in ("/dev/zero", "itself") and file.startswith(("tests", "steps")):
        expected = "path-forbidden"  # says Harbor
    if kind == "directory" and file == "task.toml":
        expected = None  # a directory may have any name
    errors = [finding for finding in check(tmp_path) if finding.severity == "error"]
    assert {finding.task_id for finding in errors} <= {"odd"}
    assert ([expected] if expected else []) == [finding.code for finding in errors][-1:]

    spec = harbor_trl.HarborSpec(tmp_path, on_invalid="skip")
    assert [task.task_id for task in spec.broken_tasks] == ["odd"] * (expected is not None)
    if expected:
        with pytest.raises(SuiteError, match="odd"):
            spec = harbor_trl.HarborSpec(tmp_path)
            _ = spec.train_dataset, spec.environment_factory


def test_harbor_is_not_asked_where_it_would_read_for_ever(tmp_path: Path) -> None:
    task = write(tmp_path / "a", toml=TOML + "os = 'none'\n")
    (task / "instruction.md").unlink()
    os.mkfifo(task / "instruction.md")
    assert codes(tmp_path) == ["instruction-unreadable"]
    (task / "instruction.md").unlink()
    with (task / "instruction.md").open("wb") as file:
        file.truncate(1 << 40)
    assert codes(tmp_path) == ["instruction-unreadable"]


def test_what_a_backend_lacks_is_found_only_for_that_backend(tmp_path: Path) -> None:
    write(tmp_path / "compose", files={"environment/docker-compose.yaml": "services: {db: {image: x}}\n"})
    write(tmp_path / "gpu", toml=TOML + "gpus = 1\n", instruction="Another.")
    write(tmp_path / "image", toml=TOML + "docker_image = 'x'\n")
    write(tmp_path / "net", toml=TOML.replace("[agent]", "[agent]\nnetwork_mode = 'allowlist'"))
    write(tmp_path / "run", dockerfile="FROM debian\n\nRUN make\n")
    write(tmp_path / "tpu", toml=TOML + "tpu = { type = 'v6e', topology = '2x4' }\n")
    write(tmp_path / "windows", toml=TOML + "os = 'Windows'\n", files={"tests/test.bat": "rem reward"})
    assert check(tmp_path) == []
    found = {(finding.task_id, finding.code, finding.line) for finding in check(tmp_path, backend="bubblewrap")}
    assert found == {
        ("compose", "needs-compose", None),
        ("gpu", "needs-gpu", 15),
        ("image", "needs-image", 15),
        ("net", "needs-network-policy", 10),
        ("run", "backend-refuses", 3),
        ("tpu", "needs-tpu", 15),
        ("windows", "needs-windows", 15),
    }
    if sys.platform != "win32":
        assert codes(tmp_path, backend="docker") == ["needs-windows"]
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        check(tmp_path, backend="dokcer")


def test_a_variable_that_this_machine_lacks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = 'env = { A = "${NOT_HERE}", B = "${NOT_HERE:-x}", C = "${HERE}", D = "a ${NOT_HERE}", E = "$NOT_HERE" }\n'
    monkeypatch.delenv("NOT_HERE", raising=False)
    monkeypatch.setenv("HERE", "")
    write(tmp_path / "environment", toml=TOML + env)
    write(tmp_path / "solution", toml=TOML + "[solution]\n" + env)
    write(tmp_path / "verifier", toml=TOML + '\n[verifier.env]\nKEY = "${NOT_HERE}"\n')
    findings = [finding for finding in check(tmp_path) if finding.code != "duplicate"]
    assert [(finding.task_id, finding.code, finding.line) for finding in findings] == [
        ("environment", "needs-variable", 15),
        ("verifier", "needs-variable", 17),
    ]
    assert "NOT_HERE, which is not set" in findings[0].message
    monkeypatch.setenv("NOT_HERE", "x")
    assert [finding for finding in check(tmp_path) if finding.code != "duplicate"] == []


def test_a_path_without_a_task_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no task"):
        check(tmp_path)
    with pytest.raises(SuiteError, match="there is no such directory"):
        check(tmp_path / "gone")


def test_what_is_no_task_but_looks_like_one_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "b").symlink_to("gone")
    finding = the_only(check(tmp_path))
    assert (finding.task_id, finding.severity, finding.code) == (None, "warning", "suite-tree")


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    page = (Path(__file__).parent.parent / "docs" / "check.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(code for row in rows for code in re.findall(r"`([a-z-]+)`", row)) == sorted(CODES)


# --- the same verdict as Harbor


def harbor_refuses(task: Path) -> bool:
    from harbor.models.task.task import Task

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Task(task)
        except (OSError, ValueError, RuntimeError, TypeError, OverflowError):
            return True
        return not Task.is_valid_dir(task)


def assert_same_verdict(task: Path) -> None:
    errors = [finding for finding in check(task) if finding.severity == "error" and finding.code not in OF_THE_BUILD]
    # Harbor looks at these only when it runs them.
    late = [error for error in errors if error.code == "tests-unreadable" or f"{task}/steps/" in error.file]
    late = [error for error in late if error.message == "not a regular file"]
    assert (len(errors) > len(late)) == harbor_refuses(task), errors


ANYTHING: list[Any] = [
    "", "x", "1", "True", 0, 1, -1, 2**40, 2**70, 1.0, 1.5, -0.0, float("nan"), float("inf"), True, False, [],
    ["a"], [1], [["a"]], [{}], [{"name": "a"}], {}, {"a": "b"}, {"a": 1}, {"a": {}},
]  # fmt: skip
HOSTS: list[Any] = [
    ["example.com"], ["*.example.com"], ["*.1.2.3.4"], ["1.2.3.4"], ["1.2.3.4/8"], ["10.0.0.0/8"], ["*"], ["a b"], [""],
    ["Example.COM."], ["http://x"], ["::1"], ["-a"], ["a_b"], ["x" * 64], ["*.com", "a"],
]  # fmt: skip
NETWORK: dict[str, list[Any]] = {
    "network_mode": ["public", "no-network", "allowlist", "Public", "none"],
    "allowed_hosts": HOSTS,
}
ENVIRONMENT: dict[str, list[Any]] = {
    **NETWORK,
    "build_timeout_sec": [600], "docker_image": ["ubuntu:24.04"], "os": ["linux", "Windows", "LINUX", "mac"],
    "cpus": [2, 0.5, 2.0], "memory_mb": [512, 512.0, "512"], "storage_mb": [1], "gpus": [1], "gpu_types": [["H100"]],
    "tpu": [{"type": "v6e", "topology": "2x4"}, {"type": "v6e", "topology": "2"}], "env": [{"A": "${A:-b}"}],
    "mcp_servers": [
        [{"name": "a", "url": "http://x"}], [{"name": "a"}], [{"name": "a", "transport": "stdio", "command": "x"}],
        [{"name": "a", "transport": "http", "url": "u", "args": ["b"]}],
        [{"name": "a", "url": "u", "headers": {"A": "b"}}],
        [{"name": "a", "url": "u", "headers": {"Authorization": "secret"}}], [{"url": "u"}],
    ],
    "skills_dir": ["/skills"], "workdir": ["/app"], "allow_internet": [True, False, "yes"],
    "healthcheck": [{"command": "true"}, {"command": "true", "retries": 2, "interval_sec": 1}, {"retries": 1}],
    "memory": ["2G", "512M", "2", "2 G", "x", "1.5g", 2], "storage": ["10G", "1_0K"], "unknown": [1],
}  # fmt: skip
USER: list[Any] = ["root", 1000]
AGENT: dict[str, list[Any]] = {**NETWORK, "timeout_sec": [60, 60.0, "60"], "user": USER}
VERIFIER: dict[str, list[Any]] = {
    **AGENT,
    "env": [{"A": "b"}],
    "environment_mode": ["shared", "separate", "other"],
    "collect": [[{"command": "x"}], [{"command": "x", "service": "db"}], [{"command": "x", "service": "-"}], [{}]],
}
ARTIFACTS: list[Any] = [
    ["/logs/a"], ["a/../b"], [{"source": "/a"}], [{"source": "a", "service": "db"}],
    [{"source": "/a", "service": "db"}],
    [{"source": "/a", "destination": "x"}], [{"source": "/a", "destination": "manifest.json"}],
    [{"source": "/a", "destination": "../x"}], [{"destination": "x"}], ["..", {"source": "/a", "exclude": ["*"]}],
]  # fmt: skip
ROOT: dict[str, list[Any]] = {
    "version": ["1.0", 1.0], "schema_version": ["1.4", 1], "source": ["x"], "artifacts": ARTIFACTS,
    "multi_step_reward_strategy": ["mean", "final", "last"], "solution": [{"env": {"A": "b"}}, {"env": {"A": 1}}],
    "metadata": [{"a": [1, {"b": 2}]}], "unknown": [1],
    "task": [
        {"name": "org/name"}, {"name": "org"}, {"name": "o/../n"}, {"name": "ü/n"}, {"name": "a/b\n"},
        {"name": "o/n/m"},
        {"name": "o/n", "version": ""}, {"name": "o/n", "authors": [{"name": "A", "email": "e"}]},
        {"name": "o/n", "authors": [{"email": "e"}]}, {"name": "o/n", "keywords": ["k"], "description": "d"},
        {"name": "o/.n"},
    ],
}  # fmt: skip
STEP: dict[str, list[Any]] = {
    "min_reward": [1, 0.5, {"a": 1}, {"a": "b"}],
    "healthcheck": ENVIRONMENT["healthcheck"],
    "artifacts": ARTIFACTS,
    "agent": [{"timeout_sec": 1}, {"timeout_sec": "x"}],
    "verifier": [{"environment_mode": "separate"}, {"timeout_sec": 1}],
}
STEP_NAMES = [
    "a",
    "b",
    "A",
    "é",
    "e\u0301",
    "con",
    "Con.txt",
    "a.",
    ".a",
    "..",
    "a/b",
    "",
    " ",
    "lpt1",
    "x" * 256,
    "com10",
]


def toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            return f'"{escaped}"'
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{toml(key)} = {toml(item)}' for key, item in value.items())}}}"
        case _:
            return repr(value)


def section(fields: dict[str, list[Any]], size: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields, mostly with values made for them."""

    def pair(key: str) -> st.SearchStrategy[tuple[str, Any]]:
        made = st.sampled_from(fields[key])
        return st.tuples(st.just(key), st.one_of(made, made, made, st.sampled_from(ANYTHING)))

    pairs = st.sampled_from(sorted(fields)).flatmap(pair)
    return st.lists(pairs, max_size=size).map(dict)


@st.composite
def documents(draw: st.DrawFn) -> str:
    root = draw(section(ROOT))
    tables: dict[str, Any] = {}
    for name, fields in (("environment", ENVIRONMENT), ("agent", AGENT), ("verifier", VERIFIER)):
        tables[name] = draw(section(fields))
    if draw(st.integers(0, 5)) == 0:
        tables["verifier"]["environment"] = draw(section(ENVIRONMENT))
    if draw(st.integers(0, 20)) == 0:
        tables[draw(st.sampled_from(["environment", "agent", "verifier"]))] = draw(st.sampled_from(ANYTHING))
    lines = [f"{key} = {toml(value)}" for key, value in root.items()]
    steps = draw(st.lists(st.sampled_from(STEP_NAMES[:3] if draw(st.booleans()) else STEP_NAMES), max_size=2))
    inline = draw(st.booleans())
    listed = [{"name": name, **draw(section(STEP, 1))} for name in steps]
    if inline:
        lines += [f"{key} = {toml(value)}" for key, value in tables.items()]
        lines += [f"steps = {toml(listed)}"] if listed or draw(st.integers(0, 5)) == 0 else []
        return "\n".join(lines)
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    for step in listed:
        lines += ["[[steps]]", *(f"{key} = {toml(value)}" for key, value in step.items())]
    return "\n".join(lines)


def in_temporary_task(run: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        task = write(
            Path(directory) / "task", files={"tests/data/x": "1", "solution/solve.sh": "true", "tests/test.bat": ""}
        )
        for name in ("a", "b"):
            for file in (f"steps/{name}/instruction.md", f"steps/{name}/tests/test.sh"):
                change(file, "x")(task)
        run(task)


@given(text=documents())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_harbor_takes_the_same_configurations(text: str) -> None:
    def run(task: Path) -> None:
        (task / "task.toml").write_text(text)
        assert_same_verdict(task)

    in_temporary_task(run)


@given(cut=st.integers(0, len(TOML)), length=st.integers(0, 3), text=st.text("=[]{}\"'\n#.1ax\\\r\ufeff", max_size=3))
def test_harbor_takes_the_same_texts(cut: int, length: int, text: str) -> None:
    def run(task: Path) -> None:
        (task / "task.toml").write_bytes((TOML[:cut] + text + TOML[cut + length :]).encode())
        assert_same_verdict(task)

    in_temporary_task(run)


PLACES = [
    "instruction.md", "environment", "environment/Dockerfile", "tests", "tests/test.sh", "tests/test.bat", "tests/data",
    "tests/data/x", "solution", "solution/solve.sh", "steps", "steps/a", "steps/a/instruction.md", "steps/a/tests",
    "steps/a/tests/test.sh", "steps/b", "tests/new", "tests/data/new", "steps/a/new", "solution/new",
    "tests/.harborignore", "tests/data/.harborignore", "steps/a/tests/.harborignore", "steps/.harborignore",
    "tests/Dockerfile",
]  # fmt: skip
TARGETS = [
    "/etc/hostname", "..", ".", "gone", "test.sh", "../tests", "../solution", "../environment", "data", "../../../task",
    "/tmp", "new", "../tests/test.sh",
]  # fmt: skip
IGNORED = ["*", "*.sh\n", "data/\n", "!test.sh\n", "/test.sh\n", "# none\n", "x", "**/x\n!x", "\\"]


def put(task: Path, place: str, how: str, detail: str) -> None:
    path = task / place
    if os.path.lexists(path):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if how == "remove":
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if how == "link":
            path.symlink_to(detail)
        elif how == "directory":
            path.mkdir()
        else:
            path.write_text(detail)
    except OSError:
        # An earlier change is in the way.
        return


STEPS = TOML + "[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n"
CONFIGS = [
    TOML, TOML, STEPS, STEPS, TOML + "os = 'windows'\n", TOML + "docker_image = 'x'\n",
    TOML.replace("[verifier]", "[verifier]\nenvironment_mode = 'separate'"),
    STEPS.replace("[verifier]", "[verifier]\nenvironment_mode = 'separate'"),
]  # fmt: skip


@given(
    config=st.sampled_from(CONFIGS),
    changes=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(PLACES), st.sampled_from(["remove", "directory"]), st.just("")),
            st.tuples(st.sampled_from(PLACES), st.just("link"), st.sampled_from(TARGETS)),
            st.tuples(st.sampled_from(PLACES), st.just("file"), st.sampled_from(IGNORED)),
        ),
        min_size=1,
        max_size=4,
    ),
)
@example(config=TOML, changes=[("tests/test.sh", "directory", "")])
@example(config=TOML, changes=[("tests/.harborignore", "directory", "")])
@example(config=STEPS, changes=[("steps/a/instruction.md", "directory", "")])
@example(config=STEPS, changes=[("steps/b", "link", "a")])
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_harbor_takes_the_same_trees(config: str, changes: list[tuple[str, str, str]]) -> None:
    def run(task: Path) -> None:
        (task / "task.toml").write_text(config)
        for place, how, detail in changes:
            put(task, place, how, detail)
        assert_same_verdict(task)

    in_temporary_task(run)


def test_the_configurations_of_ordinary_tasks_need_no_question_to_harbor(tmp_path: Path) -> None:
    ordinary = [
        "",
        TOML,
        STEPS,
        TOML + "gpus = 0\nallow_internet = true\n[verifier.env]\nA = '${A}'\n[solution.env]\n",
        "version = '1.0'\n[environment]\nmemory = '2G'\nstorage = '10G'\nmcp_servers = []\nenv = { A = 'b' }\n",
        "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org', '*.example.com']\nuser = 'agent'\n",
        "[task]\nname = 'org/name'\nauthors = [{ name = 'A' }]\nkeywords = ['k']\n[environment]\ndocker_image = 'x'\n",
        "artifacts = ['/logs/a']\n[environment.healthcheck]\ncommand = 'true'\nretries = 3\n",
    ]
    for number, text in enumerate(ordinary):
        task = write(tmp_path / str(number), toml=text)
        for name in "ab":
            change(f"steps/{name}/instruction.md", "x")(task)
    reports = _native.check_tasks(tmp_path, [str(number) for number in range(len(ordinary))])
    assert [ask for _, ask, _ in reports] == [False] * len(ordinary)
    assert not any(finding.severity == "error" for finding in check(tmp_path))


# --- hostile trees


def test_directories_that_link_to_each_other_are_refused_in_time(tmp_path: Path) -> None:
    task = write(tmp_path / "a")
    for level in range(40):
        directory = task / "tests" / f"d{level}"
        directory.mkdir()
        for name in "xy":
            (directory / name).symlink_to(f"../d{level + 1}")
    (task / "tests" / "d40").mkdir()
    finding = the_only([finding for finding in check(tmp_path) if finding.severity == "error"])
    assert finding.code == "path-forbidden"


def test_a_deep_tree_and_pipes_end(tmp_path: Path) -> None:
    task = write(tmp_path / "a", dockerfile="FROM x\nCOPY . /app\n")
    (task / "tests" / "/".join("d" * 12)).mkdir(parents=True)
    for name in ("environment/.dockerignore", "environment/pipe", "tests/pipe", "tests/pipe.py", "solution.md"):
        os.mkfifo(task / name)
    assert check(tmp_path) == []
    assert not harbor_refuses(task)


def test_a_tree_that_may_be_too_deep_for_harbor_is_left_to_it(tmp_path: Path) -> None:
    # Not asked here: its walk takes time with the fourth power of the depth, some ten seconds at this one.
    task = write(tmp_path / "a")
    (task / "tests" / "/".join("d" * 60)).mkdir(parents=True)
    assert _native.check_tasks(tmp_path, ["a"])[0][:2] == ([], True)


def test_a_tree_for_which_harbor_would_take_minutes_is_refused_without_it(tmp_path: Path) -> None:
    task = write(tmp_path / "a")
    (task / "tests" / "/".join("d" * 200)).mkdir(parents=True)
    finding = the_only(check(tmp_path))
    assert finding.code == "path-forbidden" and "80 deep" in finding.message


def test_a_task_that_no_dataset_can_hold_is_an_error(tmp_path: Path) -> None:
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff")))
    finding = the_only(check(tmp_path))
    assert (finding.task_id, finding.code) == (r"a\xff", "path-forbidden")


def test_a_dockerfile_full_of_mistakes_ends(tmp_path: Path) -> None:
    lines = 3_000
    task = write(tmp_path / "a", dockerfile="FROM x\n" + "COPY gone /\n" * lines, files={"environment/a.patch": "-"})
    assert codes(tmp_path) == ["copy-missing"] * lines
    (task / "environment" / "Dockerfile").write_text("FROM x\n" + "COPY a.patch /\n" * lines)
    assert set(codes(tmp_path)) == {"answer-copied"}


def test_a_wide_tree_needs_no_question_to_harbor(tmp_path: Path) -> None:
    # Harbor's own walk takes milliseconds for each file.
    task = write(tmp_path / "a")
    for number in range(3000):
        (task / "tests" / f"f{number}").touch()
    assert _native.check_tasks(tmp_path, ["a"])[0][:2] == ([], False)
    assert check(tmp_path) == []


def test_a_huge_task_toml_is_read(tmp_path: Path) -> None:
    big = "".join(f"key{number} = '{'x' * 90}'\n" for number in range(50_000))
    write(tmp_path / "a", toml=TOML + "[more]\n" + big)
    assert check(tmp_path) == []
    write(tmp_path / "a", toml=TOML + big + "cpus = []\n")
    assert codes(tmp_path) == ["toml-syntax"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_cannot_be_read_is_an_error_as_for_harbor(tmp_path: Path) -> None:
    for name, locked in {
        "a": "tests",
        "b": "tests/data",
        "c": "solution",
        "d": "instruction.md",
        "e": "task.toml",
        "f": "environment/Dockerfile",
    }.items():
        task = write(tmp_path / name, files={"tests/data/x": "", "solution/solve.sh": ""})
        (task / locked).chmod(0)
    # pytest's own directories are closed to others.
    for directory in (tmp_path, *tmp_path.parents[:3]):
        directory.chmod(0o755)
    code = (
        "import os, harbor.models.task.task, harbor_trl.verdict\n"
        "from harbor_trl import check\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"print(*sorted({{(f.task_id, f.code) for f in check({str(tmp_path)!r}) if f.severity == 'error'}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = [
        *(("a", "unreadable"), ("b", "unreadable"), ("c", "unreadable"), ("d", "instruction-unreadable")),
        *(("e", "toml-unreadable"), ("f", "dockerfile-unreadable")),
    ]
    assert done.stdout.strip() == " ".join(map(repr, expected)), done.stderr


@given(
    dockerfile=st.binary(max_size=200),
    ignore=st.binary(max_size=50),
    instruction=st.binary(max_size=30),
    test=st.binary(max_size=60),
)
def test_no_bytes_make_the_check_fail(dockerfile: bytes, ignore: bytes, instruction: bytes, test: bytes) -> None:
    def run(task: Path) -> None:
        (task / "environment" / "Dockerfile").write_bytes(b"FROM x\n" + dockerfile)
        (task / "environment" / ".dockerignore").write_bytes(ignore)
        (task / "instruction.md").write_bytes(instruction)
        (task / "tests" / "test.sh").write_bytes(test)
        assert all(finding.code in CODES and finding.message for finding in check(task))
        assert_same_verdict(task)

    in_temporary_task(run)
