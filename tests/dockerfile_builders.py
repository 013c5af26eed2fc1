"""Real builders to hold the copy plan against: BuildKit by itself, or the one inside a Docker engine."""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dockerfile_cases import BASE_IMAGE, Case, Node

ALL_FEATURES = frozenset({"chmod", "symbolic", "heredoc", "link", "exclude", "parents", "modes"})

#: Run inside an image: `list` writes what is there, `tar LISTED` packs what is new or different, by numbers.
COLLECT = r"""
import os, subprocess, sys
SKIPPED = {"/proc", "/sys", "/dev", "/collect", "/result.tar", "/etc/mtab"}
SKIPPED |= {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
def entries(top="/"):
    for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
        if entry.path not in SKIPPED:
            info = entry.stat(follow_symlinks=False)
            size = None if entry.is_dir(follow_symlinks=False) else (info.st_size, info.st_mtime_ns)
            yield entry.path, repr((entry.path, info.st_mode, info.st_uid, info.st_gid, size))
            if entry.is_dir(follow_symlinks=False):
                yield from entries(entry.path)
if sys.argv[1] == "list":
    open("/list", "w").write("\n".join(line for _, line in entries()))
else:
    known = set(open(sys.argv[2]).read().split("\n"))
    found = [path for path, line in entries() if line not in known]
    # The image's Python is a small one, without tarfile.
    command = ["tar", "--no-recursion", "--numeric-owner", "--format=pax", "--null", "-T", "-", "-cPf", "/result.tar"]
    subprocess.run(command, input="\0".join(found).encode("utf-8", "surrogateescape"), check=True)
"""


@dataclass(frozen=True)
class Builder:
    """A command that builds a directory into a tar of the image's file system."""

    command: tuple[str, ...]
    features: frozenset[str]

    def build(self, root: Path, target: str | None = None) -> tuple[dict[str, Node] | None, str]:
        """Builds `root/context` with `root/Dockerfile`; the image's files, or None and the messages."""
        output = root / "image.tar"
        if self.command[0].endswith("buildctl"):
            args = ["build", "--frontend=dockerfile.v0", "--progress=plain", f"--local=context={root / 'context'}"]
            args += [f"--local=dockerfile={root}", f"--output=type=tar,dest={output}"]
            args += [f"--opt=target={target}"] if target else []
        else:
            args = ["build", "--progress=plain", f"--file={root / 'Dockerfile'}", f"--output=type=tar,dest={output}"]
            args += [f"--target={target}"] if target else []
            args.append(str(root / "context"))
        done = subprocess.run([*self.command, *args], capture_output=True, text=True, timeout=600)
        if done.returncode:
            return None, done.stderr
        with tarfile.open(output) as tar:
            return read_image(tar), done.stderr

    def build_all(self, cases: Sequence[Case]) -> list[dict[str, Node] | None]:
        """Builds cases of one context together, which is many times as quick as one by one; None for what is refused.

        Of a case on the base image, only what differs from that image is returned.
        """
        if not cases:
            return []
        combined = replace(cases[0], dockerfile=combine([case.dockerfile for case in cases]))
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            combined.write(root)
            image, _ = self.build(root)
        if image is None:
            # One refusal ends the whole build: the halves find it.
            half = len(cases) // 2
            return [*self.build_all(cases[:half]), *self.build_all(cases[half:])] if half else [None]
        images: list[dict[str, Node]] = [{} for _ in cases]
        for path, node in image.items():
            number, _, below = path.strip("/").partition("/")
            if number.endswith(".tar"):
                with tarfile.open(fileobj=io.BytesIO(node.content)) as tar:
                    images[int(number.removesuffix(".tar"))] = read_image(tar)
            elif below:
                images[int(number)]["/" + below] = node
        return list(images)

    def forget(self) -> None:
        """Drops what BuildKit keeps between builds: it sometimes misses that a directory's mode has changed.

        Never for a Docker engine: 20.10 crashes if its cache is pruned while another build starts from an image.
        """
        if "modes" in self.features:
            subprocess.run([*self.command, "prune", "--all"], capture_output=True, timeout=120)


def combine(dockerfiles: Sequence[str]) -> str:
    """One Dockerfile whose image holds those of the others, numbered: `/0/…`, or `/0.tar` for one with a base image.

    Their stages are called `s0`, `s1` …
    """
    script = base64.b64encode(COLLECT.encode()).decode()
    text = (
        f"FROM {BASE_IMAGE} AS collect\nRUN echo {script} | base64 -d > /collect.py && python3 -IB /collect.py list\n"
    )
    results = ""
    if not any(BASE_IMAGE in dockerfile for dockerfile in dockerfiles):
        text = ""
    stages = text.count("FROM ")
    for number, dockerfile in enumerate(dockerfiles):
        first = stages
        own = re.sub(r"(?m)^FROM s(\d)", rf"FROM c{number}s\1", dockerfile)
        own = re.sub(r"(?m)^(FROM .*) AS s(\d)$", rf"\1 AS c{number}s\2", own)
        own = re.sub(r"--from=s(\d)", rf"--from=c{number}s\1", own)
        own = re.sub(r"--from=(\d+)", lambda match, first=first: f"--from={first + int(match[1])}", own)
        stages += dockerfile.count("FROM ")
        last = re.findall(r"(?m)^FROM .* AS (\w+)$", own)[-1]
        text += own
        if BASE_IMAGE in dockerfile:
            text += "USER 0\nRUN --mount=type=bind,from=collect,target=/collect "
            text += "python3 -IB /collect/collect.py tar /collect/list\n"
            results += f"COPY --from={last} /result.tar /{number}.tar\n"
        else:
            results += f"COPY --from={last} / /{number}/\n"
    return f"{text}FROM scratch\n{results}"


def read_image(tar: tarfile.TarFile) -> dict[str, Node]:
    """Files of an exported image by absolute path."""
    image: dict[str, Node] = {}
    for member in tar:
        path = "/" + member.name.strip("/").removeprefix("./")
        owner = f"{member.uid}:{member.gid}"
        if member.isdir():
            image[path] = Node("directory", member.mode, owner=owner)
        elif member.issym():
            image[path] = Node("symlink", link=member.linkname, owner=owner)
        elif member.islnk():
            original = image["/" + member.linkname.strip("/")]
            image[path] = Node("file", original.mode, original.content, owner=original.owner)
        else:
            file = tar.extractfile(member)
            image[path] = Node("file", member.mode, file.read() if file else b"", owner=owner)
    return image


def find_builder() -> Builder | None:
    """BuildKit's own daemon, if `BUILDKIT_HOST` and `buildctl` are there; else the Docker engine through buildx."""
    buildctl = shutil.which("buildctl")
    if buildctl and os.environ.get("BUILDKIT_HOST"):
        return Builder((buildctl,), ALL_FEATURES)
    plugins = [Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "cli-plugins"]
    plugins += [Path("/usr/libexec/docker/cli-plugins"), Path("/usr/lib/docker/cli-plugins")]
    buildx = shutil.which("docker-buildx") or next(
        (str(plugin / "docker-buildx") for plugin in plugins if (plugin / "docker-buildx").exists()), None
    )
    docker = shutil.which("docker")
    if not buildx or not docker:
        return None
    version = subprocess.run([docker, "version", "-f", "{{.Server.Version}}"], capture_output=True, text=True)
    if version.returncode:
        return None
    major = int(version.stdout.split(".")[0] or 0)
    # An engine's built-in frontend has heredocs and --link as of 23; --exclude, --parents and symbolic modes came far
    # later, as did a --chmod that the directories get which the copy makes (BuildKit 0.21).
    features = {"heredoc", "link", "chmod"} if major >= 29 else {"heredoc", "link"} if major >= 23 else set()
    return Builder((buildx,), frozenset(features))
