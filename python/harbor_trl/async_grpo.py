"""TRL's `AsyncGRPOTrainer` on Harbor tasks: the only module that uses names of TRL's which may move without notice.

TRL's rollout worker, a spawned process, gives its reward functions no environments: by the time a group is scored, they
may be in other rollouts. Its loop is subclassed here, so that each rollout waits for its own verifier, and the reward
functions get what `GRPOTrainer` gives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing.queues
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import trl

from harbor_trl.engine import engine
from harbor_trl.env import HarborEnv
from harbor_trl.errors import HarnessTypeError, TrlVersionError
from harbor_trl.testing import tools_of

#: What is relied on and may move: of `_AsyncRolloutLoop` the methods, with the parameters that are used by name.
_METHODS = {
    "_generate_one": ("prompt", "tool_dict", "tools", "group_id"),
    "_score_group": ("group",),
    "_run_loops": ("stop_event",),
    "_push_metrics": ("values",),
}
#: Of `RolloutGroup`.
_GROUP_FIELDS = ("reward_kwargs", "rollout_rewards")


def _moved(worker_module: Any) -> list[str]:
    """The names of TRL's that are not where this module was written for."""
    loop = getattr(worker_module, "_AsyncRolloutLoop", None)
    moved = [] if loop is not None else ["_AsyncRolloutLoop"]
    for method, parameters in _METHODS.items() if loop is not None else ():
        function = getattr(loop, method, None)
        found = inspect.signature(function).parameters if callable(function) else {}
        moved += [f"_AsyncRolloutLoop.{method}({name})" for name in parameters if name not in found]
    if getattr(getattr(worker_module, "AsyncRolloutWorker", None), "_loop_cls", None) is not loop or loop is None:
        moved.append("AsyncRolloutWorker._loop_cls")
    fields = getattr(getattr(worker_module, "RolloutGroup", None), "__dataclass_fields__", {})
    moved += [f"RolloutGroup.{name}" for name in _GROUP_FIELDS if name not in fields]
    return moved


try:
    from trl.experimental.async_grpo import async_rollout_worker
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
except ImportError as error:
    raise TrlVersionError(
        f"TRL {trl.__version__} has no trl.experimental.async_grpo that harbor-trl can use ({error}); it was written "
        "for TRL 1.16. GRPOTrainer does not need it."
    ) from error
if _names := _moved(async_rollout_worker):
    raise TrlVersionError(
        f"TRL {trl.__version__} has moved what harbor_trl.async_grpo builds on ({', '.join(_names)}); it was written "
        "for TRL 1.16. Use that one, or GRPOTrainer, which does not need it."
    )


class HarborAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer`, with rewards from the verifiers of Harbor tasks. Takes the same arguments.

        spec = HarborSpec("org/suite", agent="bash", num_tasks=64)
        trainer = HarborAsyncGRPOTrainer(
            model="Qwen/Qwen3-4B",
            args=AsyncGRPOConfig(max_inflight_tasks=16),
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
        )

    The verifiers of all rollouts in flight run at once. Reward functions get `environments` and `log_metric`, as from
    `GRPOTrainer`: an environment of theirs is a copy, made when its rollout was over and its reward known.

    Raises:
        TypeError: `rollout_worker=` is given: this trainer has one of its own.
        HarnessTypeError: A harness has no tools.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("rollout_worker") is not None:
            raise TypeError(
                "HarborAsyncGRPOTrainer brings its own rollout worker: leave rollout_worker= out, or use TRL's "
                "AsyncGRPOTrainer."
            )
        factory = kwargs.get("environment_factory")
        for build in factory.values() if isinstance(factory, Mapping) else [factory] if factory is not None else []:
            harness = type(build())
            if issubclass(harness, HarborEnv) and not tools_of(harness):
                raise HarnessTypeError(
                    f"{harness.__name__} has no tools, and HarborAsyncGRPOTrainer knows a rollout's environment by its "
                    "tools: give it a public method, or use GRPOTrainer."
                )
        super().__init__(*args, **kwargs)
        if self.rollout_worker is not None:  # None on all ranks but the first
            self.rollout_worker._loop_cls = HarborRolloutLoop  # type: ignore[attr-defined]  # TRL's own class has it


class HarborRolloutLoop(async_rollout_worker._AsyncRolloutLoop):
    """TRL's loop of the rollout worker's process, in which each rollout waits for its own verifier."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Installs its handlers of signals, which only the main thread can; the first `reset` is called from another.
        engine()

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        """Generate and score until told to stop; then, TRL waits 15 s before it kills this process."""
        loop = asyncio.get_running_loop()
        trainer = multiprocessing.parent_process()
        if trainer is not None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, stop_event.set)

            def trainer_died() -> None:
                loop.remove_reader(trainer.sentinel)
                stop_event.set()

            # Nobody else would: TRL's own stop needs a trainer that is alive.
            loop.add_reader(trainer.sentinel, trainer_died)
        work = loop.create_task(super()._run_loops(stop_event))
        stop = loop.create_task(stop_event.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            # TRL would let the rollouts in flight play to their end, whose samples nobody takes any more.
            work.cancel()
            await asyncio.wait({work})
            # Before TRL joins the threads of tool calls, which wait for their sandboxes.
            await asyncio.to_thread(engine().close)
        if not stop_event.is_set():
            work.result()
            return
        for written in (self.rollout_buffer, self._metrics_queue):
            if isinstance(written, multiprocessing.queues.Queue):
                # Else this process could not end before the trainer has read what it does not want.
                written.cancel_join_thread()

    async def _generate_one(
        self, prompt: Any, tool_dict: dict[str, Callable[..., Any]], tools: Any, group_id: int = 0
    ) -> tuple[Any, ...]:
        """Play one rollout and wait for its verifier.

        TRL hands the environment to the next rollout when this returns. What stands in the place of the rollout's
        reward is a copy of the environment, which `_score_group` hands to the reward functions.
        """
        *played, _ = await super()._generate_one(prompt, tool_dict, tools, group_id)
        environment = _environment_of(tool_dict)
        if environment is None:
            return (*played, None)
        if (outcome := environment._finish()) is not None:
            await _done(outcome)
        copy = object.__new__(type(environment))
        copy.__dict__.update(vars(environment))
        return (*played, copy)

    async def _score_group(self, group: Any) -> list[Any]:
        logged: dict[str, list[float]] = defaultdict(list)
        group.reward_kwargs["environments"] = list(group.rollout_rewards)
        group.reward_kwargs["log_metric"] = lambda name, value: logged[name].append(value)
        samples: list[Any] = await super()._score_group(group)
        if logged:
            # Pairs, of which the trainer logs the one sum over the other, over all groups since its last log.
            self._push_metrics({name: (sum(values), len(values)) for name, values in logged.items()})
        return samples


def _environment_of(tool_dict: dict[str, Callable[..., Any]]) -> HarborEnv | None:
    owners = (getattr(tool, "__self__", None) for tool in tool_dict.values())
    return next((owner for owner in owners if isinstance(owner, HarborEnv)), None)


async def _done(future: Future[Any]) -> None:
    """Wait for a future of another thread; unlike `asyncio.wrap_future`, a cancellation leaves it alone."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
