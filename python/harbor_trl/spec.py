"""`HarborSpec`: one suite and one harness, as the three arguments that a TRL trainer takes."""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harbor_trl.errors import SuiteError
from harbor_trl.options import KeepTrials, RolloutOptions, did_you_mean, integer, require_one_of
from harbor_trl.resolve import check_harness, resolve_harness

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from harbor_trl.env import HarborEnv
    from harbor_trl.suite import BrokenTask, Suite, TaskTable

logger = logging.getLogger(__name__)

_REPO_ADDRESS = re.compile(r"\bdatasets/(\w[\w.-]*/[\w.-]+)")


class HarborSpec:
    """One suite of Harbor tasks and one harness, for TRL's `GRPOTrainer`.

        spec = HarborSpec("org/suite", agent="bash", num_tasks=64)
        trainer = GRPOTrainer(
            ...,
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
        )

    Nothing is read, downloaded or imported before the first use of a property; each is computed once.

    Args:
        dataset: A local directory, or the id `owner/name` of a dataset repo on the Hugging Face hub; a directory that
            exists wins. Its tasks are the directories with a `task.toml` at any depth, or the directory itself. If
            there are any below its folder `tasks`, only those count. They are ordered by path, component by component.
        agent: The harness, which is the tools that the policy gets: a key of `AGENTS`, `"package.module:Class"`,
            `"path/to/file.py:Class"`, or a `HarborEnv` subclass. Default: `"bash"`.
        environment_type: Where sandboxes run, handed to Harbor: `"docker"`, `"bubblewrap"` (ours), `"e2b"`, ..., or
            `"package.module:Class"`. Default: `"docker"`.
        num_tasks: Take the first so many tasks. Default: all.
        indices: Take the tasks at these positions of the suite, in this order, repeats allowed. Not with `num_tasks`.
        include_metadata: Add the columns of metadata to `train_dataset`.
        on_invalid: What to do about tasks that can never give a reward, because Harbor or the backend refuses them or
            their image cannot be built (the errors of `harbor_trl.check`, and what the backend lacks): `"raise"` an
            error that lists them, or `"skip"` them with one warning.
        revision: Branch, tag or commit of a hub repo.
        environment_kwargs: Options of the backend, for Harbor's `EnvironmentConfig`.
        reward_key: Which key of the verifier's rewards is the scalar. Default: `reward`, else the only key.
        trials_dir: Directory of the trial directories. Default: `harbor-trl-trials` in the working directory.
        keep_trials: Which trial directories stay: `"failed"`, `"all"` or `"none"`.
        max_sandboxes: Sandboxes of one process that may exist at once. Default: no limit of our own.
        start_timeout: Seconds from `reset` to a sandbox that is up. Default: the task's own build timeout.
        repair_copies: Put the files that a task's Dockerfile COPYs into the sandbox after its start. Default: on
            backends that are known to drop them.
        output_limit: Characters of output that a tool call returns. Default: 8,000.
        give_up_after: End the run with an error when the first so many rollouts of a process have all failed for
            reasons that no policy can cause. Once one has had a verdict, failures never end the run. None: never.

    Raises:
        SuiteError: `num_tasks` and `indices` are both given. From the properties: no such suite, no task in it, a
            selection that does not fit it, tasks that cannot be used.
        HubError: From the properties: the repo cannot be listed or downloaded.
        HarnessError: `agent` names no harness.
        HarnessTypeError: `agent` is not a `HarborEnv` subclass.
        SandboxUnavailableError: From `environment_factory`: the backend does not exist, or cannot run on this machine.
        ValueError: An option is out of range. From `environment_factory`: `environment_kwargs` or `trials_dir` cannot
            be used.
        TypeError: An option has the wrong type.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        agent: str | type[HarborEnv] = "bash",
        environment_type: str = "docker",
        num_tasks: int | None = None,
        indices: Iterable[int] | None = None,
        include_metadata: bool = True,
        on_invalid: Literal["raise", "skip"] = "raise",
        revision: str | None = None,
        environment_kwargs: Mapping[str, Any] | None = None,
        reward_key: str | None = None,
        trials_dir: str | os.PathLike[str] | None = None,
        keep_trials: KeepTrials = "failed",
        max_sandboxes: int | None = None,
        start_timeout: float | None = None,
        repair_copies: bool | None = None,
        output_limit: int | None = None,
        give_up_after: int | None = 32,
    ) -> None:
        if num_tasks is not None and indices is not None:
            raise SuiteError("num_tasks and indices exclude each other: give one of them.")
        require_one_of("on_invalid", on_invalid, ("raise", "skip"))
        if not isinstance(dataset, str | os.PathLike):
            raise TypeError(
                f"dataset={dataset!r}: name a directory, or a dataset repo owner/name on the Hugging Face hub."
            )
        if not isinstance(trials_dir, str | os.PathLike | None):
            raise TypeError(f"trials_dir={trials_dir!r}: name a directory.")
        if not isinstance(revision, str | None):
            raise TypeError(f"revision={revision!r}: name a branch, tag or commit.")
        if indices is not None and (isinstance(indices, str) or not isinstance(indices, Iterable)):
            raise TypeError(f"indices={indices!r}: use a list of positions, such as [3, 1, 4].")
        if not isinstance(environment_type, str):
            raise TypeError(
                f"environment_type={environment_type!r}: name the backend of the sandboxes, such as 'docker'."
            )
        check_harness(agent)
        self._dataset = dataset
        self._agent = agent
        self._environment_type = environment_type
        self._num_tasks = None if num_tasks is None else integer("num_tasks", num_tasks)
        self._indices = None if indices is None else [integer("indices", index) for index in indices]
        self._include_metadata = include_metadata
        self._on_invalid = on_invalid
        self._revision = revision
        self._options = RolloutOptions(
            environment_kwargs=copy.deepcopy(environment_kwargs or {}),
            reward_key=reward_key,
            trials_dir=None if trials_dir is None else os.fspath(trials_dir),
            keep_trials=keep_trials,
            max_sandboxes=max_sandboxes,
            start_timeout=start_timeout,
            repair_copies=repair_copies,
            give_up_after=give_up_after,
            **({} if output_limit is None else {"output_limit": output_limit}),
        )

    def __repr__(self) -> str:
        # Reads nothing: how many tasks there are is said once that is known.
        if "_tasks" in self.__dict__:
            chosen = f"{_count(len(self._tasks.table), 'task')}, "
        elif self._indices is not None:
            chosen = f"indices={reprlib.repr(self._indices)}, "
        else:
            chosen = "" if self._num_tasks is None else f"num_tasks={self._num_tasks}, "
        suite = os.fspath(self._dataset)
        return f"HarborSpec({suite!r}, {chosen}agent={self._agent!r}, environment_type={self._environment_type!r})"

    @cached_property
    def train_dataset(self) -> datasets.Dataset:
        """One row a task, for TRL's `train_dataset`.

        Columns: `prompt` (an empty user message, to which TRL appends what `reset` returns), `task_dir` (absolute),
        `task_index` (position in the suite), and with `include_metadata` `task_id`, `task_name`, `gold_answer`,
        `reward_mode`, `difficulty_level`, `kaggle_dataset` and each other key of `[metadata]`.

        A run needs this and `environment_factory`; whichever is read second also refuses tasks that can never give a
        reward on this backend. `on_invalid="skip"` leaves them out here.
        """
        from datasets import Dataset
        from datasets.table import InMemoryTable

        table = self._tasks.table
        if not self._include_metadata:
            table = table.select(["task_dir", "task_index"])
        table = table.add_column(0, "prompt", _empty_prompts(len(table)))
        if "environment_factory" in self.__dict__:
            self._refuse_unusable()
        return Dataset(InMemoryTable(table), fingerprint=_fingerprint(table))

    @cached_property
    def environment_factory(self) -> Callable[[], HarborEnv]:
        """Makes a fresh environment, for TRL's `environment_factory`; takes no argument and pickles.

        Also checks that rollouts can be run at all: backend, its options, `trials_dir`. Starts no sandbox.
        """
        from harbor_trl.env import require_usable

        factory = self._factory()
        # The trainer asks for this before it loads a model; in the first rollout an error would cost much more.
        require_usable(self._environment_type, self._options)
        if "train_dataset" in self.__dict__:
            self._refuse_unusable()
        return factory

    def _factory(self) -> Callable[[], HarborEnv]:
        harness = resolve_harness(self._agent)
        if self._options == RolloutOptions():
            return functools.partial(harness, environment_type=self._environment_type)
        return functools.partial(harness, environment_type=self._environment_type, options=self._options)

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """The verifier's reward of each rollout, for TRL's `reward_funcs`. `None` leaves a rollout out."""
        from harbor_trl.rewards import outcome_reward

        return outcome_reward

    @property
    def broken_tasks(self) -> list[BrokenTask]:
        """The chosen tasks that `on_invalid="skip"` left out."""
        return list(self._tasks.broken)

    @cached_property
    def _tasks(self) -> TaskTable:
        from harbor_trl.checks import usable_tasks
        from harbor_trl.suite import listed

        suite, positions = self._suite
        tasks = suite.tasks(positions)
        # One error that lists all: broken TOML is known by now, the rest costs more and otherwise waits for the run.
        if tasks.broken or self._on_invalid == "skip":
            tasks = usable_tasks(suite, positions, *self._backend)
        if problems := suite.problems:
            logger.warning("%s: %d thing(s) in the tree are no task:\n%s", suite.root, len(problems), listed(problems))
        if tasks.json_columns and self._include_metadata:
            logger.warning(
                "%s: metadata whose values have no common type is JSON text in these columns: %s",
                suite.root,
                ", ".join(tasks.json_columns),
            )
        if tasks.broken:
            if self._on_invalid == "raise":
                raise self._refusal(tasks.broken)
            if not len(tasks.table):
                raise self._refusal(tasks.broken, "no chosen task is left, ")
            count = f"{len(tasks.broken)} of {_count(len(suite), 'task')} cannot be used"
            warnings.warn(
                f"{suite.root}: {count} and are left out; HarborSpec.broken_tasks lists them",
                stacklevel=_levels_to_the_user(),
            )
        return tasks

    def _refusal(self, broken: Sequence[BrokenTask], prefix: str = "") -> SuiteError:
        from harbor_trl.suite import listed

        suite, _ = self._suite
        return SuiteError(
            f"{suite.root}: {prefix}{len(broken)} of {_count(len(suite), 'task')} cannot be used "
            "(on_invalid='skip' leaves them out; "
            f"harbor-trl check --backend {self._environment_type} finds all that is wrong):\n{listed(broken)}"
        )

    @property
    def _backend(self) -> tuple[str, Mapping[str, Any]]:
        return self._environment_type, self._options.environment_kwargs

    def _refuse_unusable(self) -> None:
        """Costs several times what reading the suite does, so that is left to when a run is about to begin."""
        from harbor_trl.checks import unusable_tasks

        suite, positions = self._suite
        if self._on_invalid == "raise" and (unusable := unusable_tasks(suite, positions, *self._backend)):
            raise self._refusal(list(unusable.values()))

    @cached_property
    def _suite(self) -> tuple[Suite, list[int] | None]:
        return self._open()

    def _open(self) -> tuple[Suite, list[int] | None]:
        """The suite, and the positions of the chosen tasks; `None` for all."""
        from harbor_trl.hub import download_suite, select_tasks
        from harbor_trl.suite import REPO_ID, Suite, open_suite

        path = Path(self._dataset).expanduser()
        everything = self._num_tasks is None and self._indices is None
        if not path.exists():
            if not isinstance(self._dataset, str) or not REPO_ID.fullmatch(self._dataset):
                given = os.fspath(self._dataset)
                if repo := _REPO_ADDRESS.search(given):
                    meant = f" Did you mean {repo[1]!r}?"
                else:
                    # Not every directory may be listed.
                    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK) and path.parent.is_dir() else []
                    meant = did_you_mean(path.name, beside)
                raise SuiteError(
                    f"There is no directory {path.absolute()}, and {given!r} is not the id of a dataset repo on the "
                    f"Hugging Face hub (owner/name).{meant}"
                )
            hub = download_suite(
                self._dataset, revision=self._revision, num_tasks=self._num_tasks, indices=self._indices
            )
            return Suite(hub.root, task_ids=hub.task_ids), hub.selected
        if self._revision is not None:
            raise SuiteError(
                f"{path.absolute()} is a local directory: revision={self._revision!r} does not apply to it."
            )
        suite = open_suite(path, read=everything)
        if not len(suite):
            problems = f":\n{'\n'.join(f'  {problem}' for problem in suite.problems)}" if suite.problems else ""
            raise SuiteError(
                f"{suite.root}: no task in it. A task is a directory with a task.toml; hidden directories are not "
                f"searched{problems}"
            )
        if everything:
            return suite, None
        return suite, select_tasks(
            len(suite), num_tasks=self._num_tasks, indices=self._indices, suite=os.fspath(suite.root)
        )


def _levels_to_the_user() -> int:
    """The `stacklevel` with which the caller's warning points at the line that read a property of the spec."""
    own = (os.path.dirname(__file__) + os.sep, functools.cached_property.__get__.__code__.co_filename)
    frame, levels = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(own) and frame.f_back is not None:
        frame, levels = frame.f_back, levels + 1
    return levels


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _empty_prompts(count: int) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    messages = pa.StructArray.from_arrays([pa.repeat("user", count), pa.repeat("", count)], names=["role", "content"])
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), messages)


def _fingerprint(table: pa.Table) -> str:
    """Of the content, so that `datasets` finds what it cached for the same suite; its own way pickles the table."""
    from datasets.fingerprint import Hasher

    parts: list[Any] = [table.schema.serialize()]
    for column in table.columns:
        for chunk in column.chunks:
            parts.append(f"{chunk.type} {chunk.offset} {len(chunk)}".encode())
            for buffer in chunk.buffers():
                parts.append(b"none" if buffer is None else f"{buffer.size} ".encode())
                if buffer is not None:
                    parts.append(buffer)
    digest: str = Hasher.hash_bytes(parts)
    return digest
