"""Real builders to hold the copy plan against: BuildKit by itself, or the one inside a Docker engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from dockerfile_cases import Node

ALL_FEATURES = frozenset({"chmod", "symbolic", "heredoc", "link", "exclude", "parents", "modes"})


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
        done = subprocess.run([*self.command, *args], capture_output=True, text=True, timeout=120)
        if done.returncode:
            return None, done.stderr
        return read_image(output), done.stderr

    def forget(self) -> None:
        """Drops what BuildKit keeps between builds: it sometimes misses that a directory's mode has changed.

        Never for a Docker engine: 20.10 crashes if its cache is pruned while another build starts from an image.
        """
        if "modes" in self.features:
            subprocess.run([*self.command, "prune", "--all"], capture_output=True, timeout=120)


def read_image(archive: Path) -> dict[str, Node]:
    """Files of an exported image by absolute path."""
    image: dict[str, Node] = {}
    with tarfile.open(archive) as tar:
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
    plugins = [Path.home() / ".docker/cli-plugins", Path("/usr/libexec/docker/cli-plugins")]
    plugins.append(Path("/usr/lib/docker/cli-plugins"))
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
    # An engine's built-in frontend has heredocs, --link and today's --chmod (set-id bits, parents) as of 23; --exclude,
    # --parents and symbolic modes came far later.
    features = {"heredoc", "link", "chmod"} if major >= 23 else set()
    return Builder((buildx,), frozenset(features))
