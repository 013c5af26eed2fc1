"""Suites from the hub, against a real HTTP server on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harbor_trl.errors import HubError, SuiteError
from harbor_trl.hub import HubSuite, download_suite, find_tasks, select_tasks
from hub_server import GATED, PRIVATE, HubServer

REPO = "org/suite"


def task(name: str, **more: bytes) -> dict[str, bytes]:
    files = {"task.toml": f"# {name}".encode(), "instruction.md": f"Do {name}.".encode(), "tests/test.sh": b"exit 0\n"}
    return {f"{name}/{path}": content for path, content in {**files, **more}.items()}


def suite(*names: str) -> dict[str, bytes]:
    return {path: content for name in names for path, content in task(name).items()}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    monkeypatch.setenv("HARBOR_TRL_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    # What the environment variable HF_ENDPOINT sets when huggingface_hub is imported.
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return cache


def script(hub: HubServer, arguments: str = "", **env: str) -> list[str]:
    """A command that downloads in a process of its own and prints the suite."""
    code = (
        "from harbor_trl.hub import download_suite\n"
        "from harbor_trl.errors import HubError\n"
        f"try: print(*download_suite({REPO!r}{arguments}), sep='\\n')\n"
        "except HubError as error: raise SystemExit(f'HubError: {error}')\n"
    )
    return ["env", f"HF_ENDPOINT={hub.endpoint}", *(f"{k}={v}" for k, v in env.items()), sys.executable, "-c", code]


def in_process(hub: HubServer, arguments: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(script(hub, arguments, **env), capture_output=True, text=True, timeout=120)


# --- which tasks a repo has


def test_tasks_are_found_at_any_depth_and_sorted_by_path_component(hub: HubServer) -> None:
    hub.repo(REPO, {"README.md": b"hi", **suite("a-b", "a/b", "a/c/d", "Z", "é")})
    assert download_suite(REPO).task_ids == ["Z", "a/b", "a/c/d", "a-b", "é"]


def test_a_folder_named_tasks_is_the_suite_when_it_holds_tasks(hub: HubServer) -> None:
    hub.repo(REPO, suite("tasks/2", "tasks/10", "extras/x"))
    found = download_suite(REPO)
    assert found.task_ids == ["10", "2"]
    assert found.root.name == "tasks"
    assert (found.root / "10" / "task.toml").read_bytes() == b"# tasks/10"


def test_indices_mean_what_upstream_means_by_them(hub: HubServer) -> None:
    names = ["b", "a", "a.b", "a-b", "B", "ä", "1", "10", "2"]
    hub.repo(REPO, suite(*(f"tasks/{name}" for name in names)))
    found = download_suite(REPO)
    upstream = sorted(path for path in found.root.iterdir() if (path / "task.toml").exists())
    assert [found.root / task_id for task_id in found.task_ids] == upstream


def test_a_folder_named_tasks_without_tasks_is_not_the_suite(hub: HubServer) -> None:
    hub.repo(REPO, {"tasks/README.md": b"", **suite("suite/a")})
    assert download_suite(REPO).task_ids == ["suite/a"]


def test_a_folder_named_tasks_may_itself_be_a_task(hub: HubServer) -> None:
    hub.repo(REPO, suite("tasks", "other"))
    assert download_suite(REPO).task_ids == ["other", "tasks"]


def test_a_repo_may_itself_be_a_task(hub: HubServer) -> None:
    files = {"task.toml": b"", "instruction.md": b"", "environment/Dockerfile": b"FROM x", "tasks/a/task.toml": b""}
    hub.repo(REPO, files)
    found = download_suite(REPO)
    assert found.task_ids == ["."]
    # Harbor hashes the whole directory, so nothing of ours may lie in it.
    assert contents(found.root / ".") == files


def test_hidden_directories_are_not_searched_but_belong_to_a_task(hub: HubServer) -> None:
    hub.repo(
        REPO, {**suite(".git/a", "x/.hidden/b"), **task("c", **{"environment/.dockerignore": b"*", ".env": b"A=1"})}
    )
    found = download_suite(REPO)
    assert found.task_ids == ["c"]
    assert {"environment/.dockerignore", ".env"} <= contents(found.root / "c").keys()


def test_a_task_is_a_leaf(hub: HubServer) -> None:
    hub.repo(REPO, suite("a", "a/inner", "b"))
    found = download_suite(REPO)
    assert found.task_ids == ["a", "b"]
    assert "inner/task.toml" in contents(found.root / "a")


def test_a_repo_without_tasks_is_named(hub: HubServer) -> None:
    hub.repo(REPO, {"README.md": b"", "data/train.parquet": b"", "task.toml/readme": b""})
    with pytest.raises(SuiteError, match=r"org/suite .*holds no Harbor task"):
        download_suite(REPO)


NAMES = st.sampled_from(["a", "a-b", "a.b", "A", "tasks", ".git", "task.toml", "ü", "z"])


def local_scan(root: Path) -> list[str]:
    if (root / "tasks").is_dir() and not (root / "task.toml").is_file() and below(root / "tasks", top=True):
        root = root / "tasks"
    return [str(path.relative_to(root)) for path in sorted(below(root))]


def below(directory: Path, top: bool = False) -> list[Path]:
    if (directory / "task.toml").is_file() and not top:
        return [directory]
    return [
        found
        for child in directory.iterdir()
        if child.is_dir() and not child.name.startswith(".")
        for found in below(child)
    ]


@given(paths=st.lists(st.lists(NAMES, min_size=1, max_size=5).map("/".join), max_size=12, unique=True))
@settings(max_examples=60, deadline=None)
def test_the_tasks_of_a_listing_are_those_of_a_local_scan(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    paths = [path for path in paths if not any(other.startswith(path + "/") for other in paths)]
    root = tmp_path_factory.mktemp("tree")
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"")
    listing = find_tasks([(path, 0, "") for path in paths], where=REPO)
    assert list(listing.tasks) == local_scan(root)
    for task_id in listing.tasks:
        assert {file.path for file in listing.files(task_id)} == contents(root / listing.root / task_id).keys()


@pytest.mark.parametrize(
    "path", ["../a/task.toml", "a//task.toml", "/etc/task.toml", "a/./task.toml", "a/\0/task.toml"]
)
def test_a_listing_cannot_name_a_file_outside_of_the_suite(hub: HubServer, own_cache: Path, path: str) -> None:
    hub.repo(REPO, {**suite("a"), path: b"x"})
    with pytest.raises(HubError, match="no repo can have"):
        download_suite(REPO)
    assert contents(own_cache.parent).keys() <= {"cache/datasets--org--suite/refs/main"}


# --- which of them are chosen


def test_only_the_chosen_tasks_are_downloaded(hub: HubServer) -> None:
    hub.repo(REPO, suite("a", "b", "c", "d"))
    found = download_suite(REPO, indices=[2, 0, 2])
    assert (found.task_ids, found.selected) == (["a", "b", "c", "d"], [2, 0, 2])
    assert sorted(path.name for path in found.root.iterdir()) == ["a", "c"]
    assert not [path for path in hub.downloads() if path.startswith(("b/", "d/"))]

    assert download_suite(REPO, num_tasks=2).selected == [0, 1]
    assert sorted(path.name for path in found.root.iterdir()) == ["a", "b", "c"]
    assert max(hub.downloads()[f"{name}/task.toml"] for name in "abc") == 1


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"num_tasks": 4}, "num_tasks=4 is out of range: the suite org/suite has 3 tasks; choose 1 to 3"),
        ({"num_tasks": 0}, "num_tasks=0 .* has 3 tasks"),
        ({"num_tasks": -1}, "num_tasks=-1 .* has 3 tasks"),
        ({"indices": [0, 3, -1]}, r"out of range \(3, -1\): .* has 3 tasks, at positions 0 to 2"),
        ({"indices": []}, "indices= is empty: .* has 3 tasks"),
        ({"indices": [0], "num_tasks": 1}, "exclude each other"),
    ],
)
def test_a_selection_that_does_not_fit_says_how_many_tasks_there_are(
    hub: HubServer, choice: dict[str, object], message: str
) -> None:
    hub.repo(REPO, suite("a", "b", "c"))
    with pytest.raises(SuiteError, match=message):
        download_suite(REPO, **choice)  # type: ignore[arg-type]
    assert not hub.downloads()


def test_a_long_list_of_bad_indices_is_cut() -> None:
    with pytest.raises(SuiteError, match="119 and 980 more"):
        select_tasks(100, num_tasks=None, indices=range(100, 1100), suite="x")


# --- what arrives


ODD = [
    "[a]",
    "a*",
    "a?b",
    "sp ace",
    "100%",
    "#1",
    "ü",
    "a+b",
    "a&b=c",
    "'q\"",
    "{x}",
    "back\\slash",
    "!not",
    "~",
    "…" * 60,
]


def test_odd_names_arrive_as_they_are_and_select_nothing_else(hub: HubServer) -> None:
    hub.repo(REPO, suite(*ODD, "ab", "a", "axb"))
    found = download_suite(REPO, indices=[sorted([*ODD, "ab", "a", "axb"]).index(name) for name in ODD])
    assert sorted(path.name for path in found.root.iterdir()) == sorted(ODD)
    for name in ODD:
        assert (found.root / name / "task.toml").read_text() == f"# {name}"


def test_a_downloaded_task_holds_plain_files_and_nothing_else(hub: HubServer) -> None:
    files = task("a", **{"environment/empty": b"", "environment/data.bin": bytes(range(256)) * 8000})
    hub.repo(REPO, files)
    found = download_suite(REPO)
    assert {f"a/{path}": content for path, content in contents(found.root / "a").items()} == files
    for path in found.root.rglob("*"):
        assert not path.is_symlink()
        # A file shared with another task could be changed through it.
        assert path.is_dir() or path.stat().st_nlink == 1


def test_a_content_that_many_tasks_share_is_fetched_once(hub: HubServer) -> None:
    hub.repo(REPO, suite(*(f"t{number}" for number in range(30))))
    found = download_suite(REPO)
    assert sum(count for path, count in hub.downloads().items() if path.endswith("test.sh")) == 1
    assert all((found.root / task_id / "tests/test.sh").read_bytes() == b"exit 0\n" for task_id in found.task_ids)


def test_large_files_come_from_another_origin_which_never_sees_the_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    large = os.urandom(5_000_000)
    hub.repo(REPO, task("a", **{"environment/large.bin": large}), access=PRIVATE)
    assert (download_suite(REPO).root / "a/environment/large.bin").read_bytes() == large
    to_hub = {auth for path, auth in hub.authorization.items() if "/cdn/" not in path}
    to_cdn = [auth for path, auth in hub.authorization.items() if "/cdn/" in path]
    assert (to_hub, to_cdn) == ({"Bearer hf_secret"}, [None])


@pytest.mark.parametrize("moment", ["/tree/", "/resolve/"])
def test_listing_and_files_are_of_one_commit_even_if_the_repo_moves_on_in_between(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    repo = hub.repo(REPO, suite("a", "b"))
    note = hub.note

    def move_on(request: str, headers: Mapping[str, str]) -> None:
        if moment in request and len(repo.commits) == 1:
            repo.commit({path: content + b"!" for path, content in suite("a", "c").items()})
        note(request, headers)

    monkeypatch.setattr(hub, "note", move_on)
    found = download_suite(REPO)
    assert len(repo.commits) == 2
    assert contents(found.root) == suite("a", "b")


def test_each_revision_has_its_own_tasks(hub: HubServer) -> None:
    repo = hub.repo(REPO, suite("a"))
    old = repo.refs["main"]
    repo.commit(suite("a", "b"), ref="v2")
    repo.commit(suite("c"))
    assert download_suite(REPO).task_ids == ["c"]
    assert download_suite(REPO, revision="v2").task_ids == ["a", "b"]
    assert download_suite(REPO, revision=old).task_ids == ["a"]
    asked = {line.split("/resolve/")[1].split("/")[0] for line in hub.requests if "/resolve/" in line}
    assert asked == set(repo.commits)


def test_a_branch_name_with_a_slash_is_a_revision(hub: HubServer) -> None:
    hub.repo(REPO).commit(suite("a"), ref="refs/pr/1")
    assert download_suite(REPO, revision="refs/pr/1").task_ids == ["a"]


# --- what the network does


def get(repo_path: str, sha: str) -> str:
    return f"GET /datasets/{REPO}/resolve/{sha}/{repo_path}"


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_connection_that_breaks_mid_file_is_taken_up_again(hub: HubServer, ignore_ranges: bool) -> None:
    content = os.urandom(4_000_000)
    hub.lfs_from = 10_000_000
    hub.ignore_ranges = ignore_ranges
    sha = hub.repo(REPO, task("a", data=content)).refs["main"]
    hub.faults[get("a/data", sha)] = [40, 50]
    assert (download_suite(REPO).root / "a/data").read_bytes() == content
    assert hub.downloads()["a/data"] == 3
    assert len(hub.ranges) == 2 and "bytes=0-" not in hub.ranges


def test_a_connection_that_breaks_often_is_given_up_only_when_nothing_more_arrives(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harbor_trl.hub._ATTEMPTS", 3)
    content = os.urandom(900_000)
    sha = hub.repo(REPO, task("a", data=content)).refs["main"]
    hub.faults[get("a/data", sha)] = [20] * 4
    assert (download_suite(REPO).root / "a/data").read_bytes() == content

    sha = hub.repo(REPO, task("b", data=content[::-1])).refs["main"]
    hub.faults[get("b/data", sha)] = [20] + [0] * 9
    with pytest.raises(HubError, match=r"cannot be reached .*check the network"):
        download_suite(REPO)
    assert len(hub.faults[get("b/data", sha)]) == 10 - 1 - 3


def test_a_connection_that_breaks_mid_large_file_is_taken_up_again(hub: HubServer) -> None:
    import hashlib

    content = os.urandom(4_000_000)
    hub.repo(REPO, task("a", data=content))
    hub.faults[f"GET /cdn/{hashlib.sha256(content).hexdigest()}"] = [40]
    assert (download_suite(REPO).root / "a/data").read_bytes() == content


def test_a_connection_that_breaks_mid_listing_is_taken_up_again(hub: HubServer) -> None:
    hub.page_size = 10
    sha = hub.repo(REPO, suite(*"abcdefgh")).refs["main"]
    hub.faults[f"GET /api/datasets/{REPO}/tree/{sha}"] = [100 - 1, 30]
    assert download_suite(REPO).task_ids == list("abcdefgh")


def test_a_first_question_that_breaks_off_is_asked_again(hub: HubServer) -> None:
    hub.repo(REPO, suite("a"))
    hub.faults[f"GET /api/datasets/{REPO}"] = [30, 503]
    assert download_suite(REPO).task_ids == ["a"]


def test_a_busy_server_is_asked_again(hub: HubServer) -> None:
    sha = hub.repo(REPO, suite("a")).refs["main"]
    hub.faults[get("a/task.toml", sha)] = [503]
    assert download_suite(REPO).task_ids == ["a"]


def test_content_that_is_not_what_was_listed_is_refused_and_leaves_no_task(hub: HubServer) -> None:
    hub.repo(REPO, suite("a", "b"))
    for content, message in (
        (b"Do B.", "was downloaded in full, but is not what"),
        (b"Do b.!", "sent more than the 5"),
    ):
        hub.corrupt = {"b/instruction.md": content}
        with pytest.raises(HubError, match=rf"b/instruction\.md {message}"):
            download_suite(REPO)
    hub.corrupt = {}
    found = download_suite(REPO)
    assert (found.root / "b/instruction.md").read_bytes() == b"Do b."


def test_a_file_that_vanished_is_named(hub: HubServer) -> None:
    sha = hub.repo(REPO, suite("a")).refs["main"]
    hub.faults[get("a/task.toml", sha)] = [404]
    with pytest.raises(HubError, match=r"org/suite .*could not be read.*a/task\.toml"):
        download_suite(REPO)


def test_a_gated_repo_says_where_to_accept_and_how_to_log_in(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo(REPO, suite("a"), access=GATED)
    hub.token = "hf_secret"
    with pytest.raises(
        HubError, match=rf"is gated: accept its terms at {hub.endpoint}/datasets/org/suite .*hf auth login"
    ):
        download_suite(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download_suite(REPO).task_ids == ["a"]


@pytest.mark.parametrize("token", ["", "hf_other"])
def test_a_missing_or_private_repo_says_what_to_check(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.repo("org/private", suite("a"), access=PRIVATE)
    for repo_id in ("org/missing", "org/private"):
        with pytest.raises(
            HubError, match=rf"{repo_id} .* does not exist, or is private.*check the spelling.*hf auth login"
        ):
            download_suite(repo_id)


def test_a_missing_revision_is_named(hub: HubServer) -> None:
    hub.repo(REPO, suite("a"))
    for revision in ("v9", "0" * 40):
        with pytest.raises(HubError, match=f"org/suite .* has no revision '{revision}'"):
            download_suite(REPO, revision=revision)


@pytest.mark.parametrize("repo_id", ["a/b/c", "./missing", "no spaces/allowed", "", "org/../x"])
def test_what_is_no_repo_id_is_refused_without_a_request(hub: HubServer, repo_id: str) -> None:
    with pytest.raises(HubError, match="neither a local directory nor the id"):
        download_suite(repo_id)
    assert not hub.requests


def test_an_endpoint_that_is_no_hub_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo(REPO, suite("a"))
    monkeypatch.setattr("hub_server._Handler.json", lambda self, value, headers=None: self.answer(200, b"<html>"))
    with pytest.raises(HubError, match=r"no hub's answer .*check HF_ENDPOINT"):
        download_suite(REPO)


# --- the cache


def test_a_second_call_asks_only_what_the_branch_means(hub: HubServer) -> None:
    sha = hub.repo(REPO, suite("a", "b")).refs["main"]
    first = download_suite(REPO)
    hub.requests.clear()
    assert download_suite(REPO) == first
    assert hub.requests == [f"GET /api/datasets/{REPO}"]
    hub.requests.clear()
    assert download_suite(REPO, revision=sha) == first
    assert hub.requests == []


def test_a_broken_listing_in_the_cache_is_asked_for_again(hub: HubServer, own_cache: Path) -> None:
    hub.repo(REPO, suite("a", "b"))
    first = download_suite(REPO)
    (listing,) = own_cache.glob("*/trees/*")
    whole = listing.read_bytes()
    for broken in (b"", b"{}", b"\xff", whole[: whole.rindex(b"\n", 0, -1) + 1], b'{"version": 99}\n'):
        listing.write_bytes(broken)
        assert download_suite(REPO) == first
        assert listing.read_bytes() == whole


def test_offline_with_a_copy_works_for_each_selection_that_is_there(hub: HubServer) -> None:
    hub.repo(REPO, suite("a", "b", "c"))
    download_suite(REPO, indices=[0, 2])
    hub.stop()
    offline = in_process(hub, ", indices=[2, 0]", HF_HUB_OFFLINE="1")
    assert offline.stdout.splitlines()[1:] == ["['a', 'b', 'c']", "[2, 0]"], offline.stderr
    unreachable = in_process(hub, ", indices=[2]")
    assert unreachable.stdout.splitlines()[2:] == ["[2]"], unreachable.stderr
    assert "The hub does not answer" in unreachable.stderr

    missing = in_process(hub, ", num_tasks=2", HF_HUB_OFFLINE="1")
    assert missing.returncode == 1
    assert "HF_HUB_OFFLINE is set, and no complete copy of the chosen tasks is in " in missing.stderr


@pytest.mark.parametrize("offline", [True, False])
def test_no_network_and_no_copy_is_said_clearly(hub: HubServer, offline: bool) -> None:
    hub.stop()
    done = in_process(hub, ", revision='v1'", HF_HUB_OFFLINE=str(int(offline)))
    assert done.returncode == 1
    cause = "HF_HUB_OFFLINE is set" if offline else f"{hub.endpoint} cannot be reached"
    assert done.stderr.splitlines()[-1].startswith(f"HubError: {cause}")
    assert "no complete copy of the chosen tasks at revision 'v1' is in" in done.stderr


def test_several_processes_at_once_download_each_file_once_and_agree(hub: HubServer) -> None:
    hub.repo(REPO, suite(*(f"t{number}" for number in range(40))))
    processes = [
        subprocess.Popen(script(hub), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert len(outputs) == 1
    assert set(hub.downloads().values()) == {1}


def test_processes_whose_locks_do_not_hold_still_agree(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a file system that grants each lock to everybody.
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("harbor_trl.hub.fcntl.flock", lambda *args: None)
    hub.repo(REPO, suite(*(f"t{number}" for number in range(20))))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: download_suite(REPO), range(4)))
    assert found == [found[0]] * 4
    assert contents(found[0].root) == suite(*found[0].task_ids)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_download_leaves_whole_tasks_or_none(hub: HubServer, own_cache: Path) -> None:
    files = {path: content for number in range(300) for path, content in task(f"t{number:03}").items()}
    hub.repo(REPO, files)
    process = subprocess.Popen(script(hub), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(own_cache.glob("*/*/t*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    for path in own_cache.glob("datasets--*/[0-9a-f]*/t*"):
        assert contents(path).keys() == {"task.toml", "instruction.md", "tests/test.sh"}
    assert contents(download_suite(REPO).root) == files


def test_what_a_killed_process_left_is_removed_a_day_later(hub: HubServer, own_cache: Path) -> None:
    hub.repo(REPO, suite("a"))
    left = own_cache / "datasets--org--suite" / ".incomplete-old"
    young = left.with_name(".incomplete-young")
    for directory in (left, young):
        (directory / "0").mkdir(parents=True)
    os.utime(left, (time.time() - 90_000,) * 2)
    download_suite(REPO)
    assert (left.exists(), young.exists()) == (False, True)


def test_a_full_disk_says_so_and_leaves_no_part(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no small file system can be mounted here (needs root)")
    try:
        monkeypatch.setenv("HARBOR_TRL_CACHE", str(disk))
        hub.repo(REPO, task("a", data=os.urandom(3_000_000)))
        message = "the disk is full while downloading org/suite into .*set HARBOR_TRL_CACHE"
        with pytest.raises(HubError, match=message):
            download_suite(REPO)
        # Other processes fill disks too: without the check up front, the write itself fails.
        monkeypatch.setattr("harbor_trl.hub._check_space", lambda *args: None)
        with pytest.raises(HubError, match=message):
            download_suite(REPO)
        assert not list(disk.glob("*/.incomplete-*")) and not list(disk.glob("*/*/a"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, own_cache: Path) -> None:
    own_cache.write_text("a file, not a directory")
    hub.repo(REPO, suite("a"))
    with pytest.raises(HubError, match=r"org/suite .* could not be stored in .*datasets--org--suite"):
        download_suite(REPO)


def test_a_hundred_thousand_tasks_are_listed_page_by_page_and_once(hub: HubServer) -> None:
    sha = hub.repo(REPO, {f"tasks/t{number:06}/task.toml": b"" for number in range(100_000)}).refs["main"]
    found = download_suite(REPO, indices=[99_999, 5])
    assert len(found.task_ids) == 100_000
    assert found.task_ids[99_999] == "t099999"
    pages = [line for line in hub.requests if "/tree/" in line]
    assert len(pages) == 201
    hub.requests.clear()
    assert isinstance(download_suite(REPO, revision=sha, indices=[5]), HubSuite)
    assert hub.requests == []


def test_a_long_listing_shows_its_progress(hub: HubServer) -> None:
    hub.repo(REPO, suite(*"abcdefgh"))
    hub.page_size, hub.page_delay = 10, 0.5
    shown = in_process(hub)
    assert "Listing org/suite: " in shown.stderr and " files" in shown.stderr
    commit = hub.repos[REPO].commit(suite("z"))
    hub.page_size = 1
    silent = in_process(hub, f", revision={commit!r}", HF_HUB_DISABLE_PROGRESS_BARS="1")
    assert (silent.returncode, silent.stderr) == (0, "")


def test_importing_the_module_imports_no_hub_client() -> None:
    code = "import sys, harbor_trl.hub; print([m for m in sys.modules if m in ('huggingface_hub', 'httpx2', 'tqdm')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
