"""A rollout: one Harbor trial on the engine, seen from the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import logging
import os
import re
import secrets
import stat
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from harbor.environments.base import BaseEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.task import Task, strip_canary
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.trial.result import ExceptionInfo, TrialResult
from harbor.trial.trial import Trial
from harbor.verifier.verifier import VerifierOutputParseError
from pydantic import ValidationError

from harbor_trl.disk import bytes_below, container_bytes, full_directory
from harbor_trl.dockerfile import copy_plan
from harbor_trl.engine import Engine
from harbor_trl.environments import environment_for, reaper
from harbor_trl.environments.health import backend_is_up
from harbor_trl.errors import NothingWorksError, RewardKeyError, SandboxNotAnsweringError, SandboxUnavailableError
from harbor_trl.execution import run_command
from harbor_trl.options import RolloutOptions, did_you_mean
from harbor_trl.repair import needs_repair, repair_copies

logger = logging.getLogger(__name__)


class FailureKind(StrEnum):
    """Why a rollout has no reward from its verifier. The first group gives reward `None`, the second 0.0."""

    TASK_REFUSED = "task_refused"
    """Harbor or the backend refuses the task: it is broken, or needs what the backend does not have."""
    START_FAILED = "start_failed"
    """No sandbox: the image did not build, or it did not start or become healthy in time."""
    SETUP_FAILED = "setup_failed"
    """The harness's own `_setup` raised."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox failed although the policy ran nothing in it."""
    DISK_FULL = "disk_full"
    """This machine has no space left in `trials_dir` or for temporary files, and not because of this sandbox."""
    BACKEND_DOWN = "backend_down"
    """The backend does not answer, for other rollouts either."""
    ABANDONED = "abandoned"
    """The trainer went on to another rollout, or the process ended."""

    VERIFIER_TIMEOUT = "verifier_timeout"
    """The verifier did not end within the task's `[verifier].timeout_sec`."""
    REWARD_MISSING = "reward_missing"
    """The verifier wrote no reward file."""
    REWARD_INVALID = "reward_invalid"
    """The reward file is empty, no number, not finite, nested too deeply, or lacks its key."""
    SANDBOX_BROKEN = "sandbox_broken"
    """The sandbox failed after the policy ran commands in it: otherwise breaking it would beat a wrong answer."""

    @property
    def masked(self) -> bool:
        """Whether the reward is `None`, so that the trainer leaves the rollout out, instead of 0.0."""
        return self not in _POLICY_KINDS


_POLICY_KINDS = frozenset(
    {
        FailureKind.VERIFIER_TIMEOUT,
        FailureKind.REWARD_MISSING,
        FailureKind.REWARD_INVALID,
        FailureKind.SANDBOX_BROKEN,
    }
)

# Harbor's names for what a verifier can do wrong (harbor/verifier/verifier.py, trial/errors.py). A policy can cause
# each of them, and so can one that ran nothing: a verifier that finds no answer may well end without a reward.
_VERIFIER_KINDS = {
    "VerifierTimeoutError": FailureKind.VERIFIER_TIMEOUT,
    "RewardFileNotFoundError": FailureKind.REWARD_MISSING,
    "RewardFileEmptyError": FailureKind.REWARD_INVALID,
    "VerifierOutputParseError": FailureKind.REWARD_INVALID,
    "ValidationError": FailureKind.REWARD_INVALID,
    "RecursionError": FailureKind.REWARD_INVALID,  # Python's json, on a file that is nested too deeply
}


class Failure(NamedTuple):
    """Why a rollout has no reward from its verifier."""

    kind: FailureKind
    message: str


class Outcome(NamedTuple):
    """How a rollout ended.

    Attributes:
        reward: The verifier's scalar; `None` or 0.0 after a failure.
        details: All the verifier's rewards by key.
        failure: Why there is no reward from the verifier, or None.
        error: A mistake in the configuration that ends the run: to be raised.
    """

    reward: float | None
    details: dict[str, float]
    failure: Failure | None = None
    error: RewardKeyError | NothingWorksError | None = None

    @classmethod
    def failed(cls, kind: FailureKind, message: str) -> Outcome:
        return cls(None if kind.masked else 0.0, {}, Failure(kind, message))


_ABANDONED = Outcome.failed(FailureKind.ABANDONED, "the trainer went on, or the process ended")


class Timings(NamedTuple):
    """Seconds that a rollout spent outside the model."""

    start: float
    verify: float


#: The rollout whose harness's `_setup` is running: a late `_setup` must see its own sandbox, not its successor's.
setting_up: contextvars.ContextVar[Rollout | None] = contextvars.ContextVar("setting_up", default=None)

_live: weakref.WeakValueDictionary[str, Rollout] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_told_kinds: set[FailureKind] = set()
#: The `reward_key`s with which a verdict had its scalar.
_keys_seen: set[str | None] = set()
#: Verdicts that lacked their scalar, by its key.
_keyless: Counter[str] = Counter()


def _leave_parents_files() -> None:
    # Harbor's environments keep compose files in temporary directories, and a forked child that exits would remove its
    # parent's: the parent could then not stop its containers.
    for rollout in list(_live.values()):
        environment = rollout._trial.agent_environment if rollout._trial is not None else None
        for value in list(vars(environment).values()) if environment is not None else ():
            if isinstance(value, tempfile.TemporaryDirectory):
                value._finalizer.detach()  # type: ignore[attr-defined]  # there is no public way
    _live.clear()


os.register_at_fork(after_in_child=_leave_parents_files)


def live_rollout(rollout_id: str) -> Rollout:
    """The rollout of this process with that id.

    Raises:
        LookupError: There is none; a `config.json` of ours cannot be run again by `harbor run`.
    """
    rollout = _live.get(rollout_id)
    if rollout is None:
        raise LookupError(f"no rollout {rollout_id!r} in this process: harbor-trl's trials are driven by a trainer")
    return rollout


@dataclasses.dataclass(frozen=True)
class _TrialPaths(TrialPaths):
    """Harbor's, but a reward file that could not be read in no time and little memory is no reward file."""

    @property
    def reward_text_path(self) -> Path:
        return _small_file(super().reward_text_path)

    @property
    def reward_json_path(self) -> Path:
        return _small_file(super().reward_json_path)


def _small_file(path: Path) -> Path:
    with contextlib.suppress(FileNotFoundError):
        state = path.lstat()
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MAX_REWARD_BYTES:
            raise VerifierOutputParseError(f"{path} is no file, or longer than {_MAX_REWARD_BYTES} bytes")
    return path


def _end_of(path: Path) -> str | None:
    """The end of a file that a policy may have written, as one line; None if there is none to read."""

    def opener(name: str, flags: int) -> int:  # it may be a link out of the trial, or a pipe
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    with contextlib.suppress(OSError), open(path, "rb", opener=opener) as file:
        state = os.fstat(file.fileno())
        if stat.S_ISREG(state.st_mode):
            file.seek(max(0, state.st_size - 1000))
            text = file.read(1000).decode(errors="replace")
            return " ".join("".join(one if one.isprintable() else " " for one in text).split())[-300:]
    return None


class _Backend:
    """One backend in one process: how many sandboxes may start and exist at once, and when it last answered."""

    def __init__(self, starts: int, sandboxes: int | None) -> None:
        self.starts = asyncio.Semaphore(starts)
        self.sandboxes: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(sandboxes) if sandboxes else contextlib.nullcontext()
        )
        # When (time.monotonic) any sandbox of this backend last answered, failed to start, or was found to be down.
        self.answered = self.start_failed = self.found_down = float("-inf")
        self.beginning = _Beginning()


class _Beginning:
    """The first rollouts of a backend in one process, until one of them has a verdict: does anything work at all?"""

    def __init__(self) -> None:
        self._works = False
        self._failures: Counter[FailureKind] = Counter()
        self._examples: dict[FailureKind, str] = {}
        self._until: int | None = None

    def verdict(self, rollout: Rollout, outcome: Outcome) -> NothingWorksError | None:
        """What to raise now that `outcome` is known: an error if enough rollouts have failed and none has not.

        All that were begun before the limit was reached are waited for, so that quick refusals do not outvote slow
        starts of the same batch.
        """
        failure, limit = outcome.failure, rollout.options.give_up_after
        if failure is None or not failure.kind.masked:
            self._works = True
        if self._works or failure is None or failure.kind is FailureKind.ABANDONED:
            return None
        self._failures[failure.kind] += 1
        example = f"{rollout.task_dir}: {failure.message} (trial: {rollout.trial_dir})"
        self._examples.setdefault(failure.kind, example)
        count = self._failures.total()
        if limit is None or count < limit:
            return None
        others = [other for other in list(_live.values()) if other is not rollout and other.backend is rollout.backend]
        if self._until is None:
            self._until = max((other.number for other in others), default=0)
        if any(other.result is None and other.number <= self._until for other in others):
            return None
        kinds = "\n".join(
            f"  {number} x {kind}, such as {self._examples[kind]}" for kind, number in self._failures.most_common()
        )
        return NothingWorksError(
            f"All of the first {count} rollouts on {rollout.environment_type!r} failed, and no policy can have caused "
            f"that: there would be nothing to learn from.\n{kinds}\nCorrect it, or let the run go on regardless with "
            "HarborSpec(..., give_up_after=None)."
        )


# Starts are work on this machine for the local backends, and waiting for an answer for the others.
_STARTS_AT_ONCE = {"docker": 8, "podman": 8, "bubblewrap": 16}
_STARTS_AT_ONCE_ELSEWHERE = 64
_backends: dict[tuple[str, str, int | None], _Backend] = {}

# Harbor measures an agent's timeout on the wall clock, which in training includes every generation. It is switched off,
# and the task's limit counts the time of the tool calls instead.
_NO_TIMEOUT_SEC = 1e9
# Around what Harbor itself bounds (building, verifying): transfers and log collection have no limit of their own.
_VERIFY_SLACK_SEC = 300.0
# How long an outage is believed in without any sandbox of the backend answering.
_OUTAGE_SEC = 120.0
# Harbor reads the whole file, on the engine's loop.
_MAX_REWARD_BYTES = 1 << 20
# So many verdicts without the scalar, and none with it, are the suite's doing: untrained rollouts do not all write a
# reward file behind the verifier's back.
_KEYLESS_VERDICTS = 4
# What a sandbox may write where its task doesn't say; no backend enforces it on Docker's disks.
_STORAGE_MB = 1024
# TRL computes with float32, where more is infinite and makes every advantage of its group NaN.
_MAX_REWARD = 3.4028234e38
# How often a verifying trial is asked whether its reward is known: Harbor has no event between reward and stop.
_POLL_SEC = 0.01


class Rollout:
    """One trial and its life: start, tool calls, verifier, stop.

    Built and called from the trainer's threads; everything that says so runs on the engine's loop.

    Args:
        engine: Of this process.
        task_dir: The task's directory.
        environment_type: Of `HarborEnv`.
        options: Of `HarborEnv`.
        set_up: The harness's `_setup`.
        predecessor: The rollout that the same harness instance played before; its `_setup` ends before ours begins.
    """

    def __init__(
        self,
        engine: Engine,
        task_dir: Path,
        environment_type: str,
        options: RolloutOptions,
        *,
        set_up: Callable[[], Awaitable[None]],
        predecessor: Rollout | None = None,
    ) -> None:
        self.engine = engine
        self.task_dir = task_dir
        self.environment_type = environment_type
        self.options = options
        self.backend = _backend_for(environment_type, options.max_sandboxes, engine)
        self.number = next(_numbers)
        self.id = f"{engine.run_id}-{self.number:06d}-{_safe_name(task_dir.name)}"
        self.environment: BaseEnvironment | None = None
        self._touches = 0
        self._set_up_harness = set_up
        self._predecessor = predecessor
        self._setup_error: BaseException | None = None
        self._setup_done = asyncio.Event()
        self._up = asyncio.Event()  # the sandbox is ready, or never will be
        self._over = asyncio.Event()  # the policy has no more turns
        self._context: contextvars.Context | None = None
        self._beyond_use: str | None = None
        self._tool_seconds = 0.0
        self._tool_limit: float | None = None
        self._trial: Trial | None = None
        self._main: asyncio.Task[None] | None = None
        self._abandoned = False
        self._created = time.monotonic()
        self._ready_at: float | None = None
        self._over_at: float | None = None
        self._settled_at: float | None = None
        self._outcome: Future[Outcome] = Future()
        _live[self.id] = self
        if environment_type == "docker":
            reaper.start(engine.run_id)
        engine.start_trial(self._run(), self._ended)

    # ── called by the harness, from the trainer's threads ──────────────────────────────────────────────────────────

    @property
    def trial_dir(self) -> Path:
        """Where Harbor writes this trial's config, log, result and verifier output."""
        return trials_dir(self.options) / self.engine.run_id / self.id

    @property
    def result(self) -> Outcome | None:
        """The outcome if it is known already."""
        return self._outcome.result() if self._outcome.done() else None

    @property
    def timings(self) -> Timings:
        """Seconds of starting the sandbox, and of verifying, as far as they went."""
        ready = self._ready_at or self._settled_at or time.monotonic()
        over = self._over_at or ready
        return Timings(ready - self._created, max(0.0, (self._settled_at or time.monotonic()) - max(over, ready)))

    @property
    def finishing(self) -> bool:
        """Whether `finish` was called."""
        return self._over_at is not None

    def finish(self) -> Future[Outcome]:
        """Say that the policy has no more turns, so that the verifier starts. Returns at once."""
        if self._over_at is None:
            self._over_at = time.monotonic()
            self.engine.call_soon(self._over.set)
        return self._outcome

    def abandon(self) -> None:
        """Stop the trial in the background unless its reward is known. Returns at once."""

        def cancel() -> None:
            self._abandoned = True
            if self._main is not None and not self._outcome.done():
                self._main.cancel()

        self.engine.call_soon(cancel)

    async def sandbox(self) -> BaseEnvironment | None:
        """Wait until the sandbox is up and its harness set up; None if it never will be, or the rollout is over."""
        await self._up.wait()
        return None if self._over.is_set() else self.environment

    async def execute(self, command: str, timeout_sec: float, output_limit: int) -> str:
        """Run a policy's command; never raises for what the sandbox does."""
        environment = await self.sandbox()
        if environment is None:
            return self.dead_text()
        if self._beyond_use is not None:
            return f"[the sandbox is beyond use: {self._beyond_use}]"
        if self._tool_limit is not None:
            timeout_sec = min(timeout_sec, self._tool_limit - self._tool_seconds)
            if timeout_sec < 1:  # the shortest timeout that every backend takes
                return f"[no time left: this task allows {self._tool_limit:g} s of commands in all]"
        self.touch()
        started = time.monotonic()
        try:
            # In the context of the agent's phase: Harbor keeps the phase's environment variables in context variables.
            call = run_command(environment, command, timeout_sec=timeout_sec, output_limit=output_limit)
            result = await asyncio.get_running_loop().create_task(call, context=self._context)
            if result.broken:  # once may be a passing shortage
                if (await run_command(environment, "true", timeout_sec=10)).broken:
                    self._beyond_use = f"it can run no command any more: {one_line(result.text)}"
                    if result.gone and self._touches == 1:  # before the policy's first command could run
                        self._touches = 0
            else:
                self.backend.answered = time.monotonic()
        except SandboxNotAnsweringError as error:
            self._beyond_use = one_line(error)
            return f"[the sandbox does not answer any more: {self._beyond_use}]"
        except Exception as error:
            logger.info("%s: a command failed in the sandbox: %s", self.id, one_line(error))
            if self._outcome.done():
                return self.dead_text()
            return f"[the sandbox did not answer: {one_line(error)}]"
        finally:
            self._tool_seconds += time.monotonic() - started
        return result.text

    @property
    def touched(self) -> bool:
        """Whether the policy ran anything in the sandbox, so that it can have caused what happens there."""
        return self._touches > 0

    def touch(self) -> None:
        """Say that the policy is about to use the sandbox."""
        self._touches += 1

    def dead_text(self) -> str:
        outcome = self.result
        if outcome is not None and outcome.failure is not None:
            return f"[there is no sandbox: {outcome.failure.kind}: {outcome.failure.message}]"
        return "[the rollout is over: its sandbox takes no more commands]"

    # ── called by PolicyAgent, on the engine's loop ────────────────────────────────────────────────────────────────

    async def set_up(self, environment: BaseEnvironment) -> None:
        """Run the harness's `_setup` in the new sandbox."""
        if self._predecessor is not None:
            await self._predecessor._setup_done.wait()
            self._predecessor = None
        self.environment = environment
        token = setting_up.set(self)
        try:
            await self._set_up_harness()
        except BaseException as error:
            self._setup_error = error
            self.environment = None
            raise
        finally:
            setting_up.reset(token)
            self._setup_done.set()

    async def play(self, environment: BaseEnvironment) -> None:
        """Hand the sandbox to the policy and wait until it has no more turns."""
        if self._context is None:
            self._context = contextvars.copy_context()
            self._ready_at = time.monotonic()
            self._up.set()
        await self._over.wait()

    # ── the trial, on the engine's loop ────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        self._main = asyncio.current_task()
        if self._abandoned:
            return
        trial_task: asyncio.Task[TrialResult] | None = None
        backend = self.backend
        try:
            async with asyncio.timeout(self._start_timeout()) as deadline, backend.sandboxes:
                deadline.reschedule(None)
                try:
                    async with backend.starts:
                        self._trial = await Trial.create(self._config())
                        self._trial.paths = _TrialPaths(self._trial.paths.trial_dir)
                        self._repair_copies_at_start(self._trial)
                        self._tool_limit = self._trial.task.config.agent.timeout_sec
                        trial_task = asyncio.create_task(self._trial.run(), name=self.id)
                        await self._wait_until_up(trial_task)
                    if not trial_task.done():
                        await self._wait_until_verified(trial_task)
                    self._settle(await self._judge(trial_task))
                except asyncio.CancelledError:
                    self._settle(_ABANDONED)
                    if trial_task is not None:
                        trial_task.cancel()
                except Exception as error:
                    if trial_task is not None:
                        trial_task.cancel()
                    self._settle(await self._judge_error(error))
                finally:
                    self._up.set()
                    # Nobody waits for this: Harbor stops the sandbox and writes the result.
                    await _wait_even_if_cancelled(trial_task)
                    self._settle(_ABANDONED)  # cancelled while it was judged
                    # A policy may have left a million log files there.
                    await _wait_even_if_cancelled(asyncio.create_task(asyncio.to_thread(self._tidy)))
        except TimeoutError:
            self._settle(
                Outcome.failed(
                    FailureKind.START_FAILED,
                    f"no free sandbox within {self._start_timeout():g} s: max_sandboxes={self.options.max_sandboxes}, "
                    "and each belongs to a rollout that is still going on. Raise max_sandboxes to the number of "
                    "rollouts that a rank generates at once, or more.",
                )
            )

    def _ended(self) -> None:
        """Runs when `_run` has ended, or was cancelled before it began."""
        self._settle(_ABANDONED)
        self._up.set()
        self._setup_done.set()
        self._trial = None
        self.environment = None
        self._predecessor = None  # else rollouts that fail before their set-up would keep each other alive
        _forget_loggers(self.id)

    def _start_timeout(self) -> float:
        return self.options.start_timeout or 600.0

    def _config(self) -> TrialConfig:
        return trial_config(
            self.task_dir,
            self.environment_type,
            self.options.environment_kwargs,
            trial_dir=self.trial_dir,
            rollout_id=self.id,
        )

    def _repair_copies_at_start(self, trial: Trial) -> None:
        """Put COPY'd files back right after the start: the task's healthcheck, which comes next, may need them."""
        wanted = self.options.repair_copies
        if not (needs_repair(self.environment_type) if wanted is None else wanted):
            return
        environment, start = trial.agent_environment, trial.agent_environment.start
        context = trial.task.paths.environment_dir
        if not (context / "Dockerfile").is_file():
            return

        async def start_and_repair(force_build: bool) -> None:
            await start(force_build)
            plan = await asyncio.to_thread(copy_plan, context / "Dockerfile", context)
            report = await repair_copies(environment, plan, context)
            logger.debug("%s: COPY repair offered %d, withheld %d", self.id, len(report.offered), len(report.withheld))

        environment.start = start_and_repair  # type: ignore[method-assign]

    async def _wait_until_up(self, trial_task: asyncio.Task[TrialResult]) -> None:
        up = asyncio.create_task(self._up.wait())
        try:
            await asyncio.wait(
                {trial_task, up}, timeout=self.options.start_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            up.cancel()
        if self._context is not None:
            self.backend.answered = time.monotonic()
        elif not trial_task.done():
            raise TimeoutError(f"the sandbox was not up within start_timeout={self.options.start_timeout:g} s")

    async def _wait_until_verified(self, trial_task: asyncio.Task[TrialResult]) -> None:
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({trial_task, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if self._beyond_use is not None:  # a verifier could only wait for its timeout there
            return
        assert self._trial is not None
        steps = len(self._trial.task.config.steps or [None])
        limit = steps * (self._trial.verifier_timeout_sec + self._trial.environment_build_timeout_sec)
        deadline = time.monotonic() + limit + _VERIFY_SLACK_SEC
        while not trial_task.done() and not _reward_known(self._trial):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no reward {limit + _VERIFY_SLACK_SEC:g} s after the last turn")
            await asyncio.wait({trial_task}, timeout=_POLL_SEC)

    async def _judge(self, trial_task: asyncio.Task[TrialResult]) -> Outcome:
        assert self._trial is not None
        if self._beyond_use is not None:
            trial_task.cancel()
            return await self._failed(None, self._beyond_use)
        if trial_task.done() and not trial_task.cancelled():
            trial_task.result()  # Harbor records failures; what it raises is a failure of its own
        result = self._trial.result
        if result.reward_valid and result.verifier_result is not None and result.verifier_result.rewards:
            self.backend.answered = time.monotonic()
            try:
                details = {key: float(value) for key, value in result.verifier_result.rewards.items()}
            except OverflowError as error:  # JSON has integers that no float can hold
                return await self._failed(FailureKind.REWARD_INVALID, f"a reward is out of range: {error}")
            return self._scalar(details)
        errors = result.recorded_exceptions()
        if errors:
            return await self._judge_exception(errors[0])
        return await self._failed(FailureKind.REWARD_MISSING, "the verifier gave no reward")

    async def _judge_exception(self, info: ExceptionInfo) -> Outcome:
        message = f"{info.exception_type}: {one_line(info.exception_message)}"
        kind = _VERIFIER_KINDS.get(info.exception_type)
        if kind in (FailureKind.REWARD_MISSING, FailureKind.REWARD_INVALID):
            if kind is FailureKind.REWARD_MISSING:  # Harbor's message is two long paths
                message = "the verifier wrote neither reward.txt nor reward.json into /logs/verifier"
            assert self._trial is not None
            said = await asyncio.to_thread(_end_of, self._trial.paths.test_stdout_path)
            if said is not None:
                message += f"; its output ends with: {said}" if said else "; it printed nothing"
        return await self._failed(kind, message)

    async def _judge_error(self, error: Exception) -> Outcome:
        return await self._failed(None, f"{type(error).__name__}: {one_line(error)}")

    async def _failed(self, kind: FailureKind | None, message: str) -> Outcome:
        """What a failure means, whatever its text: who can have caused it decides."""
        full = await asyncio.to_thread(full_directory, self.trial_dir)
        if full is not None and not await self._can_have_filled(full):
            return Outcome.failed(FailureKind.DISK_FULL, f"no space is left in {full}: {message}")
        if self._setup_error is not None:
            return Outcome.failed(FailureKind.SETUP_FAILED, message)
        if self._trial is None:
            return Outcome.failed(FailureKind.TASK_REFUSED, message)
        if self._context is None:
            self.backend.start_failed = time.monotonic()
            return Outcome.failed(FailureKind.START_FAILED, message)
        if not await self._backend_is_up():
            return Outcome.failed(FailureKind.BACKEND_DOWN, message)
        if kind is None:
            kind = FailureKind.SANDBOX_BROKEN if self.touched else FailureKind.SANDBOX_LOST
        return Outcome.failed(kind, message)

    async def _can_have_filled(self, directory: Path) -> bool:
        """Whether the policy wrote so much that it can have chosen this failure."""
        if not self.touched or self._trial is None:
            return False
        written = await asyncio.to_thread(bytes_below, self.trial_dir)
        if self.environment_type == "docker":
            written += await container_bytes(self.id)
        disk = os.statvfs(directory)
        allowed = self._trial.task.config.environment.storage_mb or _STORAGE_MB
        return written > min(allowed << 20, disk.f_blocks * disk.f_frsize // 10)

    async def _backend_is_up(self) -> bool:
        peers = [
            other.environment
            for other in list(_live.values())
            if other is not self and other.environment is not None and other.environment_type == self.environment_type
        ]
        backend = self.backend
        last_good = max(backend.answered, time.monotonic() - _OUTAGE_SEC)
        if backend.found_down > last_good:  # an outage found by a peer, which may be gone since
            return False
        assert self.environment is not None
        up = await backend_is_up(self.environment, peers, starts_fail=backend.start_failed > last_good)
        if not up:
            backend.found_down = time.monotonic()
        return up

    def _scalar(self, details: dict[str, float]) -> Outcome:
        key = self.options.reward_key
        if key is None:
            key = "reward" if "reward" in details or len(details) != 1 else next(iter(details))
        if (reward := details.get(key)) is not None:
            if not abs(reward) <= _MAX_REWARD:
                return Outcome.failed(FailureKind.REWARD_INVALID, f"the reward {reward} is not finite as a float32")
            _keys_seen.add(self.options.reward_key)
            return Outcome(reward, details)
        message = (
            f"{self.task_dir}: the verifier gave the rewards {sorted(details)}, none of them is {key!r}. Choose one "
            "with HarborSpec(..., reward_key=...)."
        )
        if self._is_never_given(key):
            return Outcome(None, details, Failure(FailureKind.REWARD_INVALID, message), RewardKeyError(message))
        return Outcome(0.0, details, Failure(FailureKind.REWARD_INVALID, message))

    def _is_never_given(self, key: str) -> bool:
        """Whether a missing key is a mistake of the configuration.

        A policy can have written the file, and must not be able to end a run by that. So it is one only while no
        verdict of this process has had the key, and either the policy ran nothing or it happens again and again.
        """
        if self.options.reward_key in _keys_seen:
            return False
        _keyless[key] += 1
        return not self.touched or _keyless[key] >= _KEYLESS_VERDICTS

    def _settle(self, outcome: Outcome) -> None:
        if self._outcome.done():
            return
        self._settled_at = time.monotonic()
        if outcome.error is None:
            self._report(outcome)
            outcome = outcome._replace(error=self.backend.beginning.verdict(self, outcome))
        self._outcome.set_result(outcome)

    def _report(self, outcome: Outcome) -> None:
        failure = outcome.failure
        if failure is None or failure.kind is FailureKind.ABANDONED:
            return
        # The first of each kind is news; the others are counted in the trainer's metrics.
        level = logging.INFO if failure.kind in _told_kinds else logging.WARNING
        _told_kinds.add(failure.kind)
        logger.log(
            level,
            "rollout of %s: %s, reward %s: %s (trial: %s)",
            self.task_dir,
            failure.kind,
            outcome.reward,
            failure.message,
            self.trial_dir,
        )

    def _tidy(self) -> None:
        outcome = self._outcome.result()
        failed = outcome.failure is not None and outcome.failure.kind is not FailureKind.ABANDONED
        keep = self.options.keep_trials
        if keep == "none" or (keep == "failed" and not failed):
            _remove_tree(self.trial_dir)
            with contextlib.suppress(OSError):  # not empty: other trials are there
                self.trial_dir.parent.rmdir()
                if self.options.trials_dir is None:
                    self.trial_dir.parent.parent.rmdir()


def _remove_tree(top: Path) -> None:
    """Remove a directory as far as possible, however deep it is: its paths may be longer than the kernel takes."""
    prefix, numbers = secrets.token_hex(8), itertools.count()
    queue = [str(top)]
    while queue:
        directory = queue.pop()
        try:
            with os.scandir(directory) as listing:
                entries = list(listing)
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                try:
                    os.rmdir(entry.path)
                except OSError:
                    moved_up = os.path.join(top, f"{prefix}-{next(numbers)}")
                    os.rename(entry.path, moved_up)
                    queue.append(moved_up)
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    with contextlib.suppress(OSError):
        os.rmdir(top)


def trials_dir(options: RolloutOptions) -> Path:
    """The directory of trial directories, absolute."""
    return Path(options.trials_dir or "harbor-trl-trials").expanduser().absolute()


def first_instruction(task_dir: Path) -> str:
    """What the policy is told: the task's instruction without its canary, of the first step where there are steps.

    Raises:
        OSError: A file is missing.
        ValueError: The task is broken.
    """
    if not (task_dir / "steps").is_dir():  # loading a task costs milliseconds, and the trial does it again
        return strip_canary((task_dir / "instruction.md").read_text())
    task = Task(task_dir)
    if task.config.steps:
        return task.step_instruction(task.config.steps[0].name)
    return task.instruction


def _reward_known(trial: Trial) -> bool:
    result = trial.result
    if result.exception_info is not None or result.verifier_result is not None:
        return True
    return result.verifier is not None and result.verifier.finished_at is not None


def _backend_for(environment_type: str, max_sandboxes: int | None, engine: Engine) -> _Backend:
    starts = _STARTS_AT_ONCE.get(environment_type, _STARTS_AT_ONCE_ELSEWHERE)
    return _backends.setdefault((engine.run_id, environment_type, max_sandboxes), _Backend(starts, max_sandboxes))


def _forget_loggers(trial_name: str) -> None:
    """Remove the loggers that Harbor makes for each trial: `logging` keeps every logger until the process ends."""
    known = logging.root.manager.loggerDict
    with logging._lock:  # type: ignore[attr-defined]  # else another thread may be iterating over them
        for name, entry in list(known.items()):
            if trial_name in name:
                del known[name]
            elif isinstance(entry, logging.PlaceHolder):  # in a parent's place; it lists its children
                for child in [child for child in entry.loggerMap if trial_name in child.name]:
                    del entry.loggerMap[child]


async def _wait_even_if_cancelled(task: asyncio.Task[Any] | None) -> None:
    """Wait for a trial to end, also when the waiter is cancelled meanwhile: the trial is stopping its sandbox."""
    while task is not None and not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if task is not None and not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("trial %s ended with %r", task.get_name(), error)


def _safe_name(name: str) -> str:
    # Compose derives project and image names from the trial's; both allow little.
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:32].strip("-") or "task"


def one_line(error: BaseException | str) -> str:
    """A message for a table or a log: no line breaks, 500 characters at most."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:240]} ... {text[-240:]}"


def trial_config(
    task_dir: Path,
    environment_type: str,
    environment_kwargs: Mapping[str, Any],
    *,
    trial_dir: Path,
    rollout_id: str | None,
) -> TrialConfig:
    """The trial that a rollout of a task is; without `rollout_id` one that can be created, but not run."""
    return TrialConfig(
        task=TaskConfig(path=task_dir),
        trial_name=trial_dir.name,
        trials_dir=trial_dir.parent,
        agent=AgentConfig(
            import_path="harbor_trl.agent:PolicyAgent",
            override_timeout_sec=_NO_TIMEOUT_SEC,
            kwargs={"rollout_id": rollout_id},
        ),
        environment=EnvironmentConfig(**environment_for(environment_type, environment_kwargs)),
    )


def preflight(environment_type: str, environment_kwargs: Mapping[str, Any]) -> None:
    """Check that the backend exists, takes its options and can run on this machine; starts no sandbox.

    Raises:
        SandboxUnavailableError: It cannot; says why and what to do.
        ValueError: `environment_kwargs` has a key that neither Harbor's `EnvironmentConfig` nor the backend knows, or a
            value that it does not take.
    """
    fields = environment_for(environment_type, environment_kwargs)
    known = EnvironmentConfig.model_fields
    if unknown := next((name for name in environment_kwargs if name not in known), None):
        raise ValueError(
            f"environment_kwargs has {unknown!r}, which Harbor's EnvironmentConfig does not know "
            f"({', '.join(known)}).{did_you_mean(unknown, known)} Options of the backend itself go into its 'kwargs': "
            f"environment_kwargs={{'kwargs': {{{unknown!r}: ...}}}}."
        )
    try:
        config = EnvironmentConfig(**fields)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"environment_kwargs does not fit Harbor's EnvironmentConfig: {wrong}.") from error
    try:
        backend = EnvironmentFactory.get_environment_class(config.type, config.import_path)
        wrong = _wrong_options(backend, config.kwargs)
        if not wrong:
            backend.preflight(kwargs=config.kwargs)
            EnvironmentFactory.validate_resource_policies(config)
    except SandboxUnavailableError:
        raise
    except (Exception, SystemExit) as error:  # Harbor's backends leave by SystemExit where a credential is missing
        raise SandboxUnavailableError(f"environment_type={environment_type!r} cannot be used here: {error}") from error
    if wrong:
        raise ValueError(f"environment_kwargs['kwargs'] does not fit {environment_type!r}: {wrong}")


def _wrong_options(backend: type[BaseEnvironment], options: dict[str, Any]) -> str:
    try:
        backend.parse_options(options)
    except ValueError as error:
        # Harbor's message has a headline, an indented line for each of them, and a pointer to Harbor's own command.
        lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.startswith("  ")]
        known = backend.options_model.model_fields if backend.options_model is not None else {}
        meant = next(filter(None, (did_you_mean(name, known) for name in options if name not in known)), "")
        return f"{'; '.join(lines) or error}.{meant} Its options: {', '.join(known)}."
    return ""


def require_writable(directory: Path) -> None:
    """Check that trial directories can be made in `directory`, which need not exist yet; makes nothing.

    Raises:
        ValueError: They cannot.
    """
    existing = next(one for one in (directory, *directory.parents) if os.path.lexists(one))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "cannot be written to" if existing.is_dir() else "is no directory"
        raise ValueError(
            f"trials_dir={os.fspath(directory)!r}: {existing} {what}, and each rollout needs a directory there. Choose "
            "another with HarborSpec(..., trials_dir=...)."
        )
