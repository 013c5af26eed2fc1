"""The scan finds what the pathlib reference finds, and the columns hold what tomllib reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harbor_trl import _native
from harbor_trl.errors import SuiteError
from harbor_trl.suite import RESERVED_COLUMNS, Suite, index_suite, open_suite
from reference import columns as reference_columns
from reference.scan import scan
from tasks import make_task as whole_task

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def make_task(path: Path, text: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "task.toml").write_text(text)
    return path


def make_suite(root: Path, metadata: list[str]) -> Path:
    for i, text in enumerate(metadata):
        make_task(root / f"t{i:03}", f"[metadata]\n{text}\n")
    return root


def found(root: Path, *, read: bool = True) -> tuple[list[str], set[tuple[str, str]]]:
    index = _native.SuiteIndex.scan(root, read=read)
    return index.paths(), {(path, kind) for path, kind, _ in index.problems()}


def agrees_with_reference(root: Path) -> list[str]:
    expected = scan(root)
    tasks = ["" if str(path) == "." else str(path) for path in expected.tasks]
    problems = {(str(path), kind) for path, kind in expected.problems}
    assert found(root) == (tasks, problems)
    assert found(root, read=False) == (tasks, problems)
    return tasks


def test_tasks_are_found_at_every_depth_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b", "a-b", "a/b", "a/b-c", "a/c/d/e/f/g", "é", "Z", "a!"):
        make_task(tmp_path / name)
    tasks = agrees_with_reference(tmp_path)
    assert tasks.index("a/b") < tasks.index("a!") < tasks.index("a-b")


def test_the_path_itself_may_be_the_task(tmp_path: Path) -> None:
    make_task(tmp_path)
    make_task(tmp_path / "below")
    assert agrees_with_reference(tmp_path) == [""]
    table = index_suite(tmp_path).table
    assert table.column("task_dir").to_pylist() == [str(tmp_path)]
    assert table.column("task_id").to_pylist() == ["."]


def test_a_task_is_a_leaf(tmp_path: Path) -> None:
    make_task(tmp_path / "outer")
    make_task(tmp_path / "outer" / "tests" / "fixture")
    assert agrees_with_reference(tmp_path) == ["outer"]


def test_hidden_directories_are_skipped_but_may_hold_the_suite(tmp_path: Path) -> None:
    suite = tmp_path / ".cache" / "suite"
    make_task(suite / "a")
    make_task(suite / ".git" / "b")
    assert agrees_with_reference(suite) == ["a"]


def test_links_are_followed_once_and_reported(tmp_path: Path) -> None:
    suite, elsewhere = tmp_path / "suite", tmp_path / "elsewhere"
    make_task(suite / "group" / "a")
    make_task(elsewhere / "b")
    make_task(elsewhere / "c")
    (suite / "group" / "up").symlink_to("..")
    (suite / "alias").symlink_to("group")
    (suite / "out1").symlink_to(elsewhere)
    (suite / "out2").symlink_to(elsewhere)
    (suite / "task").symlink_to(elsewhere / "b")
    (suite / "everything").symlink_to("/")
    (suite / "gone").symlink_to("nowhere")
    (suite / "itself").symlink_to("itself")
    assert agrees_with_reference(suite) == ["group/a", "out1/b", "out1/c"]
    assert found(suite)[1] == {
        ("group/up", "loop"),
        ("alias", "again"),
        ("out1", "outside"),
        ("out2", "again"),
        ("task", "again"),
        ("everything", "loop"),
        ("gone", "broken-link"),
        ("itself", "loop"),
    }
    texts = "\n".join(str(problem) for problem in Suite(suite).problems)
    assert f"{suite / 'out1'}: link to {elsewhere}, outside the suite: followed" in texts


def test_a_suite_behind_a_link_is_a_suite(tmp_path: Path) -> None:
    make_task(tmp_path / "real" / "a")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert agrees_with_reference(tmp_path / "link") == ["a"]


def test_a_task_toml_that_is_no_file_makes_a_broken_task_and_does_not_block(tmp_path: Path) -> None:
    make_task(tmp_path / "pipe" / "below")
    os.mkfifo(tmp_path / "pipe" / "task.toml")
    make_task(tmp_path / "directory" / "task.toml")
    for name, target in {"device": "/dev/zero", "gone": "nowhere", "itself": "task.toml", "through": "x/y"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
        (tmp_path / name / "task.toml").symlink_to(target)
    (tmp_path / "socket").mkdir()
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(tmp_path / "socket"):
        bound.bind("task.toml")
    broken = ["device", "gone", "itself", "pipe", "socket", "through"]
    assert agrees_with_reference(tmp_path) == sorted([*broken, "directory/task.toml"])
    for suite in (open_suite(tmp_path), open_suite(tmp_path, read=True)):
        tasks = suite.tasks()
        assert tasks.table.column("task_id").to_pylist() == ["directory/task.toml"]
        reasons = {task.task_id: task.reason for task in tasks.broken}
        assert sorted(reasons) == broken
        assert reasons["pipe"] == reasons["device"] == reasons["socket"] == "cannot be read: not a regular file"
        assert reasons["gone"] == reasons["through"] == "cannot be read: a link to something that does not exist"


NAMES = st.sampled_from(["a", "b", "a-b", "a.b", ".hidden", "Z", "é", "\U0001f600", "\udcff", "\ue000", "task.toml"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: Path(*parts))
NODES = st.one_of(
    st.tuples(st.just("dir"), PATHS, st.just(None)),
    st.tuples(st.just("task"), PATHS, st.just(None)),
    st.tuples(st.just("pipe"), PATHS, st.just(None)),
    st.tuples(st.just("link"), PATHS, st.one_of(PATHS, st.sampled_from([Path(".."), Path("."), Path("../..")]))),
    st.tuples(st.just("link-out"), PATHS, PATHS),
)


def plant(root: Path, kind: str, path: Path, target: Path | None, outside: Path) -> None:
    place = root / path
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        match kind:
            case "dir":
                place.mkdir()
            case "task":
                make_task(place)
            case "pipe":
                os.mkfifo(place)
            case "link":
                assert target is not None
                place.symlink_to(root / target if target.name in ("", "..") else target)
            case "link-out":
                assert target is not None
                place.symlink_to(outside / target)
    except OSError:
        pass


@settings(max_examples=max(100, settings.default.max_examples))
@given(inside=st.lists(NODES, max_size=25), outside=st.lists(NODES, max_size=8))
def test_scan_agrees_with_the_pathlib_reference(
    tmp_path_factory: pytest.TempPathFactory, inside: list[Any], outside: list[Any]
) -> None:
    base = tmp_path_factory.mktemp("scan")
    for name, nodes in (("suite", inside), ("outside", outside)):
        (base / name).mkdir()
        for kind, path, target in nodes:
            plant(base / name, kind, path, target, base / "outside")
    agrees_with_reference(base / "suite")


def test_names_that_are_not_utf8_are_broken_tasks_with_a_position(tmp_path: Path) -> None:
    make_task(tmp_path / "a")
    make_task(Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")))
    make_task(tmp_path / "c")
    tasks = index_suite(tmp_path)
    assert tasks.table.column("task_index").to_pylist() == [0, 2]
    (broken,) = tasks.broken
    assert broken.task_id == r"b\xff"
    assert "UTF-8" in broken.reason
    str(broken).encode()


def test_a_path_longer_than_the_system_allows_is_reported(tmp_path: Path) -> None:
    make_task(tmp_path / "a")
    home = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(20):
            os.mkdir("x" * 250)
            os.chdir("x" * 250)
        Path("task.toml").touch()
    finally:
        os.fchdir(home)
        os.close(home)
    tasks, problems = found(tmp_path)
    assert tasks == ["a"]
    assert [kind for _, kind in problems] == ["unreadable"]


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[None]:
    """Permissions bind, as they do not bind root."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def closed_suite(tmp_path: Path) -> Path:
    make_task(tmp_path / "good")
    make_task(tmp_path / "file")
    (tmp_path / "file" / "task.toml").chmod(0)
    make_task(tmp_path / "closed" / "inner")
    (tmp_path / "closed").chmod(0)
    make_task(tmp_path / "unsearchable" / "inner")
    (tmp_path / "unsearchable").chmod(0o744)
    return tmp_path


@as_root
def test_what_cannot_be_read_is_named_and_the_rest_is_found(closed_suite: Path, nobody: None) -> None:
    suite = open_suite(closed_suite, read=True)
    assert suite.task_ids == ["file", "good"]
    assert {problem.path.name for problem in suite.problems} >= {"closed"}
    assert any("unsearchable" in str(problem.path) for problem in suite.problems)
    (broken,) = suite.tasks().broken
    assert broken.task_id == "file"
    assert "denied" in broken.reason


def test_a_path_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(SuiteError, match=path.name):
            Suite(path)


def test_the_tasks_folder_is_the_suite_where_it_holds_tasks(tmp_path: Path) -> None:
    make_task(tmp_path / "another" / "x")
    make_task(tmp_path / "tasks" / "b")
    make_task(tmp_path / "tasks" / "a")
    assert open_suite(tmp_path).task_ids == ["a", "b"]
    make_task(tmp_path / "code" / "one")
    (tmp_path / "code" / "tasks").mkdir()
    assert open_suite(tmp_path / "code").task_ids == ["one"]


def test_positions_choose_what_is_read(tmp_path: Path) -> None:
    make_suite(tmp_path, ["a = 1", "b = 'x'", "c = ", "a = 2"])
    chosen = open_suite(tmp_path).tasks([3, 0, 3])
    assert chosen.broken == []
    assert chosen.table.column("task_index").to_pylist() == [3, 0, 3]
    assert chosen.table.column("a").to_pylist() == [2, 1, 2]
    assert "b" not in chosen.table.column_names
    with pytest.raises(IndexError):
        open_suite(tmp_path).tasks([4])


def test_known_task_ids_are_not_searched_for(tmp_path: Path) -> None:
    make_suite(tmp_path, ["a = 1", "a = 2"])
    suite = Suite(tmp_path, task_ids=["t001", "missing", "t000"])
    tasks = suite.tasks([0, 1])
    assert tasks.table.column("a").to_pylist() == [2]
    assert [broken.task_id for broken in tasks.broken] == ["missing"]


def test_metadata_becomes_typed_columns(tmp_path: Path) -> None:
    make_suite(
        tmp_path,
        [
            "int = 1\nfloat = 1.5\nboth = 1\ntext = 'é'\nflag = true\nlist = [1, 2]\ntable = {a = 1}",
            "int = -2\nfloat = inf\nboth = 0.5\ntext = ''\nlist = []\ntable = {b = 'x'}\nday = 2024-02-29",
            "at = 1979-05-27T07:32:00+01:30\nlocal = 1979-05-27T07:32:00.5\nclock = 07:32:00\nempty = []",
        ],
    )
    table = index_suite(tmp_path).table
    types = {field.name: str(field.type) for field in table.schema}
    assert types["int"] == "int64"
    assert types["both"] == types["float"] == "double"
    assert types["flag"] == "bool"
    assert types["at"] == "timestamp[us, tz=UTC]"
    assert types["table"] == "struct<a: int64, b: string>"
    rows = table.to_pylist()
    assert rows[0]["list"] == [1, 2]
    assert rows[0]["table"] == {"a": 1, "b": None}
    assert rows[1]["day"] == date(2024, 2, 29)
    assert rows[1]["both"] == 0.5
    assert rows[2]["at"] == datetime(1979, 5, 27, 6, 2, tzinfo=UTC)
    assert rows[2]["local"] == datetime(1979, 5, 27, 7, 32, 0, 500_000)
    assert rows[2]["clock"] == time(7, 32)
    assert rows[2]["int"] is None


def test_values_without_a_common_type_become_json_text(tmp_path: Path) -> None:
    make_suite(
        tmp_path,
        ["x = 1\ny = [1, 'a']", "x = 'one'\ny = []", "x = {a = 2024-01-01, b = 1e20}", "z = 99999999999999999999"],
    )
    tasks = index_suite(tmp_path)
    assert tasks.json_columns == ["x", "y", "z"]
    assert tasks.table.column("x").to_pylist() == ["1", '"one"', '{"a": "2024-01-01", "b": 1e+20}', None]
    assert tasks.table.column("y").to_pylist() == ['[1, "a"]', "[]", None, None]
    assert tasks.table.column("z").to_pylist()[3] == "99999999999999999999"


def test_aliases_are_always_there(tmp_path: Path) -> None:
    keys = "gold_answer = '42'\nreward_mode_initial = 'exact'\ndifficulty_level = 3\nkaggle_dataset_name = 'k'"
    make_suite(tmp_path / "with", [keys])
    make_suite(tmp_path / "without", [""])
    (row,) = index_suite(tmp_path / "with").table.to_pylist()
    assert (row["gold_answer"], row["reward_mode"], row["difficulty_level"], row["kaggle_dataset"]) == (
        "42",
        "exact",
        3,
        "k",
    )
    assert row["reward_mode_initial"] == "exact"
    (row,) = index_suite(tmp_path / "without").table.to_pylist()
    assert {row[name] for name in ("gold_answer", "reward_mode", "difficulty_level", "kaggle_dataset")} == {None}


def test_names_that_trl_needs_get_a_prefix(tmp_path: Path) -> None:
    names = sorted(RESERVED_COLUMNS | {"reward_mode", "kaggle_dataset"})
    text = "".join(f"{json.dumps(name)} = 1\n" for name in names) + "metadata_prompt = 2\nmetadata_ = 3"
    make_suite(tmp_path, [text])
    tasks = index_suite(tmp_path)
    columns = tasks.table.column_names
    assert len(set(columns)) == len(columns)
    assert tasks.renamed["prompt"] == "metadata_metadata_prompt"
    assert tasks.renamed["environments"] == "metadata_environments"
    assert tasks.renamed["reward_mode"] == "metadata_reward_mode"
    (row,) = tasks.table.to_pylist()
    assert row["metadata_prompt"] == 2
    assert {row[name] for name in tasks.renamed.values()} == {1}
    assert set(tasks.renamed) == set(names)


def test_a_key_for_each_task_does_not_make_a_column_for_each_task(tmp_path: Path) -> None:
    make_suite(tmp_path, [f"common = {i}\nkey{i} = {i}\n'q\"{i}' = 'v'" for i in range(600)])
    tasks = index_suite(tmp_path)
    assert len(tasks.table.column_names) < 530
    rows = tasks.table.to_pylist()
    assert [row["common"] for row in rows] == list(range(600))
    assert json.loads(rows[599]["metadata_other"]) == {"key599": 599, 'q"599': "v"}


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 5),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.datetimes(timezones=st.sampled_from([UTC])),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)
#: Columns whose values often agree.
CELLS = st.one_of(
    st.lists(st.one_of(st.just(reference_columns.MISSING), VALUES), min_size=1, max_size=4),
    st.one_of(
        st.integers(-5, 5) | st.floats(), st.lists(st.integers()), st.dictionaries(st.sampled_from("ab"), st.text("x"))
    )
    .flatmap(st.just)
    .flatmap(
        lambda value: st.lists(st.one_of(st.just(value), st.just(reference_columns.MISSING)), min_size=1, max_size=4)
    ),
)


def to_toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(to_toml, value))}]"
        case dict():
            return f"{{{', '.join(f'{key} = {to_toml(inner)}' for key, inner in value.items())}}}"
        case date() | time():
            return value.isoformat()
        case _:
            return repr(value)


@settings(max_examples=max(100, settings.default.max_examples))
@given(cells=CELLS)
def test_columns_agree_with_the_python_reference(tmp_path_factory: pytest.TempPathFactory, cells: list[Any]) -> None:
    texts = ["" if cell is reference_columns.MISSING else f"key = {to_toml(cell)}" for cell in cells]
    values = [tomllib.loads(text).get("key", reference_columns.MISSING) for text in texts]
    expected, is_json = reference_columns.column(values)
    tasks = index_suite(make_suite(tmp_path_factory.mktemp("columns"), texts))
    got = tasks.table.column("key").to_pylist() if "key" in tasks.table.column_names else [None] * len(cells)
    assert repr(got).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") == repr(expected)
    assert tasks.json_columns == (["key"] if is_json else [])


def test_values_that_python_supplies_make_the_same_columns(tmp_path: Path) -> None:
    text = (
        "[task]\nname = 'o/n'\n[metadata]\nint = 1\nbig = 99999999999999999999\nfloat = 1.5\ntext = 'é'\nflag = true\n"
        "list = [1]\n"
        "table = {a = {b = 1}}\nday = 2024-02-29\nat = 1979-05-27T07:32:00-01:30\nlocal = 1979-05-27 07:32:00\n"
        "clock = 07:32:00.25\n"
    )
    make_task(tmp_path / "a", text)
    index = _native.SuiteIndex.scan(tmp_path, read=True)
    read = pa.table(index.columns()[0])
    index.supply(0, "o/n", tomllib.loads(text)["metadata"])
    assert pa.table(index.columns()[0]).equals(read)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        index.supply(0, None, {"deep": deep})


def test_a_broken_task_is_named_with_tomllibs_position_and_reason(tmp_path: Path) -> None:
    make_suite(tmp_path, ["a = 1", "a = \n", "a = 'x"])
    (tmp_path / "t003").mkdir()
    (tmp_path / "t003" / "task.toml").write_bytes(b"# ok\nname = '\xff'\n")
    make_task(tmp_path / "t004", "metadata = 3\n")
    make_task(tmp_path / "t005", "\ufeff[metadata]\n")
    tasks = index_suite(tmp_path)
    assert tasks.table.column("task_index").to_pylist() == [0]
    by_id = {broken.task_id: broken for broken in tasks.broken}
    assert by_id["t001"][2:] == (2, 5, "Invalid value")
    assert str(by_id["t001"]) == f"{tmp_path}/t001/task.toml:2:5: Invalid value"
    assert by_id["t002"][2:] == (3, 1, 'Expected "\'" at the end of the file')
    assert by_id["t003"][2:4] == (2, 9)
    assert "0xff" in by_id["t003"].reason
    assert by_id["t004"].reason == "metadata is not a table"
    assert by_id["t005"][2:4] == (1, 1)


def test_where_tomllib_disagrees_its_values_win_and_a_warning_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_suite(tmp_path, ["a = ?"])
    monkeypatch.setattr("harbor_trl.suite.tomllib.loads", lambda text: {"metadata": {"a": 7}, "task": {"name": "n"}})
    with pytest.warns(UserWarning, match=r"t000/task\.toml.*bug of harbor-trl"):
        tasks = index_suite(tmp_path)
    assert tasks.broken == []
    assert tasks.table.column("a").to_pylist() == [7]
    assert tasks.table.column("task_name").to_pylist() == ["n"]


def test_what_only_tomllib_can_decide_it_decides(tmp_path: Path) -> None:
    ok = {
        "array": "a = " + "[" * 200 + "]" * 200,
        "parts": ".".join(["k"] * 300) + " = 1",
        "digits": "a = " + "9" * 700,
    }
    refused = {
        "array": "a = " + "[" * 5000 + "]" * 5000,
        "digits": "a = " + "9" * 5000,
        "parts": ".".join(["k"] * 60_000) + " = 1",
    }
    for name, text in ok.items():
        make_task(tmp_path / "ok" / name, text + "\n[metadata]\nx = 1")
    for name, text in refused.items():
        make_task(tmp_path / "refused" / name, text + "\n[metadata]\nx = 1")
    tasks = index_suite(tmp_path / "ok")
    assert tasks.broken == []
    assert tasks.table.column("x").to_pylist() == [1, 1, 1]
    reasons = {broken.task_id: broken.reason for broken in index_suite(tmp_path / "refused").broken}
    assert "nested too deeply" in reasons["array"]
    assert "4300 digits" in reasons["digits"]
    assert "minutes" in reasons["parts"]


def test_metadata_too_deep_for_a_column_is_a_broken_task(tmp_path: Path) -> None:
    make_suite(tmp_path, [".".join(["k"] * 110) + " = 1", ".".join(["k"] * 300) + " = 1"])
    assert [("deep" in broken.reason) for broken in index_suite(tmp_path).broken] == [True, True]


def test_ten_thousand_tasks(tmp_path: Path) -> None:
    for group in range(10):
        (tmp_path / f"g{group}").mkdir()
    for i in range(10_000):
        task = tmp_path / f"g{i % 10}" / f"t{i:05}"
        task.mkdir()
        (task / "task.toml").write_text(f"[metadata]\nnumber = {i}\n")
    table = index_suite(tmp_path).table
    assert table.column("task_index").to_pylist() == list(range(10_000))
    ids = table.column("task_id").to_pylist()
    assert ids == sorted(ids)
    assert table.column("number").to_pylist() == [int(task_id[4:]) for task_id in ids]


def test_ctrl_c_ends_reading(tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def handler(*_: object) -> None:
        raise Interrupt

    big = tmp_path / "big"
    big.write_text("[metadata]\nx = [" + "1, " * 2_000_000 + "]")
    for i in range(40):
        (tmp_path / f"t{i}").mkdir()
        (tmp_path / f"t{i}" / "task.toml").symlink_to(big)
    index = _native.SuiteIndex.scan(tmp_path, read=False)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupt):
            index.read()
    finally:
        signal.signal(signal.SIGALRM, previous)
    # Had it gone on to the end, the values would be there.
    assert "x" not in pa.table(index.columns()[0]).column_names


def test_an_error_of_the_watcher_ends_the_work(tmp_path: Path) -> None:
    text = "x = [" + "1, " * 2_000_000 + "]"
    make_suite(tmp_path, [text] * 4)

    def watch(found: int, read: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        _native.SuiteIndex.scan(tmp_path, read=True, watch=watch)


def test_a_scan_works_after_fork_and_in_threads(tmp_path: Path) -> None:
    make_suite(tmp_path, ["a = 1"] * 200)
    assert len(index_suite(tmp_path).table) == 200
    script = """
        import os, sys
        from harbor_trl.suite import index_suite
        count = len(index_suite(sys.argv[1]).table)
        child = os.fork()
        if child == 0:
            os._exit(len(index_suite(sys.argv[1]).table) != count)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path], check=True, timeout=60)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(len(index_suite(tmp_path).table))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [200] * 4


def test_the_index_imports_nothing_heavy() -> None:
    heavy = "harbor", "torch", "trl", "transformers", "datasets", "pyarrow"
    script = f"import sys, harbor_trl.suite; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_problems_do_not_hide_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from harbor_trl import HarborSpec

    whole_task(tmp_path / "a")
    (tmp_path / "gone").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING):
        assert len(HarborSpec(tmp_path).train_dataset) == 1
    assert "gone: link to nowhere, which does not exist" in caplog.text
