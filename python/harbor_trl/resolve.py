"""From what a user writes as `agent=` to a harness class."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable
from functools import reduce
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harbor_trl.errors import HarnessError, HarnessTypeError
from harbor_trl.options import did_you_mean

if TYPE_CHECKING:
    from harbor_trl.env import HarborEnv


def resolve_harness(agent: str | type[HarborEnv]) -> type[HarborEnv]:
    """The harness class that `agent` names.

    Args:
        agent: A key of `AGENTS`, `"package.module:Class"`, `"path/to/file.py:Class"`, or the class itself. A
            class from a file can be pickled, and unpickled in another process as long as the file is there.

    Raises:
        HarnessError: `agent` names nothing that can be loaded.
        HarnessTypeError: It names something that is not a `HarborEnv` subclass.
    """
    from harbor_trl.env import HarborEnv
    from harbor_trl.harnesses import AGENTS

    found: Any
    if not isinstance(agent, str):
        found = agent
    elif agent in AGENTS:
        found = AGENTS[agent]
    elif ":" in agent:
        # The last colon: a Windows path has one behind its drive letter.
        target, _, name = agent.rpartition(":")
        found = _attribute(_load(target, agent), name, agent)
    else:
        raise HarnessError(f"agent={agent!r} names no harness.{_meant(agent, AGENTS)} Use {_possible(list(AGENTS))}.")
    if not (isinstance(found, type) and issubclass(found, HarborEnv)):
        # Not its repr: an object may hold secrets, as os.environ does.
        what = f"the class {found.__qualname__}" if isinstance(found, type) else f"of type {type(found).__name__}"
        given = repr(agent) if isinstance(agent, str | type) else "..."
        raise HarnessTypeError(f"agent={given} is {what}, not a subclass of harbor_trl.HarborEnv")
    return found


def check_harness(agent: object) -> None:
    """Raise what `resolve_harness` would raise, as far as that can be told without importing the harness."""
    if not isinstance(agent, str) or ":" not in agent:
        resolve_harness(agent)  # type: ignore[arg-type]


def _meant(agent: str, names: Iterable[str]) -> str:
    if agent.endswith(".py"):
        return f" Did you mean '{agent}:Class', with the name of the class in it?"
    module, dot, name = agent.rpartition(".")
    if dot and name[:1].isupper():
        return f" Did you mean '{module}:{name}'?"
    return did_you_mean(agent, names)


def _possible(names: list[str]) -> str:
    built_in = ", ".join(repr(name) for name in sorted(names))
    return f"a built-in name ({built_in}), 'package.module:Class', 'path/to/file.py:Class', or a HarborEnv subclass"


def _load(target: str, agent: str) -> ModuleType:
    is_file = target.endswith(".py") or os.path.sep in target or (os.path.altsep or os.path.sep) in target
    try:
        if is_file:
            from harbor_trl import harness_files

            return harness_files.load(target)
        return importlib.import_module(target)
    except FileNotFoundError as error:
        if is_file and not os.path.exists(target):
            raise HarnessError(f"agent={agent!r}: no file {os.path.abspath(target)}") from error
        raise _failed(agent, target, error) from error
    except Exception as error:
        raise _failed(agent, target, error) from error


def _failed(agent: str, target: str, error: Exception) -> HarnessError:
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{target}.".startswith(f"{error.name}."):
        hint = ". Put the directory that holds it into PYTHONPATH, or name the file: 'path/to/file.py:Class'"
    return HarnessError(f"agent={agent!r}: importing {target} failed: {type(error).__name__}: {error}{hint}")


def _attribute(module: ModuleType, name: str, agent: str) -> object:
    from harbor_trl.env import HarborEnv

    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        harnesses = inspect.getmembers(module, lambda it: inspect.isclass(it) and issubclass(it, HarborEnv))
        own = [name for name, it in harnesses if it.__module__ == module.__name__]
        hint = f"; its harnesses: {', '.join(own)}.{did_you_mean(name, own)}" if own else "; it defines no harness"
        file = getattr(module, "__file__", None) or module.__name__
        raise HarnessError(f"agent={agent!r}: {file} has no {name!r}{hint}") from None
