"""Does a watchdog ever kill what it should not? Many short calls that leave a process in the background.

    python tests/execution_stress.py bash 2000 500 [--reuse]

Each call's watchdog must end with the call: one that stays kills, at the deadline, what the call left running. Where
the command ends as its deadline passes, the text must say what happened: timed out and all killed, or neither.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harbor_trl.execution import run_command

DEADLINE_SEC = 1
#: Seconds that the first process in the background sleeps; each one more, so that none is taken for another.
BACKGROUND_SEC = 97531


async def leave_running(environment: Any, calls: int, *, at_deadline: bool, at_once: int = 16) -> Counter[str]:
    """Makes `calls` calls, each of which leaves a process running; counts how that went.

    Args:
        environment: The sandbox.
        calls: How many.
        at_deadline: The commands end about when their deadline passes; else at once.
        at_once: Calls at the same time.
    """
    counts: Counter[str] = Counter()
    slots = asyncio.Semaphore(at_once)

    async def call(number: int) -> tuple[str, str, bool]:
        # Around the moment at which the watchdog wakes up: it starts a little before the command.
        wait = f"sleep {DEADLINE_SEC + random.uniform(-0.05, 0.02):.3f}" if at_deadline else ":"
        async with slots:
            command = f"sleep {BACKGROUND_SEC + number} & echo $!; {wait}"
            result = await run_command(environment, command, timeout_sec=DEADLINE_SEC)
        return result.text.partition("\n")[0], f"sleep{BACKGROUND_SEC + number}", result.timed_out

    done = 0
    while done < calls:
        batch = await asyncio.gather(*(call(done + n) for n in range(min(5 * at_once, calls - done))))
        done += len(batch)
        # A watchdog that was left would fire now.
        await asyncio.sleep(DEADLINE_SEC + 0.7)
        # By its line: within a batch, the number of a process that was killed may be another's by now.
        alive = await running(environment, {line: pid for pid, line, _ in batch if pid.isdigit()})
        for pid, line, timed_out in batch:
            if not pid.isdigit():
                counts[f"no process: {pid}"] += 1
            elif timed_out:
                counts["timed out, and yet running" if line in alive else "timed out"] += 1
            else:
                counts["left running" if line in alive else "killed unasked"] += 1
        await environment.exec(f"kill -KILL {' '.join(pid for pid, line, _ in batch if line in alive)}; :")
    return counts


async def running(environment: Any, processes: Mapping[str, str]) -> set[str]:
    """Which of these command lines (without their spaces) the process has that is given for each."""
    script = 'exec 2>/dev/null; look() { c=; read -r c <"/proc/$1/cmdline"; [ "$c" = $2 ] && echo $2; }; '
    script += "".join(f"look {process} {line}; " for line, process in processes.items())
    return set(((await environment.exec(script + ":")).stdout or "").split())


@contextlib.contextmanager
def reused_pids() -> Iterator[None]:
    """The numbers of processes that ended are given out again at once; in a PID namespace of its own, as root."""
    assert os.getpid() < 10, "not in a PID namespace of its own"
    ended = threading.Event()

    def turn_back() -> None:
        while not ended.is_set():
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(random.randrange(300, 600)))
            time.sleep(0.003)

    thread = threading.Thread(target=turn_back)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    from execution_support import live

    parser = argparse.ArgumentParser()
    parser.add_argument("sandbox")
    parser.add_argument("calls", type=int, help="that end at once")
    parser.add_argument("at_deadline", type=int, help="calls that end about when their deadline passes")
    parser.add_argument("--reuse", action="store_true")
    options = parser.parse_args()
    if os.getpid() >= 10:  # also so that no process of this machine is looked at, which is slow
        # A shell as PID 1 waits for orphans.
        own = [sys.executable, *sys.orig_argv[1:]]
        os.execvp("unshare", ["unshare", "-mpf", "--mount-proc", "bash", "-c", '"$@"; exit "$?"', "bash", *own])
    with tempfile.TemporaryDirectory() as scratch, live(options.sandbox, Path(scratch), 1024) as sandbox:
        bystanders = [subprocess.Popen(["sleep", "86399"], start_new_session=True) for _ in range(20)]
        with reused_pids() if options.reuse else contextlib.nullcontext():
            for at_deadline, calls in ((False, options.calls), (True, options.at_deadline)):
                coroutine = leave_running(sandbox.environment, calls, at_deadline=at_deadline)
                counts = sandbox.wait(coroutine, 7200)
                print(options.sandbox, "at the deadline" if at_deadline else "at once", dict(counts), flush=True)
        print("bystanders killed:", sum(it.poll() is not None for it in bystanders))
        for it in bystanders:
            it.kill()


if __name__ == "__main__":
    main()
