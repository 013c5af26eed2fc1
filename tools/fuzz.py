#!/usr/bin/env python3
"""Fuzzes the Rust core: `tools/fuzz.py SECONDS [SUITE ...]`.

Builds `fuzz/` with coverage counters (libFuzzer; stable Rust and a C++ compiler do) and shares the seconds out evenly
among the targets. Starts from `fuzz/corpus`, which grows from run to run, from the cases that the tests hold, and from
the task.toml, Dockerfile and other files of the suites that are named. Ends with status 1 if an input panics or takes
more than ten seconds of CPU time, and names the file that holds it: `TARGET=toml fuzz/target/.../harbor-trl-fuzz FILE`
runs it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
#: Trees of files are made and removed many times a second.
MEMORY = Path("/dev/shm")
#: Longest input in bytes. What is meant to be slow because it is long stands in the tests, as hostile or huge inputs.
TARGETS = {
    "toml": 8192,
    "dockerfile": 8192,
    "dockerignore": 1024,
    "glob": 256,
    "word": 512,
    "output": 65536,
    "suite": 48,
    "check": 8192,
}
#: What `cargo fuzz` passes, less the sanitizers: the core has no `unsafe`.
COVERAGE = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg=fuzzing",
]


def build() -> Path:
    host = re.search(r"^host: (.*)$", subprocess.check_output(["rustc", "-vV"], text=True), re.MULTILINE)
    assert host is not None, "rustc -vV names its host"
    # With a target named, build scripts are built without the counters.
    command = ["cargo", "build", "--locked", "--release", "--quiet", "--target", host[1]]
    environment = {**os.environ, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(COVERAGE)}
    subprocess.run(command, cwd=FUZZ, env=environment, check=True)
    return FUZZ / "target" / host[1] / "release" / "harbor-trl-fuzz"


def seeds(suites: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Target and input: the cases that the tests hold, and the files of real tasks."""
    for name, target in {"path_match": "glob", "dockerfile_expand": "word"}.items():
        for case in json.loads((ROOT / "tests" / "data" / f"{name}.json").read_text()):
            yield target, "\0".join(part for part in case[1:3] if isinstance(part, str)).encode()
    for _, source, hidden in json.loads((ROOT / "tests" / "data" / "dockerignore.json").read_text()):
        yield "dockerignore", "\0".join([source, "\n".join(hidden or [])]).encode()
    for suite in [ROOT / "examples", *suites]:
        for file in suite.rglob("task.toml"):
            task = file.parent
            names = [
                "task.toml",
                "instruction.md",
                "environment/Dockerfile",
                "environment/.dockerignore",
                "tests/test.sh",
            ]
            files = [path.read_bytes() if (path := task / name).is_file() else b"" for name in names]
            yield "toml", files[0]
            yield "dockerfile", files[2] + (b"\0" + files[3] if files[3] else b"")
            yield "dockerignore", files[3] + b"\0environment/Dockerfile\nsrc/main.go\n"
            yield "check", b"\0".join([*files, b""])
            yield "output", b"\xff\x80\x07\x10\x40\x01" + files[4]
        for file in suite.rglob("*.toml"):
            yield "toml", file.read_bytes()


def main() -> int:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    if shutil.which("c++") is None:
        print("skipped: fuzzing needs a C++ compiler (Debian: apt install g++)")
        return 0
    binary = build()
    for target in TARGETS:
        (FUZZ / "corpus" / target).mkdir(parents=True, exist_ok=True)
    (FUZZ / "artifacts").mkdir(exist_ok=True)
    for target, content in seeds([Path(suite) for suite in sys.argv[2:]]):
        if len(content) <= TARGETS[target]:
            (FUZZ / "corpus" / target / hashlib.sha1(content).hexdigest()).write_bytes(content)

    return max([fuzz(binary, target, max(1, seconds // len(TARGETS))) for target in TARGETS])


def fuzz(binary: Path, target: str, seconds: int) -> int:
    artifacts = f"{FUZZ / 'artifacts'}/{target}-"
    options = [f"-max_len={TARGETS[target]}", f"-dict={FUZZ / 'dictionary.txt'}", f"-artifact_prefix={artifacts}"]
    options += ["-timeout=10", "-rss_limit_mb=4096", "-print_final_stats=1", str(FUZZ / "corpus" / target)]
    executed = 0
    end = time.monotonic() + seconds
    while True:
        left = max(1, int(end - time.monotonic()))
        done = run(binary, target, [f"-max_total_time={left}", *options])
        executed += int(found[1]) if (found := re.search(r"number_of_executed_units: *(\d+)", done.stderr)) else 0
        slow = re.search(rf"Test unit written to ({re.escape(artifacts)}timeout-\w+)", done.stderr)
        if slow is None or run(binary, target, [slow[1]], cpu_seconds=10).returncode:
            break
        # libFuzzer goes by the clock: on a busy machine an input may only have waited.
        Path(slow[1]).unlink()
        if time.monotonic() >= end:
            done.returncode = 0
            break
    covered = re.findall(r"\bcov: (\d+)", done.stderr)
    verdict = "" if done.returncode == 0 else "  FAILED"
    print(f"{target:13} {executed:>11,} inputs, {covered[-1] if covered else '?'} places covered{verdict}", flush=True)
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-40:]), flush=True)
    return int(done.returncode != 0)


def run(
    binary: Path, target: str, options: list[str], cpu_seconds: int | None = None
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))

    with tempfile.TemporaryDirectory(prefix="harbor-trl-fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        environment = {**os.environ, "TARGET": target, "TMPDIR": scratch}
        command = [str(binary), *options]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", preexec_fn=limit
        )


if __name__ == "__main__":
    sys.exit(main())
