"""What the bounded exec costs beside Harbor's bare exec, and what a flood costs the trainer's memory.

    python benches/bench_exec.py [bubblewrap | docker | docker-busybox ...]

Each pair of calls (`true`, bare and bounded) is made back to back in the same sandbox, so that load on the machine hits
both; the ratio is the median over the pairs. On Docker, a third call goes the way of Harbor's own backend. The resident
size is read from outside, from the parent of the process that runs the command.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

PAIRS = 60
GIB = 1 << 30


async def seconds(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


def cost(name: str, directory: Path) -> None:
    from execution_support import live
    from harbor_trl.execution import run_command

    with live(name, directory) as sandbox:
        environment = sandbox.environment

        async def pairs() -> list[tuple[float, float, float]]:
            measured = []
            for _ in range(PAIRS + 5):
                bare = await seconds(lambda: environment.exec("true", timeout_sec=60))
                bounded = await seconds(lambda: run_command(environment, "true"))
                with harbors_own(environment):
                    own = await seconds(lambda: environment.exec("true", timeout_sec=60))
                measured.append((bare, bounded, own))
            return measured[5:]

        measured = sandbox.wait(pairs(), timeout=600)
    bare = statistics.median(bare for bare, _, _ in measured)
    more = statistics.median(bounded - bare for bare, bounded, _ in measured)
    ratio = statistics.median(bounded / bare for bare, bounded, _ in measured)
    line = f"{name:15} bare {bare * 1e3:6.1f} ms, bounded {more * 1e3:+6.1f} ms, ratio {ratio:.2f}"
    if name.startswith("docker"):
        harbors = statistics.median(own for _, _, own in measured)
        ratio = statistics.median(bounded / own for _, bounded, own in measured)
        line += f"; Harbor's own Docker backend, bare: {harbors * 1e3:.1f} ms, ratio {ratio:.2f}"
    print(line, flush=True)


@contextlib.contextmanager
def harbors_own(environment: Any) -> Iterator[None]:
    """Our Docker backend speaks to a single container without Compose; Harbor's always goes through it."""
    if not hasattr(environment, "_is_plain"):
        yield
        return
    with mock.patch.object(type(environment), "_is_plain", False):
        yield


def resident_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def flood(name: str, directory: str, cap: int, started, finished) -> None:
    from execution_support import live
    from harbor_trl.execution import run_command

    with live(name, Path(directory)) as sandbox:
        # The first call loads what every call needs.
        sandbox.wait(run_command(sandbox.environment, "seq 1 100000"))
        started.wait()
        command = f"head -c {GIB} /dev/zero | tr '\\0' x"
        result = sandbox.wait(run_command(sandbox.environment, command, output_cap=cap, timeout_sec=300), timeout=400)
        finished.wait()
        print(f"{name:15} last line: {result.text.splitlines()[-1][:100]}", flush=True)
        started.wait()


def memory(name: str, directory: Path, cap: int) -> None:
    context = multiprocessing.get_context("spawn")
    started, finished = context.Barrier(2), context.Barrier(2)
    trainer = context.Process(target=flood, args=(name, str(directory), cap, started, finished))
    trainer.start()
    started.wait(120)
    assert trainer.pid
    before = peak = resident_mib(trainer.pid)
    begun = time.perf_counter()
    while not finished.n_waiting:
        peak = max(peak, resident_mib(trainer.pid))
        time.sleep(0.005)
    took = time.perf_counter() - begun
    finished.wait()
    started.wait()
    trainer.join()
    print(f"{name:15} 1 GiB, cap {cap >> 20} MiB: {took:.1f} s, resident size {peak - before:+.1f} MiB", flush=True)


def main() -> None:
    for name in sys.argv[1:] or ["bubblewrap", "docker", "docker-busybox"]:
        with tempfile.TemporaryDirectory() as directory:
            cost(name, Path(directory, "cost"))
            for cap in (64 << 20, 2 * GIB):
                memory(name, Path(directory, f"memory-{cap}"), cap)


if __name__ == "__main__":
    main()
