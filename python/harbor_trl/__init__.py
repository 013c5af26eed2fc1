"""Train an LLM with TRL's `GRPOTrainer` on any Harbor task suite.

    from harbor_trl import HarborSpec

    spec = HarborSpec("path/or/hub-repo", agent="bash", num_tasks=64)

Importing this package imports none of harbor, torch, trl, transformers, datasets: each is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harbor_trl.errors import HarborTrlError

if TYPE_CHECKING:
    from harbor_trl.checks import Finding, check
    from harbor_trl.env import HarborEnv
    from harbor_trl.harnesses import AGENTS, HarborBashEnv, HarborTerminalEnv
    from harbor_trl.spec import HarborSpec

__all__ = [
    "AGENTS",
    "Finding",
    "HarborBashEnv",
    "HarborEnv",
    "HarborSpec",
    "HarborTerminalEnv",
    "HarborTrlError",
    "check",
]

_HOME = {
    "AGENTS": "harbor_trl.harnesses",
    "Finding": "harbor_trl.checks",
    "HarborBashEnv": "harbor_trl.harnesses",
    "HarborEnv": "harbor_trl.env",
    "HarborSpec": "harbor_trl.spec",
    "HarborTerminalEnv": "harbor_trl.harnesses",
    "check": "harbor_trl.checks",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
