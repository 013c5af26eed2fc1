"""`HarborEnv`: what the trainer drives. Subclasses are harnesses: their public methods are the policy's tools."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from harbor_trl.engine import engine
from harbor_trl.errors import SandboxFileError, SandboxLostError
from harbor_trl.execution import SANDBOX_GONE
from harbor_trl.options import RolloutOptions

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment

    from harbor_trl.rollout import Failure, Outcome, Rollout

_usable: set[tuple[str, str, str | None]] = set()


def require_usable(environment_type: str, options: RolloutOptions) -> None:
    """Check once in this process that rollouts can be run at all as they are configured; starts no sandbox.

    Raises:
        SandboxUnavailableError: The backend does not exist, or cannot run on this machine.
        ValueError: `environment_kwargs` or `trials_dir` cannot be used.
    """
    key = (environment_type, repr(options.environment_kwargs), options.trials_dir)
    if key not in _usable:
        from harbor_trl.rollout import preflight, require_writable, trials_dir

        preflight(environment_type, options.environment_kwargs)
        require_writable(trials_dir(options))
        _usable.add(key)


class HarborEnv:
    """A TRL environment on a Harbor task: sandbox, tools, verifier.

    TRL calls `reset(task_dir=...)`, then tools, then reads `reward` through a reward function. Each `reset` begins a
    new rollout, which is a Harbor trial: it starts in the background, and the first tool call waits for its sandbox.

    Subclass it to write a harness: each public method is a tool (type hints and a docstring with an `Args:` section
    make its schema), everything else begins with an underscore. Building an instance starts nothing.

    Args:
        environment_type: Harbor's sandbox backend: `"docker"`, `"bubblewrap"` (ours), `"e2b"`, ... or
            `"package.module:Class"`.
        options: How rollouts are run. Default: `RolloutOptions()`.
    """

    #: Appended to the task's instruction.
    PROMPT_SUFFIX: str = ""

    def __init__(self, environment_type: str = "docker", *, options: RolloutOptions | None = None) -> None:
        self._environment_type = environment_type
        self._options = options or RolloutOptions()
        self._rollout: Rollout | None = None

    def reset(self, task_dir: str | None = None, **columns: Any) -> str:
        """Begin a rollout of the task in `task_dir`; one that is still going on is stopped in the background.

        Args:
            task_dir: Directory of a Harbor task.
            columns: The other columns of the dataset's row, for subclasses.

        Returns:
            The task's instruction and `PROMPT_SUFFIX`.

        Raises:
            ValueError: No `task_dir`.
            SandboxUnavailableError: The backend cannot run on this machine (checked before the first rollout, and by
                `HarborSpec.environment_factory`).
        """
        if task_dir is None:
            raise ValueError(
                "reset() needs task_dir, the directory of a Harbor task: a column of HarborSpec.train_dataset."
            )
        from harbor_trl.rollout import Rollout, first_instruction

        require_usable(self._environment_type, self._options)
        previous = self._current
        if previous is not None:
            previous.abandon()
        path = Path(task_dir).absolute()
        # A harness that the trainer dropped must not live on in its trial.
        self._rollout = Rollout(
            engine(), path, self._environment_type, self._options, set_up=_weak_setup(self), predecessor=previous
        )
        try:
            return first_instruction(path) + self.PROMPT_SUFFIX
        except (OSError, ValueError) as error:
            # The trial fails in the same way and says so; one broken task is no reason to end a run of days.
            return f"[this task's instruction cannot be read: {error}]"

    async def _setup(self) -> None:
        """Prepare the sandbox, once per rollout: it is up and healthy, no tool call has been made.

        Override it, for instance to `await self._env.upload_file(...)` or `await self._env.exec(...)`. What it raises
        fails the rollout (reward None).
        """

    def _exec(self, command: str, timeout: float = 180, *, output_limit: int | None = None) -> str:
        """Run a shell command in the sandbox as the task's agent user.

        Args:
            command: The command.
            timeout: Seconds after which it is killed.
            output_limit: Characters of output to keep. Default: the option's.

        Returns:
            Standard output and error in the order they were written, cut to the output limit;
            `(empty output, rc=N)` when there is none. A sandbox that does not answer gives a text that says so.
        """
        rollout = self._current
        if rollout is None:
            return _NO_ROLLOUT
        return engine().run(rollout.execute(command, timeout, output_limit or self._options.output_limit))

    async def _aexec(self, command: str, timeout: float = 180, *, output_limit: int | None = None) -> str:
        """`_exec` for async tools: awaits instead of blocking the caller's loop."""
        import asyncio

        rollout = self._current
        if rollout is None:
            return _NO_ROLLOUT
        call = rollout.execute(command, timeout, output_limit or self._options.output_limit)
        if engine().on_own_thread:
            return await call
        return await asyncio.wrap_future(engine().submit(call))

    def _read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The content of a file in the sandbox, read as the task's agent user.

        Args:
            path: Any name; relative to the task's working directory.
            max_bytes: More than this is refused.

        Raises:
            SandboxFileError: There is no such file, it cannot be read, or it is longer than `max_bytes`.
            SandboxLostError: This rollout has no sandbox (any more).
        """
        from harbor_trl.execution import read_file

        return self._in_sandbox(lambda sandbox: read_file(sandbox, path, max_bytes))

    def _write_file(self, path: str, data: bytes | str) -> None:
        """Write a file in the sandbox as the task's agent user, making the directories above it.

        Args:
            path: Any name; relative to the task's working directory.
            data: Its content; text is written as UTF-8.

        Raises:
            SandboxFileError: The file cannot be written.
            SandboxLostError: This rollout has no sandbox (any more).
        """
        from harbor_trl.execution import write_file

        content = data.encode() if isinstance(data, str) else data
        self._in_sandbox(lambda sandbox: write_file(sandbox, path, content))

    def _in_sandbox[T](self, work: Callable[[BaseEnvironment], Coroutine[Any, Any, T]]) -> T:
        environment = self._env
        if environment is None:
            raise SandboxLostError(_NO_ROLLOUT)
        try:
            return self._run(work(environment))
        except SandboxFileError as error:
            # A backend may say in a command's output that it has no sandbox to run it in.
            if not SANDBOX_GONE.search(str(error)):
                raise
            raise SandboxLostError(f"the sandbox is gone: {error}") from error
        except RuntimeError as error:
            if engine().on_own_thread:  # a mistake of the harness
                raise
            raise SandboxLostError(f"the sandbox did not answer: {error}") from error

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop, where `_env` lives, and wait for its result.

        Callable from a plain thread and from inside a running event loop of another thread.

        Raises:
            RuntimeError: Called on the engine's own loop (in `_setup`); await there instead.
            Exception: What the coroutine raises.
        """
        return engine().run(coroutine)

    @property
    def _env(self) -> BaseEnvironment | None:
        """Harbor's live environment of this rollout; waits until it is up. None before the first `reset`.

        Raises:
            SandboxLostError: This rollout has no sandbox (any more).
        """
        if engine().on_own_thread:
            from harbor_trl.rollout import setting_up

            rollout = setting_up.get() or self._current
            return rollout.environment if rollout is not None else None
        rollout = self._current
        if rollout is None:
            return None
        environment = engine().run(rollout.sandbox())
        if environment is None:
            raise SandboxLostError(rollout.dead_text())
        rollout.touch()
        return environment

    @property
    def reward(self) -> float | None:
        """The verifier's scalar for this rollout, computed once: reading it says that the policy has no more turns.

        None where the infrastructure failed (TRL then leaves the rollout out), 0.0 where the policy can have caused the
        failure, and on an environment that was never reset. `_failure` has the reason.

        Read by a reward function, it starts the verifiers of the whole batch, so that they run at once.

        Raises:
            RewardKeyError: The task's verifier gives several rewards, and `reward_key` does not say which is meant.
            NothingWorksError: `give_up_after` rollouts have failed, and none has not.
        """
        outcome = self._outcome()
        if outcome is None:
            return 0.0
        if outcome.error is not None:
            raise outcome.error
        return outcome.reward

    def _reward_details(self) -> dict[str, float]:
        """All the verifier's rewards by key; empty after a failure. Waits, as `reward` does."""
        outcome = self._outcome()
        return dict(outcome.details) if outcome is not None else {}

    @property
    def _failure(self) -> Failure | None:
        """Why this rollout has no reward from its verifier: kind and message. None while no failure is known."""
        outcome = self._current.result if self._current is not None else None
        return outcome.failure if outcome is not None else None

    @property
    def _trial_dir(self) -> Path | None:
        """The trial's directory (config, log, result, verifier output); `keep_trials` says whether it stays."""
        return self._current.trial_dir if self._current is not None else None

    def _finish(self) -> Future[Outcome] | None:
        """Say that the policy has no more turns: the verifier starts. Returns at once."""
        return self._current.finish() if self._current is not None else None

    def _outcome(self) -> Outcome | None:
        rollout = self._current
        if rollout is None:
            return None
        if not rollout.finishing:
            for peer in _same_batch(self):
                peer._finish()
        return rollout.finish().result()

    @property
    def _current(self) -> Rollout | None:
        # After a fork, the rollout belongs to the parent.
        rollout = self._rollout
        return rollout if rollout is not None and rollout.engine.pid == os.getpid() else None

    def __del__(self) -> None:
        rollout = getattr(self, "_rollout", None)
        # At the end of the interpreter the engine has stopped all sandboxes, and parts of asyncio are gone.
        if rollout is not None and not sys.is_finalizing() and rollout.engine.pid == os.getpid():
            rollout.abandon()


_NO_ROLLOUT = "[there is no rollout: reset() was never called]"
#: How many callers up a reward function's `environments` is looked for.
_FRAMES = 12


def _weak_setup(env: HarborEnv) -> Any:
    import weakref

    reference = weakref.ref(env)

    async def set_up() -> None:
        harness = reference()
        if harness is not None:
            await harness._setup()

    return set_up


def _same_batch(env: HarborEnv) -> list[HarborEnv]:
    """The environments of the reward function that is reading `env.reward`.

    A custom reward function reads them one after the other, and each read waits for a verifier. TRL hands it the whole
    batch as `environments`, all of whose rollouts are over, so the list is taken from the callers' frames.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_FRAMES):
        if frame is None:
            break
        local = frame.f_locals
        for batch in (local.get("environments"), getattr(local.get("self"), "environments", None)):
            if isinstance(batch, list | tuple) and any(other is env for other in batch):
                return [other for other in batch if isinstance(other, HarborEnv)]
        frame = frame.f_back
    return []
