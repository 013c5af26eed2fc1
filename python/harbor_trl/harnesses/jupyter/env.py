"""`JupyterEnv`: a stateful Python kernel in the sandbox, and a shell."""

from __future__ import annotations

import binascii
import functools
from pathlib import Path

from harbor_trl import HarborBashEnv
from harbor_trl.errors import UnsupportedTaskError

#: Seconds after which a cell is interrupted.
CELL_TIMEOUT_SEC = 120
# To interrupt a cell, and to kill and start anew a kernel that does not react.
_GRACE_SEC = 30
_START_TIMEOUT_SEC = 90

# Printed by kernel.py, which says what they mean.
_UNREACHABLE = "@@harbor-trl: the kernel cannot be reached@@"
_CUT_OFF = "@@harbor-trl: the kernel is gone@@"
_LOST = "All variables, functions and imports are gone, files are still there: run again the cells that you still need."

_FIND_DIRECTORY = """\
for d in /dev/shm /tmp /var/tmp "$HOME"; do d=$d/.harbor-trl-jupyter; [ -S "$d/socket" ] && break; d=; done
[ -n "$d" ] && """

_NO_PYTHON = "no Python 3.8 or newer"
_START = f"""\
old=
for p in python3 python python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 ''; do
  [ -n "$p" ] && command -v "$p" >/dev/null || continue
  "$p" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null && break
  old="$old, $p is $("$p" -c 'import sys; print(sys.version.split()[0])' 2>&1)"
done
if [ -z "$p" ]; then echo "{_NO_PYTHON}$old"; else printf %s '@SOURCE@' | "$p" -c '
import binascii, sys
source = binascii.a2b_base64(sys.stdin.buffer.read())
space = {{"__name__": "install"}}
exec(compile(source, "kernel.py", "exec"), space)
print(space["install"](source))
'; fi
"""


class JupyterEnv(HarborBashEnv):
    """`run_cell` in a Python kernel that keeps its state, `restart_kernel`, and `bash`.

    The kernel is the sandbox's own Python (3.8 or newer; ipykernel where it is installed): nothing is downloaded. A
    task whose image has no Python fails in `_setup`, so its rollouts are left out (reward None).
    """

    PROMPT_SUFFIX = (
        "\n\nYou work in a Linux sandbox with a Jupyter-like Python kernel. The tool `run_cell` runs Python code in it "
        "and returns what the cell printed and the value of its last expression; variables and imports stay for the "
        "next cell. The tool `bash` runs a shell command, and `restart_kernel` gives you a fresh kernel. Input files, "
        "if any, are in /home/user/input. If the task asks for an answer and names no file for it, write the answer "
        "alone to /workdir/answer.txt. An answer in your message is not read. When you are done, stop calling tools."
    )

    async def _setup(self) -> None:
        await super()._setup()
        assert self._env is not None
        started = await self._env.exec(_start_command(), timeout_sec=_START_TIMEOUT_SEC)
        said = f"{started.stdout or ''}{started.stderr or ''}".strip()
        if _NO_PYTHON in said:
            old = said.rpartition(f"{_NO_PYTHON}, ")[2] if f"{_NO_PYTHON}, " in said else ""
            raise UnsupportedTaskError(
                "The jupyter harness needs Python 3.8 or newer in the task's image, as `python3` or `python` on PATH, "
                f"and this image has none{f' ({old[:200]})' if old else ''}: use agent='terminal' for this task, or "
                "leave it out (HarborSpec(indices=...))."
            )
        if not said.startswith("ready "):
            raise RuntimeError(f"The jupyter harness could not start its kernel in the sandbox: {said[-1000:]}")

    def run_cell(self, code: str) -> str:
        """
        Run Python code as the next cell of a notebook. Variables, functions and imports stay for later cells. Returns
        what the cell printed, the value of its last expression, and the traceback if it failed. Plots and other images
        are saved to a file whose name is returned. A cell is interrupted after 120 seconds; variables survive that.

        Args:
            code: The Python code, for example `import math` and in the next line `math.sqrt(2)`.

        Returns:
            The output of the cell.
        """
        if not isinstance(code, str) or not code.strip():
            return "[nothing was run: `code` must be a text with Python code in it]"
        encoded = binascii.b2a_base64(code.encode("utf-8", "surrogatepass"), newline=False).decode()
        text = self._ask(f"printf %s {encoded} | ", f"run {CELL_TIMEOUT_SEC}", CELL_TIMEOUT_SEC + _GRACE_SEC)
        if _UNREACHABLE in text:
            return self._start_again("The kernel was gone, so this cell was not run.")
        if _CUT_OFF in text:
            return text.replace(_CUT_OFF, self._start_again("The kernel was killed while this cell ran."))
        return text

    def restart_kernel(self) -> str:
        """
        Start a fresh Python kernel, for instance when the old one hangs or its memory is full. All variables, functions
        and imports are lost. Files stay.

        Returns:
            Whether the new kernel runs.
        """
        text = self._ask("", "restart", _START_TIMEOUT_SEC)
        if _UNREACHABLE in text or _CUT_OFF in text:
            return self._start_again("The kernel was gone.")
        return text

    def _ask(self, pipe: str, request: str, timeout: float) -> str:
        client = f'"$d/python" -I -S "$d/kernel.py" client {request}'
        return self._exec(f"{_FIND_DIRECTORY}{pipe}{client} || echo '{_UNREACHABLE}'", timeout=timeout)

    def _start_again(self, reason: str) -> str:
        said = self._exec(_start_command(), timeout=_START_TIMEOUT_SEC).strip()
        if said.startswith("ready "):
            return f"[{reason} A new one is running. {_LOST}]"
        return f"[{reason} A new one cannot be started: {said[-500:]}. The bash tool may still work.]"


@functools.cache
def _start_command() -> str:
    source = Path(__file__).with_name("kernel.py").read_bytes()
    return _START.replace("@SOURCE@", binascii.b2a_base64(source, newline=False).decode())
