"""A Hugging Face hub on loopback: the part of its HTTP API that listing and downloading a dataset repo uses.

Serves from memory, on real sockets, so that a broken connection is one. Behaves as the hub does: pages with `Link`
headers, errors with `X-Error-Code`, `resolve` with `ETag` and `X-Repo-Commit`, large files through a redirect to
another origin.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

GATED = "gated"
PRIVATE = "private"


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Repo:
    access: str = "public"
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        sha = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha


class HubServer:
    """Use as a context manager; `endpoint` is what `HF_ENDPOINT` is set to."""

    def __init__(self, *, page_size: int = 1000, lfs_from: int = 1_000_000) -> None:
        self.repos: dict[str, Repo] = {}
        self.page_size = page_size
        self.lfs_from = lfs_from
        self.requests: list[str] = []
        """Method and path of each request, in order of arrival."""
        self.authorization: dict[str, str | None] = {}
        """The last `Authorization` header by path."""
        self.ranges: list[str] = []
        self.faults: dict[str, list[int]] = {}
        """By a request's path (`METHOD path`), what befalls its next requests: a number below 100 closes the connection
        after that many percent of the body, an HTTP status is answered instead."""
        self.corrupt: dict[str, bytes] = {}
        """What is served for a path instead of the listed content."""
        self.ignore_ranges = False
        self.page_delay = 0.0
        """Seconds that each page of a listing takes."""
        self.token: str | None = None
        """The token that opens gated and private repos."""
        self._lock = threading.Lock()
        self._trees: dict[str, list[str]] = {}

        owner = self

        class Handler(_Handler):
            hub = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        # The same port under another name is another origin.
        self.cdn = f"http://localhost:{self.port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repo(self, repo_id: str, files: Mapping[str, bytes] | None = None, **kwargs: str) -> Repo:
        repo = self.repos[repo_id] = Repo(**kwargs)
        if files is not None:
            repo.commit(files)
        return repo

    def downloads(self) -> Counter[str]:
        """How often each file of a repo was asked for, by its path in the repo."""
        found = (re.match(r"GET /datasets/[^/]+/[^/]+/resolve/[^/]+/(.+)", line) for line in self.requests)
        return Counter(unquote(match[1]) for match in found if match)

    def entries(self, tree: str, files: Mapping[str, bytes]) -> list[str]:
        """The names in a commit's tree, folders included, which is slow to work out for each page of a large one."""
        with self._lock:
            if tree not in self._trees:
                folders = {name.rsplit("/", depth)[0] for name in files for depth in range(1, name.count("/") + 1)}
                self._trees[tree] = sorted({*files, *folders})
            return self._trees[tree]

    def next_fault(self, request: str) -> int | None:
        with self._lock:
            planned = self.faults.get(request)
            return planned.pop(0) if planned else None

    def note(self, request: str, headers: Mapping[str, str]) -> None:
        with self._lock:
            self.requests.append(request)
            self.authorization[request] = headers.get("Authorization")
            if "Range" in headers:
                self.ranges.append(headers["Range"])


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        request = f"{self.command} {url.path}"
        self.hub.note(request, self.headers)
        self.fault = self.hub.next_fault(request)
        if self.fault is not None and self.fault >= 100:
            return self.answer(self.fault, b"planned")
        if match := re.fullmatch(r"/cdn/([0-9a-f]{64})", url.path):
            return self.cdn(match[1])
        match = re.fullmatch(
            r"/(?:api/)?datasets/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", url.path
        )
        if match is None:
            return self.answer(404, b"")
        repo_id, what, revision, path = match.groups()
        repo = self.hub.repos.get(repo_id)
        token = self.headers.get("Authorization")
        admitted = self.hub.token is not None and token == f"Bearer {self.hub.token}"
        if repo is None or (repo.access == PRIVATE and not admitted):
            # The hub does not tell a stranger whether a repo is missing or private.
            return self.error(404 if token else 401, "RepoNotFound", "Repository not found")
        if repo.access == GATED and what == "resolve" and not admitted:
            return self.error(403 if token else 401, "GatedRepo", "Access to this repo is restricted")
        revision = unquote(revision or "main")
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.commits[sha]
        if what in (None, "revision"):
            return self.json({"id": repo_id, "sha": sha, "siblings": [], "private": False, "tags": []})
        if what == "tree":
            return self.tree(url.path, files, parse_qs(url.query))
        return self.resolve(repo_id, sha, files, unquote(path or ""))

    def tree(self, path: str, files: dict[str, bytes], query: dict[str, list[str]]) -> None:
        names = self.hub.entries(path, files)
        time.sleep(self.hub.page_delay)
        start = int(query.get("cursor", ["0"])[0])
        page = []
        for name in names[start : start + self.hub.page_size]:
            if name not in files:
                page.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": name})
                continue
            content = files[name]
            entry: dict[str, object] = {"type": "file", "oid": git_blob_id(content), "size": len(content), "path": name}
            if len(content) >= self.hub.lfs_from:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            page.append(entry)
        headers = {}
        if start + self.hub.page_size < len(names):
            next_page = f"{self.hub.endpoint}{path}?recursive=True&expand=False&cursor={start + self.hub.page_size}"
            headers["Link"] = f'<{next_page}>; rel="next"'
        self.json(page, headers)

    def resolve(self, repo_id: str, sha: str, files: dict[str, bytes], path: str) -> None:
        if path not in files:
            return self.error(404, "EntryNotFound", "Entry not found")
        content = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{git_blob_id(content)}"'}
        if len(content) >= self.hub.lfs_from:
            digest = hashlib.sha256(content).hexdigest()
            headers |= {
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.cdn}/cdn/{digest}",
            }
            return self.answer(302, b"", headers)
        self.ranged(self.hub.corrupt.get(path, content), headers)

    def cdn(self, digest: str) -> None:
        for repo in self.hub.repos.values():
            for files in repo.commits.values():
                for content in files.values():
                    if len(content) >= self.hub.lfs_from and hashlib.sha256(content).hexdigest() == digest:
                        return self.ranged(content, {"ETag": f'"{digest}"'})
        return self.answer(404, b"")

    def ranged(self, content: bytes, headers: dict[str, str]) -> None:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match is None or self.hub.ignore_ranges:
            return self.answer(200, content, headers)
        start = int(match[1])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self.answer(206, content[start:], headers)

    def json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def error(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.answer(status, body, {"X-Error-Code": code, "X-Error-Message": quote(message, safe=" ")})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault < 100:
            self.wfile.write(body[: len(body) * self.fault // 100])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(body)
