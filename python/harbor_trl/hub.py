"""Suites from the Hugging Face hub: list a dataset repo's tasks, choose some, download only their files.

The downloaded tasks are plain files in plain directories, not links into a blob store: Harbor hashes a task's
directory and Docker builds from it, and neither follows a link that leaves it. They live below `cache_root()`:

    datasets--<owner>--<name>/refs/<revision>       the commit a branch or tag meant when it was last asked for
    datasets--<owner>--<name>/trees/<commit>.jsonl  every task of that commit with its files: a choice works offline
    datasets--<owner>--<name>/<commit>/…            the tasks; one that is there is complete

The hub's listing carries no file modes, so an executable bit set in git is lost, as with any download from the hub.
Harbor does not need it: it runs `chmod +x` on `tests/test.sh` and `solution/solve.sh` in the sandbox. A Dockerfile that
runs a script it COPYs needs `RUN chmod +x` or `RUN sh script`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import operator
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from urllib.parse import quote

from harbor_trl.errors import HubError, SuiteError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LISTING_VERSION = 1
_DOWNLOADS_AT_ONCE = 16
# Attempts in a row that bring no new byte, before a download is given up.
_ATTEMPTS = 5
_CHUNK = 1 << 20
# What a killed process left is removed after this many seconds, not at once: on file systems whose locks are only for
# show (some NFS, Lustre) another process may still be filling it.
_STALE_AFTER = 24 * 3600.0


class HubSuite(NamedTuple):
    """A suite on the hub, with the chosen tasks on this machine."""

    root: Path
    """Directory below which the chosen tasks lie: task `i` is `root / task_ids[i]`."""
    task_ids: list[str]
    """Every task of the suite, downloaded or not: its path below the suite's root (`.` where the root itself is the
    task), sorted by path component."""
    selected: list[int]
    """Positions in `task_ids` of the chosen tasks, in the order asked for."""


class _File(NamedTuple):
    """One file of a task."""

    path: str
    """Below the task's directory."""
    size: int
    digest: str
    """Of the content: SHA-256 for a large file, else git's blob id."""


class Listing(NamedTuple):
    """The tasks of one commit."""

    root: str
    """The suite's root below the repo's: empty, or `tasks`."""
    tasks: dict[str, str]
    """Task ids in suite order, each with its files as JSON: a suite has many more files than are ever chosen."""

    def files(self, task_id: str) -> list[_File]:
        return [_File(*file) for file in json.loads(self.tasks[task_id])]


def cache_root() -> Path:
    """Where downloaded suites live: `$HARBOR_TRL_CACHE`, else `harbor-trl` in Hugging Face's directory (`$HF_HOME`)."""
    own = os.environ.get("HARBOR_TRL_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    from huggingface_hub import constants

    return Path(constants.HF_HOME).absolute() / "harbor-trl"


def select_tasks(total: int, *, num_tasks: int | None, indices: Sequence[int] | None, suite: str) -> list[int]:
    """The positions that `num_tasks` (the first N) or `indices` (any order, repeats allowed) choose of `total` tasks.

    Without either: all of them. Raises `SuiteError` on both at once, on nothing chosen, and on a position that the
    suite does not have; `suite` names it in the message.
    """
    has = f"the suite {suite} has {total} task{'' if total == 1 else 's'}"
    if num_tasks is not None and indices is not None:
        raise SuiteError("num_tasks= and indices= exclude each other: give one of them")
    if num_tasks is not None:
        count = operator.index(num_tasks)
        if not 1 <= count <= total:
            raise SuiteError(f"num_tasks={count} is out of range: {has}; choose 1 to {total}")
        return list(range(count))
    if indices is not None:
        chosen = [operator.index(index) for index in indices]
        if not chosen:
            raise SuiteError(f"indices= is empty: {has}; choose at least one")
        bad = [index for index in chosen if not 0 <= index < total]
        if bad:
            named = ", ".join(map(str, bad[:20])) + (f" and {len(bad) - 20} more" if len(bad) > 20 else "")
            raise SuiteError(f"indices= is out of range ({named}): {has}, at positions 0 to {total - 1}")
        return chosen
    return list(range(total))


def download_suite(
    repo_id: str,
    *,
    revision: str | None = None,
    num_tasks: int | None = None,
    indices: Sequence[int] | None = None,
) -> HubSuite:
    """The suite in the Hugging Face dataset repo `repo_id`, with the chosen tasks on this machine.

    A task is a directory with a `task.toml`, at any depth; what lies below it belongs to it. Hidden directories are not
    searched. Where the repo has a `tasks` folder that holds tasks, that folder is the suite. Only the chosen tasks'
    files are downloaded, and only those that are not here yet: after an interruption, the tasks that are complete stay.
    Several processes may call this at once: one downloads, the others wait for it.

    Args:
        repo_id: `owner/name` of a dataset repo.
        revision: a branch, tag or commit; default: the default branch. A branch is looked up on each call; where the
            hub does not answer, the commit that it last meant is used, with a warning. A commit needs no network once
            its tasks are here. Processes that must agree on the tasks (several nodes) should be given a commit.
        num_tasks: take the first N tasks.
        indices: take the tasks at these positions, in this order; repeats allowed.

    Raises:
        HubError: the repo cannot be listed or downloaded (no network and no cached copy, gated, missing, disk full, …).
        SuiteError: the repo holds no task, or the selection does not fit it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    api = HfApi(library_name="harbor_trl")
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise HubError(
            f"{repo_id!r} is neither a local directory nor the id of a dataset repo (owner/name): {error}"
        ) from error

    home = cache_root() / f"datasets--{repo_id.replace('/', '--')}"
    with _explained(api, repo_id, revision, home):
        commit = _resolve(api, repo_id, revision, home)
        listing = _read_listing(home, commit)
        if listing is None:
            listing = _list_tasks(api, repo_id, commit)
            _write_atomically(_listing_path(home, commit), _dump_listing(listing))

    task_ids = list(listing.tasks)
    if not task_ids:
        raise SuiteError(
            f"the dataset repo {repo_id} (commit {commit[:12]}) holds no Harbor task: no directory has a task.toml"
        )
    selected = select_tasks(len(task_ids), num_tasks=num_tasks, indices=indices, suite=repo_id)

    root = home / commit / listing.root
    wanted = [task_ids[index] for index in dict.fromkeys(selected)]
    if _missing(root, wanted):
        with _explained(api, repo_id, revision, home), _locked(home / f"{commit}.lock"):
            _remove_stale(home)
            _download(api, repo_id, commit, listing, _missing(root, wanted), root, home)
    return HubSuite(root, task_ids, selected)


def _missing(root: Path, task_ids: Iterable[str]) -> list[str]:
    return [task_id for task_id in task_ids if not (root / task_id / "task.toml").is_file()]


# --- what a revision means, and what is in it


def _resolve(api: HfApi, repo_id: str, revision: str | None, home: Path) -> str:
    """The commit that `revision` means now, or, where the hub does not answer, the last time it did."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    ref = home / "refs" / quote(revision or "main", safe="")
    try:
        info = _with_retries(lambda: api.dataset_info(repo_id, revision=revision))
    except Exception as error:
        if not _is_unreachable(error) or not ref.is_file():
            raise
        known = ref.read_text().strip()
        logger.warning("The hub does not answer (%s); using the copy of %s at %s.", _brief(error), repo_id, known[:12])
        return known
    commit = info.sha
    if commit is None or not _COMMIT.fullmatch(commit):
        raise HubError(
            f"{api.endpoint} answered without a commit for the dataset repo {repo_id}: is it a Hugging Face hub?"
        )
    if not ref.is_file() or ref.read_text().strip() != commit:
        _write_atomically(ref, [commit])
    return commit


def _list_tasks(api: HfApi, repo_id: str, commit: str) -> Listing:
    from huggingface_hub import RepoFile

    files: list[tuple[str, int, str]] = []
    with _progress(f"Listing {repo_id}", None, unit=" files") as advance:
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=commit, repo_type="dataset"):
            if isinstance(entry, RepoFile):
                files.append((entry.path, entry.size, entry.lfs.sha256 if entry.lfs is not None else entry.blob_id))
                advance(1)
    return find_tasks(files, where=repo_id)


def find_tasks(files: Sequence[tuple[str, int, str]], *, where: str) -> Listing:
    """The tasks among a repo's files, given as (path, size, digest): the rules are those of a local suite's scan."""
    homes = set()
    for path, _, _ in files:
        parts = path.split("/")
        # Git itself allows none of these; what is written below the cache must stay there whoever serves the listing.
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise HubError(f"the listing of {where} holds a path that no repo can have: {path!r}")
        if parts[-1] == "task.toml" and not any(part.startswith(".") for part in parts[:-1]):
            homes.add("/".join(parts[:-1]))

    owner_of: dict[str, str | None] = {}
    found: dict[str, list[_File]] = {}
    for path, size, digest in files:
        directory = path.rpartition("/")[0]
        if directory not in owner_of:
            owner_of[directory] = next((above for above in _prefixes(directory) if above in homes), None)
        owner = owner_of[directory]
        if owner is not None:
            found.setdefault(owner, []).append(_File(path[len(owner) + 1 if owner else 0 :], size, digest))

    root = ""
    if any(home.startswith("tasks/") for home in found):
        root = "tasks"
        found = {home[len("tasks/") :]: task for home, task in found.items() if home.startswith("tasks/")}
    return Listing(
        root,
        {
            home or ".": json.dumps(found[home], ensure_ascii=False, separators=(",", ":"))
            for home in sorted(found, key=lambda home: home.split("/"))
        },
    )


def _prefixes(directory: str) -> Iterator[str]:
    """The repo's root, and each directory on the way down to `directory`."""
    yield ""
    at = directory.find("/")
    while at >= 0:
        yield directory[:at]
        at = directory.find("/", at + 1)
    yield directory


def _listing_path(home: Path, commit: str) -> Path:
    return home / "trees" / f"{commit}.jsonl"


def _dump_listing(listing: Listing) -> Iterator[str]:
    yield json.dumps({"version": _LISTING_VERSION, "root": listing.root, "tasks": len(listing.tasks)}) + "\n"
    for task_id, files in listing.tasks.items():
        # JSON has no tab outside of its strings, and none unescaped within.
        yield f"{json.dumps(task_id)}\t{files}\n"


def _read_listing(home: Path, commit: str) -> Listing | None:
    path = _listing_path(home, commit)
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            head = json.loads(next(lines))
            if head["version"] != _LISTING_VERSION:
                return None
            tasks = {}
            for line in lines:
                task_id, _, files = line.rstrip("\n").partition("\t")
                tasks[json.loads(task_id)] = files
            if len(tasks) != head["tasks"]:
                raise ValueError(f"{len(tasks)} tasks instead of {head['tasks']}")
            return Listing(head["root"], tasks)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        logger.warning("Ignoring the broken listing %s (%s); asking the hub again.", path, _brief(error))
        return None


# --- files


class _Place(NamedTuple):
    """Where a file is wanted."""

    task: int
    file: _File
    target: Path


def _download(
    api: HfApi, repo_id: str, commit: str, listing: Listing, task_ids: list[str], root: Path, home: Path
) -> None:
    """Brings `task_ids` into `root`, each with all its files or not at all."""
    if not task_ids:
        return
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(library_name="harbor_trl")
    home.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".incomplete-", dir=home))
    # Tasks of a suite share many files; each distinct content is fetched once.
    places: dict[tuple[str, int], list[_Place]] = {}
    left: list[int] = []
    try:
        for task, task_id in enumerate(task_ids):
            files = listing.files(task_id)
            left.append(len(files))
            for file in files:
                target = staging / str(task) / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                places.setdefault((file.digest, file.size), []).append(_Place(task, file, target))
        _check_space(home, sum(place.file.size for group in places.values() for place in group))

        lock = threading.Lock()
        stop = threading.Event()

        def arrived(size: int) -> None:
            with lock:
                advance(size)

        def fetch(group: list[_Place]) -> None:
            first = group[0]
            task_id = task_ids[first.task]
            in_repo = "/".join(filter(None, (listing.root, "" if task_id == "." else task_id, first.file.path)))
            url = hf_hub_url(repo_id, in_repo, repo_type="dataset", revision=commit, endpoint=api.endpoint)
            _fetch(url, headers, first, arrived, stop)
            for place in group[1:]:
                shutil.copyfile(first.target, place.target)
            complete = []
            with lock:
                for place in group:
                    left[place.task] -= 1
                    if left[place.task] == 0:
                        complete.append(place.task)
            for task in complete:
                _publish(staging / str(task), root / task_ids[task])

        with (
            _progress(f"Downloading {len(task_ids)} tasks of {repo_id}", sum(size for _, size in places)) as advance,
            ThreadPoolExecutor(_DOWNLOADS_AT_ONCE, thread_name_prefix="harbor-trl-hub") as pool,
        ):
            try:
                for _ in pool.map(fetch, places.values()):
                    pass
            except BaseException:
                # The pool waits for what is running: have it end soon.
                stop.set()
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(source: Path, target: Path) -> None:
    # A task's directory appears with its last file in it, so that its being there means that it is complete.
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError as error:
        # Another process was first.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (target / "task.toml").is_file():
            raise


def _fetch(
    url: str, headers: dict[str, str], place: _Place, arrived: Callable[[int], None], stop: threading.Event
) -> None:
    """Downloads one file, going on where a broken connection left it, and checks its content."""
    size, digest = place.file.size, place.file.digest
    with place.target.open("w+b") as out:
        if size:
            _fetch_into(url, headers, out, size, arrived, stop)
        if _digest(out, size, digest) != digest:
            raise HubError(f"{url} was downloaded in full, but is not what the repo's listing says; try again")


def _fetch_into(
    url: str, headers: dict[str, str], out: BinaryIO, size: int, arrived: Callable[[int], None], stop: threading.Event
) -> None:
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    attempts = _ATTEMPTS
    wait = 0.5
    while True:
        start = out.tell()
        ranged = {**headers, "Range": f"bytes={start}-"} if start else headers
        problem: Exception | None = None
        if stop.is_set():
            raise HubError(f"the download of {url} was given up, because another file failed")
        try:
            # Waits out 429 and 5xx by itself, as long as the server asks.
            with http_stream_backoff(
                "GET",
                url,
                # A compressed answer could not be continued by byte range.
                headers={**ranged, "Accept-Encoding": "identity"},
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),
            ) as response:
                hf_raise_for_status(response)
                if start and response.status_code != 206:
                    out.seek(0)
                    out.truncate()
                    arrived(-start)
                for chunk in response.iter_bytes():
                    out.write(chunk)
                    arrived(len(chunk))
                    if out.tell() > size:
                        raise HubError(f"{url} sent more than the {size} bytes that the repo's listing says")
                    if stop.is_set():
                        break
        except httpx2.TransportError as error:
            problem = error
        if out.tell() == size:
            return
        if out.tell() > start:
            attempts, wait = _ATTEMPTS, 0.5
        else:
            attempts -= 1
        if attempts == 0:
            raise problem or HubError(f"{url} ended after {out.tell()} of {size} bytes, {_ATTEMPTS} times in a row")
        logger.info("%s broke off at byte %d of %d; going on.", url, out.tell(), size)
        stop.wait(wait)
        wait = min(wait * 2, 8.0)


def _digest(out: BinaryIO, size: int, like: str) -> str:
    # Git names its own blobs by SHA-1 over a header and the content; large files go by SHA-256 over the content.
    state = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if len(like) == 40 else hashlib.sha256()
    out.seek(0)
    while chunk := out.read(_CHUNK):
        state.update(chunk)
    return state.hexdigest()


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed} bytes needed, {free} free", str(directory))


def _write_atomically(path: Path, parts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".incomplete-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.writelines(parts)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another process downloads into %s; waiting for it.", path.parent)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_stale(home: Path) -> None:
    for path in home.glob(".incomplete-*"):
        try:
            stale = time.time() - path.stat().st_mtime > _STALE_AFTER
        except FileNotFoundError:
            continue
        if stale:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _progress(what: str, total: int | None, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """A bar that shows itself after a second, and not at all with `HF_HUB_DISABLE_PROGRESS_BARS`."""
    from huggingface_hub.utils import tqdm

    # The class has no annotations.
    with tqdm(desc=what, total=total, unit=unit, unit_scale=True, delay=1.0) as bar:  # type: ignore[no-untyped-call]
        yield bar.update


# --- errors


def _with_retries[T](call: Callable[[], T]) -> T:
    # The hub client retries downloads and listings, but not this single question.
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    for wait in (0.5, 1.0, 2.0):
        try:
            return call()
        except httpx2.ConnectError:
            # Nobody there: a cached copy should not have to wait for that.
            raise
        except (httpx2.TransportError, HfHubHTTPError) as error:
            if not _is_unreachable(error):
                raise
            time.sleep(wait)
    return call()


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer of its own, as opposed to "no"."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, (httpx2.TransportError, OfflineModeIsEnabled))


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _explained(api: HfApi, repo_id: str, revision: str | None, home: Path) -> Iterator[None]:
    """Turns what goes wrong inside into a `HubError` that says what to do."""
    import httpx2
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo = f"the dataset repo {repo_id} on {api.endpoint}"
    at = f" at revision {revision!r}" if revision is not None else ""
    copy = f"no complete copy of the chosen tasks{at} is in {home}"
    log_in = "log in with `hf auth login` (or set HF_TOKEN)"
    try:
        yield
    except (HubError, SuiteError):
        raise
    except GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: accept its terms at {api.endpoint}/datasets/{repo_id} in a browser, "
            f"then {log_in} as that user"
        ) from error
    except DisabledRepoError as error:
        raise HubError(f"{repo} was disabled by the hub") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{repo} does not exist, or is private, and no local directory has this name: check the spelling; "
            f"if it is private, {log_in}"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {revision!r}: see {api.endpoint}/datasets/{repo_id}/refs") from error
    except RemoteEntryNotFoundError as error:
        raise HubError(f"{repo} lists a file that it does not serve; try again later: {_brief(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubError(f"{repo} refused access ({status}): {log_in} with a token that may read it") from error
        if status == 429:
            raise HubError(
                f"{api.endpoint} limits the rate of requests, and {copy}: {log_in}, or wait and run again"
            ) from error
        raise HubError(f"{repo} could not be read ({_brief(error)}), and {copy}; try again later") from error
    except OfflineModeIsEnabled as error:
        raise HubError(
            f"HF_HUB_OFFLINE is set, and {copy}: run once with the network (and HF_HUB_OFFLINE unset) to download them"
        ) from error
    except httpx2.TransportError as error:
        raise HubError(
            f"{api.endpoint} cannot be reached ({_brief(error)}), and {copy}: check the network, then run again "
            f"(nor is there a local directory {repo_id!r})"
        ) from error
    except ValueError as error:
        raise HubError(
            f"{api.endpoint} answered with something that is no hub's answer ({_brief(error)}): check HF_ENDPOINT"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(
                f"the disk is full while downloading {repo_id} into {home} ({error.strerror}): "
                "make room, or set HARBOR_TRL_CACHE (or HF_HOME) to a larger disk; what is complete is kept"
            ) from error
        raise HubError(f"{repo} could not be stored in {home}: {error}") from error
