"""Generated Dockerfiles and build contexts, and a model of what applying a copy plan leaves behind."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

#: Made by tools/docker_test_images.sh.
BASE_IMAGE = "debian:bookworm-slim"
DIRECTORY_NAMES = ["a", "b", "dir", "d e"]
FILE_NAMES = ["f", "g.txt", "h.md", ".env", "s p", "x[1]", "é", "b", "a'q"]
FILE_MODES = [0o644, 0o600, 0o755, 0o444, 0o4755]
DIRECTORY_MODES = [0o755, 0o700, 0o775, 0o1777]


@dataclass
class Node:
    """A file, directory or link of a context or an image."""

    kind: str
    mode: int = 0o644
    content: bytes = b""
    link: str = ""
    owner: str = "0:0"


@dataclass
class Case:
    """One build: a context by path, a Dockerfile, perhaps a .dockerignore."""

    context: dict[str, Node]
    dockerfile: str
    ignore: str | None = None
    build_args: dict[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        """Lays the context out below `root`; the Dockerfile stands beside it, as `root/Dockerfile`."""
        context = root / "context"
        context.mkdir()
        for path, node in sorted(self.context.items()):
            target = context / path
            if node.kind == "directory":
                target.mkdir()
            elif node.kind == "symlink":
                target.symlink_to(node.link)
            else:
                target.write_bytes(node.content)
                target.chmod(node.mode)
        for path, node in sorted(self.context.items(), reverse=True):
            if node.kind == "directory":
                (context / path).chmod(node.mode)
        if self.ignore is not None:
            (context / ".dockerignore").write_bytes(self.ignore.encode())
        (root / "Dockerfile").write_bytes(self.dockerfile.encode())
        return context


@st.composite
def contexts(draw: st.DrawFn, directory_modes: list[int] = DIRECTORY_MODES) -> dict[str, Node]:
    """A few files, directories and links, two or three levels deep."""
    nodes: dict[str, Node] = {}
    directories = [""]
    for _ in range(draw(st.integers(0, 4))):
        path = os.path.join(draw(st.sampled_from(directories)), draw(st.sampled_from(DIRECTORY_NAMES)))
        if path not in nodes:
            nodes[path] = Node("directory", draw(st.sampled_from(directory_modes)))
            directories.append(path)
    for index in range(draw(st.integers(1, 6))):
        path = os.path.join(draw(st.sampled_from(directories)), draw(st.sampled_from(FILE_NAMES)))
        if path not in nodes:
            nodes[path] = Node("file", draw(st.sampled_from(FILE_MODES)), b"%d" % index)
    for index in range(draw(st.integers(0, 2))):
        path = os.path.join(draw(st.sampled_from(directories)), f"link{index}")
        targets = [*nodes, "nowhere", "..", "../..", "."]
        target = draw(st.sampled_from(targets))
        nodes[path] = Node("symlink", link=draw(st.sampled_from([target, "/" + target, "../" + target])))
    return nodes


def _mutate_source(draw: st.DrawFn, path: str) -> str:
    form = draw(st.integers(0, 11))
    parts = path.split("/")
    if form == 0:
        return "/" + path
    if form == 1:
        return "./" + path
    if form == 2:
        return "../" + path
    if form == 3:
        return path + "/"
    if form == 4:
        return path + "/."
    if form == 5:
        return draw(st.sampled_from(["*", "?", "*.txt", "[a-f]*", "[^a]*", "a/*", "*/*", "no*", "**", "**/f", "d*/*"]))
    if form == 6:
        at = draw(st.integers(0, len(parts) - 1))
        parts[at] = draw(st.sampled_from(["*", parts[at][0] + "*", "?" * len(parts[at])]))
        return "/".join(parts)
    if form == 7:
        return draw(st.sampled_from([".", "/", "nothing", "a/nothing", "..", "nothing/*", "[a", "a/no*", "[^", "a[]"]))
    return path


def _words(draw: st.DrawFn, words: list[str]) -> str:
    if draw(st.booleans()) or any(" " in word or word == "" for word in words):
        return json.dumps([word.replace("'", "\\'") for word in words], ensure_ascii=draw(st.booleans()))
    return " ".join(word.replace("'", "\\'") for word in words)


DESTINATIONS = [
    "/",
    "/x",
    "/x/",
    "/x/y",
    "/x/y/",
    ".",
    "",
    "w",
    "w/",
    "/x/.",
    "/x/../z",
    "../q",
    "/a",
    "/b/",
    "/x/f",
    "/./x//y",
]
PATTERNS = [
    "*",
    "a",
    "a/",
    "/a",
    "*.txt",
    "**/*.txt",
    "**/f",
    "!f",
    "!**/g.txt",
    "a/*",
    "!a/b",
    "a/**",
    "**",
    "# note",
    " # odd",
    "dir",
    "!dir/f",
    "b*",
    "!b",
    "?",
    "[a-c]",
    "[^a]",
    "",
    "  f  ",
    "!  a/f",
    "**/b/**",
    ".env",
    "a/../b",
    "./g.txt",
    "link*",
]
IGNORE_FILES = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4).map(lambda lines: "\n".join(lines) + "\n")


@st.composite
def copies(draw: st.DrawFn, paths: list[str], features: frozenset[str], destinations: list[str] = DESTINATIONS) -> str:
    """One COPY or ADD line."""
    flags: list[str] = []
    keyword = draw(st.sampled_from(["COPY"] * 4 + ["ADD"]))
    if draw(st.integers(0, 5)) == 0:
        flags.append("--chown=" + draw(st.sampled_from(["1000", "1:2", "7:0", "0"])))
    if "chmod" in features and draw(st.integers(0, 5)) == 0:
        modes = ["755", "0600", "4711", "777"]
        if "symbolic" in features:
            modes += ["+x", "u=rwX,go=rX", "g=u", "a-w", "o+w,g-r", "=r", "X", "9", "10000"]
        flags.append("--chmod=" + draw(st.sampled_from(modes)))
    if "link" in features and draw(st.integers(0, 9)) == 0:
        flags.append("--link")
    if "exclude" in features and draw(st.integers(0, 5)) == 0:
        for _ in range(draw(st.integers(1, 2))):
            flags.append("--exclude=" + draw(st.sampled_from(["*.txt", "**/f", "a", "!a/f", "b", "*", "**/*.md"])))
    sources = [_mutate_source(draw, draw(st.sampled_from(paths))) for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
    # Older builders take `/x/.` for a file's name.
    known = destinations if "modes" in features else [path for path in destinations if not path.endswith("/.")]
    destination = draw(st.sampled_from(known))
    if len(sources) > 1 and not destination.endswith(("/", ".")):
        destination += "/"
    if "parents" in features and keyword == "COPY" and draw(st.integers(0, 5)) == 0:
        flags.append("--parents")
        sources = [source if draw(st.booleans()) else source.replace("/", "/./", 1) for source in sources]
    return " ".join([keyword, *flags, _words(draw, [*sources, destination])])


HEREDOCS = [
    "COPY <<EOF {dest}\nhello $NAME \\$NAME '${{NAME}}' \\\\ x\\n\nEOF",
    "COPY <<'EOF' {dest}\nraw $NAME \\n\nEOF",
    "COPY --chmod=700 --chown=3 <<-one <<two {dest}/\n\t\ttabbed\n\tone\n  two\n\ttwo\ntwo",
    "ADD <<sub/name {dest}/\nin a directory\nsub/name",
    "COPY <<E {dest}\nE",
]


@st.composite
def cases(draw: st.DrawFn, features: frozenset[str] = frozenset()) -> Case:
    """A build FROM scratch without RUN, so that everything about it is known."""
    # Without a way to make the builder forget, directories of one name must have one mode.
    nodes = draw(contexts(DIRECTORY_MODES if "modes" in features else [0o755]))
    dockerfile = draw(scratch_dockerfiles(nodes, features))
    return Case(nodes, dockerfile, draw(st.one_of(st.none(), st.none(), IGNORE_FILES)))


@st.composite
def case_batches(draw: st.DrawFn, features: frozenset[str], size: int) -> list[Case]:
    """Builds of one context, half of them on the base image."""
    nodes = draw(contexts(DIRECTORY_MODES if "modes" in features else [0o755]))
    ignore = draw(st.one_of(st.none(), st.none(), IGNORE_FILES))
    kinds = [scratch_dockerfiles(nodes, features), base_dockerfiles(nodes, features)]
    return [Case(nodes, draw(kinds[number % 2]), ignore) for number in range(size)]


#: Places of the base image: directories, links to them, and what it lacks.
BASE_DESTINATIONS = [
    "/bin/sub/",
    "/bin/tool",
    "/lib/x/",
    "/sbin",
    "/var/run/x/y",
    "/etc",
    "/usr/local",
    "/usr/local/bin/f",
    "/tmp/",
    "/root/.config/",
    "/srv/",
    "/srv/x",
    "/opt/d",
    "/opt/d/",
    "/home/u/f",
    ".",
    "w/",
    "u",
]
#: What tasks do to files that were copied; `{p}`, `{q}` are paths, `{d}` a directory.
RUNS = [
    "rm -rf {p}",
    "rm -f {p}",
    "rm {p}",
    "rm -r {d}",
    "rm -f {d}/*",
    "cd {d} && rm -f f g.txt",
    "cd {d}; rm -rf ./*",
    "chmod 600 {p}",
    "chmod -R a+rX {d}",
    "chown 5:6 {p}",
    "chown -R 7 {d}",
    "mv {p} {q}",
    "mv {d} /moved",
    "mv {d}/* /tmp/",
    "cp -r {d} {q}",
    "cp {p} {q}",
    "install -m 700 {p} {q}",
    "ln -sf {p} {q}",
    "ln -sfn /srv {d}",
    "echo x > {p}",
    "echo x >> {p}",
    "cat {p} | tee {q}",
    "sed -i s/1/2/ {p}",
    "touch {p}",
    "truncate -s 0 {p}",
    "find {d} -name '*.txt' -delete",
    "find {d} -type f -exec chmod 600 {{}} +",
    "find / -xdev -name f -print0 | xargs -0 rm -f",
    "X={p}; rm -rf $X",
    'for i in {d}/*; do rm -rf "$i"; done',
    "sh -c 'rm -rf {p}'",
    "test -e {p} && rm -rf {p}",
    "python3 -c \"import os; os.remove('{p}')\"",
    "mkdir -p {d}/sub && rm -rf {d}/sub/../f",
    "tar -C {d} -cf /tmp/t.tar . && rm -rf {d}",
    "(cd {d} && chmod 700 .)",
    "cat {p}",
    "ls -la {d} > /list",
    "grep -r x {d}",
    "true",
]


@st.composite
def base_dockerfiles(draw: st.DrawFn, nodes: dict[str, Node], features: frozenset[str]) -> str:
    """Copies into the base image, with commands in between that may change what was copied."""
    lines = [f"FROM {BASE_IMAGE} AS s0"]
    paths = [*BASE_DESTINATIONS, "/srv/f", "/opt/d/f", "/tmp/g.txt", "/usr/bin/tool", "/bin/f", "/srv/x/f"]
    absolute = [path.rstrip("/") for path in paths if path.startswith("/") and path not in ("/etc", "/sbin")]
    directories = ["/srv", "/opt/d", "/srv/x", "/tmp", "/usr/local/bin", "/home/u", "/lib/x"]
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.integers(0, 9))
        if kind < 3:
            path, other = draw(st.sampled_from(absolute)), draw(st.sampled_from(absolute))
            run = draw(st.sampled_from(RUNS)).format(p=path, q=other, d=draw(st.sampled_from(directories)))
            lines.append(f"RUN {run} || true")
        elif kind == 3:
            lines.append("WORKDIR " + draw(st.sampled_from(["/srv", "/usr/local", "/lib/x", "w", "/new/dir"])))
        elif kind == 4:
            lines.append(draw(st.sampled_from(["USER 5", "ENV NAME=v", "ENV D=/srv/x"])))
        else:
            lines.append(draw(copies(list(nodes), features, BASE_DESTINATIONS)))
    return "\n".join(lines) + "\n"


@st.composite
def scratch_dockerfiles(draw: st.DrawFn, nodes: dict[str, Node], features: frozenset[str]) -> str:
    lines: list[str] = []
    stages = draw(st.sampled_from([1, 1, 2]))
    names: list[str] = []
    for stage in range(stages):
        base = draw(st.sampled_from(["scratch", *names]))
        lines.append(f"FROM {base} AS s{stage}")
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.integers(0, 11))
            if kind == 0:
                lines.append("WORKDIR " + draw(st.sampled_from(["/w", "w", "/x/y", "..", "$NAME", "/"])))
            elif kind == 1:
                lines.append(draw(st.sampled_from(["ENV NAME=v", "ENV NAME a b", "ARG NAME=q", "USER 5", "USER 5:6"])))
            elif kind == 2 and "heredoc" in features:
                lines.append(draw(st.sampled_from(HEREDOCS)).format(dest=draw(st.sampled_from(["/x", "/h/i", "w"]))))
            elif kind == 3 and names:
                source = draw(st.sampled_from(["/x", "/", "/a", "x/y", "/w", "/x/*", "*", "/nothing"]))
                origin = draw(st.sampled_from([*names, "0"]))
                lines.append(f"COPY --from={origin} {source} {draw(st.sampled_from(['/y/', '/y', '/', '/x/', 'w']))}")
            else:
                lines.append(draw(copies(list(nodes), features)))
        names.append(f"s{stage}")
    return "\n".join(lines) + "\n"


def apply(plan: dict[str, Any], context: Path) -> dict[str, Node]:
    """What stands in an empty image after the plan's entries, in order."""
    image: dict[str, Node] = {}
    for entry in plan["entries"]:
        path = entry["destination"]
        if entry["kind"] == "directory":
            if path in image and image[path].kind == "directory" and entry["if_missing"]:
                continue
            image[path] = Node("directory", entry["mode"], owner=entry["owner"])
        elif entry["kind"] == "symlink":
            image[path] = Node("symlink", link=entry["link"], owner=entry["owner"])
        else:
            content = entry["content"]
            if content is None:
                content = (context / entry["source"]).read_bytes()
            for below in [other for other in image if other.startswith(path + "/")]:
                del image[below]
            image[path] = Node("file", entry["mode"], content, owner=entry["owner"])
    return image


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)
