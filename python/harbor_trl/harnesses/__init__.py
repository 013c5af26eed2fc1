"""The built-in harnesses: which tools the policy gets, and what it is told about them.

`jupyter` and `terminal_notes` are the folders `harnesses/jupyter` and `harnesses/terminal_notes` of the repository.
"""

from __future__ import annotations

from harbor_trl.env import HarborEnv
from harbor_trl.harnesses.shell import HarborBashEnv, HarborTerminalEnv

__all__ = ["AGENTS", "HarborBashEnv", "HarborTerminalEnv"]


def _built_in() -> dict[str, type[HarborEnv]]:
    # These two import `HarborBashEnv` from `harbor_trl`, as a harness of a user's does.
    from harbor_trl.harnesses.jupyter.env import JupyterEnv
    from harbor_trl.harnesses.terminal_notes.env import TerminalNotesEnv

    return {
        "bash": HarborBashEnv,
        "terminal": HarborTerminalEnv,
        "jupyter": JupyterEnv,
        "terminal_notes": TerminalNotesEnv,
    }


#: The built-in harnesses by name, for `HarborSpec(agent=...)`. Add your own to it under a name of your choice.
AGENTS: dict[str, type[HarborEnv]] = _built_in()
