"""A conformance test for harnesses: what a trainer and a failing sandbox will ask of them.

    from harbor_trl.testing import check_harness

    def test_my_harness():
        check_harness("my_harness.py:MyHarness")

Needs transformers for the tools' schemas, and Harbor and a sandbox backend for what follows a `reset`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harbor_trl.engine import engine
from harbor_trl.options import RolloutOptions

if TYPE_CHECKING:
    from harbor_trl.env import HarborEnv

__all__ = ["HarnessConformanceError", "check_harness", "harness_findings", "tools_of"]

#: Seconds within which a tool must come back from a sandbox that is not there.
DEAD_SANDBOX_SEC = 60.0

# Names that somebody gives to a helper, and that TRL would offer to the model.
_HELPERS = {"close", "cleanup", "teardown", "setup", "shutdown", "start", "stop", "step", "render", "seed", "score"}


class HarnessConformanceError(AssertionError):
    """A harness does not do what a trainer asks of it; the message lists every finding."""


def check_harness(
    agent: str | type[HarborEnv],
    *,
    tools: Iterable[str] | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    environment_type: str | None = "bubblewrap",
    task_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Check that a harness can be trained with.

    - Each public method is a tool with a schema: type hints, a description, and an `Args:` section.
    - No helper is a tool by accident, and no tool is hidden from the trainer.
    - The class, and the factory that `HarborSpec` makes of it, pickle and are usable in a fresh process.
    - Each tool returns a text when the environment was never reset, when its sandbox could not be started, and when its
      sandbox is stopped under it; it neither raises nor hangs.

    Args:
        agent: As for `HarborSpec(agent=...)`: a class, `"package.module:Class"`, `"path/to/file.py:Class"` or a name.
        tools: The names that the model is meant to see. Default: not checked, but for the names of usual helpers.
        arguments: Arguments by tool, for tools to which the values made up from their type hints mean nothing.
        environment_type: Sandbox backend, as for `HarborSpec`. None leaves out what needs a sandbox.
        task_dir: A Harbor task for the sandbox. Default: a small one on `debian:bookworm-slim`.

    Raises:
        HarnessConformanceError: There are findings.
        HarnessError, HarnessTypeError: `agent` names no harness.
        SandboxUnavailableError: The backend cannot run on this machine.
    """
    findings = harness_findings(
        agent, tools=tools, arguments=arguments, environment_type=environment_type, task_dir=task_dir
    )
    if findings:
        lines = "\n".join(f"  {number}. {finding}" for number, finding in enumerate(findings, 1))
        raise HarnessConformanceError(f"{agent!r} is not ready to train with:\n{lines}")


def harness_findings(
    agent: str | type[HarborEnv],
    *,
    tools: Iterable[str] | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    environment_type: str | None = "bubblewrap",
    task_dir: str | os.PathLike[str] | None = None,
) -> list[str]:
    """What `check_harness` would complain about; the same arguments."""
    from harbor_trl.resolve import resolve_harness

    harness = resolve_harness(agent)
    findings = [*_members(harness, None if tools is None else set(tools)), *_schemas(harness), *_pickling(harness)]
    build = functools.partial(_build, harness, environment_type or "docker")
    try:
        build(RolloutOptions())
    except Exception as error:
        signature = f"{harness.__name__}{inspect.signature(harness)}"
        return [
            *findings,
            f"{signature} cannot be built as `{harness.__name__}(environment_type, options=...)`: {error!r}. Let "
            "`__init__` take what it does not know and pass it on to `super().__init__`.",
        ]
    calls = {name: _arguments(tool, (arguments or {}).get(name, {})) for name, tool in tools_of(harness).items()}
    findings += _never_reset(build(RolloutOptions()), calls)
    if environment_type is not None:
        from harbor_trl.rollout import preflight

        preflight(environment_type, {})
        with _scratch_directory() as scratch, _failures_unsaid():
            options = RolloutOptions(trials_dir=os.path.join(scratch, "trials"), keep_trials="none")
            task = os.fspath(task_dir) if task_dir is not None else _write_task(Path(scratch, "task"))
            findings += _not_started(build(options), calls, os.path.join(scratch, "missing"))
            findings += _stopped(build(options), calls, task)
    return findings


@contextlib.contextmanager
def _failures_unsaid() -> Iterator[None]:
    """The rollouts in it fail on purpose, which would look like findings."""
    logger = logging.getLogger("harbor_trl.rollout")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _scratch_directory() -> Iterator[str]:
    """Removed in the end, also while rollouts that are over still tidy up in it."""
    path = tempfile.mkdtemp(prefix="harbor-trl-")
    try:
        yield path
    finally:
        for _ in range(100):
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.exists(path):
                break
            time.sleep(0.1)


def tools_of(harness: type[HarborEnv]) -> dict[str, Callable[..., Any]]:
    """The functions of a harness that TRL offers to the model, by name: its rule, applied to a class."""
    return {
        name: function
        for name, function in inspect.getmembers(harness, inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    }


# ── the class ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _members(harness: type[HarborEnv], wanted: set[str] | None) -> list[str]:
    findings = []
    tools = tools_of(harness)
    if not tools:
        findings.append(
            f"{harness.__name__} has no tool: TRL offers its public methods to the model, and there is none."
        )
    if wanted is not None:
        for name in sorted(tools.keys() - wanted):
            findings.append(
                f"`{name}` is public, so the model sees it as a tool: begin its name with an underscore, or add it to "
                "`tools`."
            )
        for name in sorted(wanted - tools.keys()):
            findings.append(f"`{name}` is named in `tools`, but {harness.__name__} has no public method of that name.")
    else:
        for name in sorted(tools.keys() & _HELPERS):
            findings.append(
                f"`{name}` looks like a helper, and the model sees it as a tool: call it `_{name}`, or, if it is meant "
                f"for the model, pass its name in `tools`."
            )
    for name in dir(harness):
        member = inspect.getattr_static(harness, name)
        if name.startswith("_") or not callable(getattr(member, "__func__", member)):
            continue
        if isinstance(member, classmethod) or not (inspect.isfunction(member) or isinstance(member, staticmethod)):
            findings.append(
                f"`{name}` is public and callable but no plain method ({type(member).__name__}), so the model does not "
                "see it as a tool: write it with `def`, or begin its name with an underscore."
            )
    findings += [*_shadowed(harness), *_reset_signature(harness)]
    if hasattr(harness, "get_reward"):
        findings.append(
            "`get_reward` is defined: GRPOTrainer then counts the reward twice, once by it and once by "
            "HarborSpec.reward_funcs. Remove it."
        )
    return findings


def _shadowed(harness: type[HarborEnv]) -> list[str]:
    from harbor_trl.env import HarborEnv

    own = {name for base in harness.__mro__[: harness.__mro__.index(HarborEnv)] for name in vars(base)}
    internal = {name for name in vars(HarborEnv) if name.startswith("_") and not name.startswith("__")}
    return [
        f"`{name}` replaces a method of that name that HarborEnv needs itself: choose another name."
        for name in sorted((own & internal) - {"_setup", "_exec", "_aexec"})
    ]


def _reset_signature(harness: type[HarborEnv]) -> list[str]:
    if inspect.iscoroutinefunction(harness.reset):
        return ["`reset` is async: the trainers call it and use what it returns. Write it with a plain `def`."]
    try:
        inspect.signature(harness.reset).bind(None, task_dir="", prompt=[], a_column_of_the_dataset=0)
    except TypeError as error:
        return [
            f"`reset{inspect.signature(harness.reset)}` cannot be called with the columns of a dataset: {error}. Write "
            "`def reset(self, task_dir=None, **columns)` and return `super().reset(task_dir, **columns)`."
        ]
    return []


def _schemas(harness: type[HarborEnv]) -> list[str]:
    from transformers.utils.chat_template_utils import get_json_schema

    findings = []
    for name, tool in tools_of(harness).items():
        where = f"`{name}`"
        kinds = {parameter.kind for parameter in inspect.signature(tool).parameters.values()}
        if odd := kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            findings.append(
                f"{where} takes {', '.join(sorted(kind.description for kind in odd))} parameters: the model passes "
                "named arguments only."
            )
            continue
        try:
            function = get_json_schema(tool)["function"]
        except Exception as error:
            findings.append(
                f"{where} is a tool without a schema: {error} Give each argument a type hint and a line in the "
                "docstring's `Args:` section; if it is no tool, begin its name with an underscore."
            )
            continue
        if not function.get("description", "").strip():
            findings.append(f"{where} has no description: the model sees the text above `Args:`, and there is none.")
        for argument, schema in function["parameters"]["properties"].items():
            if not schema.get("description", "").strip():
                findings.append(f"{where}: the argument `{argument}` has no description in `Args:`.")
    return findings


def _build(harness: type[HarborEnv], environment_type: str, options: RolloutOptions) -> HarborEnv:
    return harness(environment_type=environment_type, options=options)


_IN_FRESH_PROCESS = """
import pickle, sys
sys.path[:0] = pickle.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))
harness, factory = pickle.load(sys.stdin.buffer)
assert isinstance(factory(), harness)
"""


def _pickling(harness: type[HarborEnv]) -> list[str]:
    """AsyncGRPOTrainer builds the environments in a spawned process."""
    from harbor_trl import HarborSpec

    where = f"{harness.__module__}.{harness.__qualname__}"
    hint = "Define it at the top level of a module that can be imported, not in a function or in a script that is run."
    try:
        factory = HarborSpec(os.devnull, agent=harness)._factory()
        data = pickle.dumps((harness, factory))
    except Exception as error:
        return [f"The class {where} does not pickle, so AsyncGRPOTrainer cannot use it: {error!r}. {hint}"]
    if harness.__module__ == "__main__":
        return [f"The class {where} cannot be found by a spawned process. {hint}"]
    path = pickle.dumps(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _IN_FRESH_PROCESS],
        input=f"{len(path)}\n".encode() + path + data,
        capture_output=True,
        timeout=300,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return [f"The class {where} cannot be used in a fresh process: {said[-1] if said else 'it died'}. {hint}"]
    return []


# ── the tools ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _arguments(tool: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Named arguments for a call, made up where there is no default and none is given."""
    hints = _hints(tool)
    made_up = {
        name: _example(hints.get(name))
        for name, parameter in list(inspect.signature(tool).parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return {**made_up, **given}


def _hints(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(tool)
    except Exception:
        return {}


def _example(hint: Any) -> Any:
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return choices[0]
    if origin in (typing.Union, types.UnionType):
        return _example(choices[0])
    examples: dict[Any, Any] = {bool: True, int: 1, float: 1.0, list: [], tuple: [], dict: {}}
    return examples.get(origin or hint, "true")


def _never_reset(env: HarborEnv, calls: Mapping[str, dict[str, Any]]) -> list[str]:
    findings = _call_all(env, calls, "on an environment that was never reset")
    try:
        reward = env.reward
    except Exception as error:
        return [*findings, f"`reward` of an environment that was never reset raises {error!r}; it must be 0.0."]
    if reward != 0.0:
        findings.append(f"`reward` of an environment that was never reset is {reward!r}; it must be 0.0.")
    return findings


def _not_started(env: HarborEnv, calls: Mapping[str, dict[str, Any]], missing: str) -> list[str]:
    when = "when its sandbox could not be started"
    try:
        env.reset(task_dir=missing)
    except Exception as error:
        return [f"`reset` raises {when}, which ends the training run: {error!r}"]
    return [*_call_all(env, calls, when), *_reward(env, when)]


def _stopped(env: HarborEnv, calls: Mapping[str, dict[str, Any]], task: str) -> list[str]:
    when = "when its sandbox is stopped under it"
    text = env.reset(task_dir=task)
    if not isinstance(text, str):
        return [f"`reset` returns {type(text).__name__}, not the text that is appended to the prompt."]
    try:
        sandbox = env._env
        assert sandbox is not None
    except Exception as error:
        return [f"`_setup` failed in a sandbox of {task}: {error}. A task that has what the harness needs: `task_dir`."]
    engine().run(sandbox.stop(delete=False))
    return [*_call_all(env, calls, when), *_reward(env, when)]


def _reward(env: HarborEnv, when: str) -> list[str]:
    try:
        _ = env.reward
    except Exception as error:
        return [f"`reward` raises {when}, which ends the training run: {error!r}"]
    return []


def _call_all(env: HarborEnv, calls: Mapping[str, dict[str, Any]], when: str) -> list[str]:
    findings = []
    for name, arguments in calls.items():
        shown = f"`{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})`"
        result = _within(DEAD_SANDBOX_SEC, functools.partial(getattr(env, name), **arguments))
        if result is _HANGS:
            findings.append(f"{shown} has not come back after {DEAD_SANDBOX_SEC:g} s {when}.")
            return findings
        if isinstance(result, BaseException):
            findings.append(
                f"{shown} raises {result!r} {when}. Return a text that says what is wrong: `_exec` does so by itself, "
                "`_env` raises SandboxLostError."
            )
        elif not isinstance(result, str | list):
            findings.append(f"{shown} returns {type(result).__name__} {when}, not a text: {result!r}")
    return findings


_HANGS = object()


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; `_HANGS` if it takes longer."""
    results: list[Any] = []

    def run() -> None:
        try:
            value = call()
            results.append(asyncio.run(value) if inspect.iscoroutine(value) else value)
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else _HANGS


def _write_task(directory: Path) -> str:
    for name, text in {
        "task.toml": "",
        "instruction.md": "Nothing is to be done.\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return os.fspath(directory)
