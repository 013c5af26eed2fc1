"""The engine: one asyncio loop on one daemon thread per process, on which all trials run.

Harbor's class-level asyncio locks (image builds, for one) work on one loop only, so there is exactly one. Sync methods
submit to it and wait; nothing else in this package touches asyncio.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  registers what it does at exit before we do
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType
from typing import Any

from harbor_trl.runs import hold_run, release_run

logger = logging.getLogger(__name__)

#: Seconds that a process waits at its end for its sandboxes to stop.
CLOSE_TIMEOUT_SEC = 60.0
#: Seconds that a tool call has to find out that its sandbox is gone.
_LAST_WORDS_SEC = 0.2
#: Seconds of waiting after which the user is told what is being waited for.
_QUIET_SEC = 2.0


class Engine:
    """The loop, the trials on it, and their end when the process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        #: Begins the name of each trial of this process, and so of its containers.
        self.run_id = f"ht{secrets.token_hex(4)}"
        self._run_file = hold_run(self.run_id)
        self._loop = asyncio.new_event_loop()
        self._trials: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="harbor-trl-engine", daemon=True)
        self._thread.start()

    @property
    def on_own_thread(self) -> bool:
        """Whether the caller runs on the engine's thread, where waiting for the engine would never end."""
        return threading.current_thread() is self._thread

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule `coroutine` on the loop; returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and wait for it.

        Raises:
            RuntimeError: Called on the engine's own thread.
        """
        if self.on_own_thread:
            coroutine.close()
            raise RuntimeError(
                "A blocking call (`_exec`, `_run`, `reward`) was made on the engine's own loop, for instance in "
                "`async def _setup`; await the environment there instead: `await self._env.exec(...)`."
            )
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start_trial(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[], None]) -> None:
        """Schedule a trial. When the process ends, it is cancelled and waited for.

        Args:
            coroutine: The trial.
            on_end: Called on the loop when it has ended in whatever way, also if it was cancelled before it began.
        """

        def end(task: asyncio.Task[None]) -> None:
            self._trials.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a trial ended with an error of ours", exc_info=error)
            on_end()

        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._trials.add(task)
            task.add_done_callback(end)

        self.call_soon(start)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop, soon; does nothing when the loop is gone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self, timeout_sec: float = CLOSE_TIMEOUT_SEC) -> None:
        """Cancel all trials and wait until their sandboxes are gone. Does nothing the second time, or after a fork.

        A KeyboardInterrupt while waiting ends the process at once; what is left is removed by a process of its own
        (Docker: `environments/reaper.py`) or dies with this one (bubblewrap).
        """
        if self._closed or self.pid != os.getpid():
            return
        self._closed = True

        async def cancel_all() -> None:
            for trial in self._trials:
                trial.cancel()

        async def unstopped() -> int:
            # Harbor shields a stop that a cancellation meets, so that it outlives its trial.
            stops = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "stop"]
            return max(len(self._trials), len(stops))

        async def end_calls() -> None:
            # A thread that waits for a tool call would wait for ever for a loop that has stopped.
            for insist in (False, True):
                calls = asyncio.all_tasks() - {asyncio.current_task()}
                for call in calls if insist else ():
                    call.cancel()
                if calls:
                    await asyncio.wait(calls, timeout=_LAST_WORDS_SEC)

        try:
            self.submit(cancel_all()).result()
            started = time.monotonic()
            told = False
            while (count := self.submit(unstopped()).result()) and time.monotonic() - started < timeout_sec:
                time.sleep(0.02)
                if not told and time.monotonic() - started > _QUIET_SEC:
                    told = True
                    print(
                        f"harbor-trl: stopping {count} sandboxes (Ctrl-C again ends the process at once)",
                        file=sys.stderr,
                        flush=True,
                    )
            if count:
                logger.warning(
                    "%d sandboxes did not stop within %.0f s. Of Docker's, a process of its own removes what is left "
                    "within a minute of the engine's answering; later, `harbor-trl clean` does",
                    count,
                    timeout_sec,
                )
            self.submit(end_calls()).result()
        except (KeyboardInterrupt, SystemExit):
            sys.stderr.flush()
            os._exit(130)
        self._loop.call_soon_threadsafe(self._loop.stop)
        release_run(self.run_id, self._run_file)


_engine: Engine | None = None
_lock = threading.Lock()


def engine() -> Engine:
    """The engine of this process, started at the first call."""
    global _engine
    with _lock:
        if _engine is None or _engine._closed:
            _engine = Engine()
            _close_at_exit()
        return _engine


def _forget_after_fork() -> None:
    # The thread of the parent's engine does not exist in the child, and its trials belong to the parent.
    global _engine, _lock
    _engine = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def _close_current() -> None:
    if _engine is not None:
        _engine.close()


_registered_pid: int | None = None


def _close_at_exit() -> None:
    global _registered_pid
    if _registered_pid == os.getpid():
        return
    _registered_pid = os.getpid()
    # Stopping a sandbox may need `asyncio.to_thread`, which is refused once `concurrent.futures` had its own turn at
    # exit; both use this list, last come first served. `atexit` runs later and covers a Python without the list.

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):
            register(_close_current)
    atexit.register(_close_current)
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Somebody else's handler is left alone: it decides how the process ends.
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
