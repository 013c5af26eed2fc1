"""`TerminalNotesEnv`: a shell with background processes, and notes that outlive the policy's context."""

from __future__ import annotations

import functools
import re
import secrets
import shlex
from pathlib import Path
from typing import Any

from harbor_trl import HarborEnv

#: Processes that are kept at once, running or ended.
MAX_PROCESSES = 8
#: Bytes of one process's output that are kept; the rest is thrown away.
MAX_PROCESS_OUTPUT_BYTES = 8 << 20
#: Seconds that `read_output` waits at most.
MAX_WAIT_SEC = 60
MAX_NOTES = 50
MAX_NOTE_CHARS = 4_000
MAX_TITLE_CHARS = 100

_SHELL_TIMEOUT_SEC = 30
# As a file, so that `ps` shows a short line for each process. The directory is the first that can be written.
_RUN = """\
for d in /tmp /var/tmp /dev/shm "$HOME"; do [ -w "$d" ] && break; done
d=$d/.harbor-trl-{token}
[ -s "$d/processes.sh" ] || {{ mkdir -p "$d" && cat >"$d/processes.sh" <<'END-OF-SCRIPT'
{script}
END-OF-SCRIPT
}} || echo "[the sandbox cannot make files in $d]"
# The mark by which a call's own processes are found, to be killed at its deadline: these outlive their call.
unset HARBOR_TRL_EXEC
exec sh "$d/processes.sh" {words}
"""
_REPORT = re.compile(r"@@process (\d+) state=(\S*) size=(\d+)@@\n?")


class TerminalNotesEnv(HarborEnv):
    """Six shell tools and four notes tools.

    Background processes live in the sandbox; an image with nothing but `sh` is enough. Notes live in this object, on
    the trainer's side, until the next `reset`.
    """

    PROMPT_SUFFIX = (
        "\n\nYou work in a Linux sandbox. `run_command` runs a shell command and returns what it printed. For what "
        "runs long or needs input, use `start_process`, `read_output`, `send_input`, `stop_process` and "
        "`list_processes`. "
        "Keep what you must not forget with `write_note`: notes stay when older messages are cut away. "
        "`search_notes` lists them, `read_note` shows one, `delete_note` removes one. "
        "Input files, if any, are in /home/user/input. "
        "If the task asks for an answer and names no file for it, write the answer alone to /workdir/answer.txt. An "
        "answer in your message is not read. When you are done, stop calling tools."
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begin()

    def _begin(self) -> None:
        self._notes: dict[str, str] = {}
        self._commands: dict[int, str] = {}
        self._read: dict[int, int] = {}
        self._last_id = 0
        #: Names the directory of the processes' files in the sandbox.
        self._token = secrets.token_hex(6)

    def reset(self, task_dir: str | None = None, **columns: Any) -> str:
        """Begin a rollout, with no notes and no processes; see `HarborEnv.reset`."""
        self._begin()
        return super().reset(task_dir, **columns)

    async def _setup(self) -> None:
        assert self._env is not None
        await self._env.exec("mkdir -p /workdir /home/user/input && chmod 777 /workdir", user="root")

    # ── shell ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_command(self, command: str) -> str:
        """
        Run a shell command, wait until it ends, and return what it printed (standard output and error). Each call is a
        new shell: variables and `cd` do not carry over, files do. It is stopped after 180 seconds; start what takes
        longer with start_process.

        Args:
            command: The shell command, for example `ls -l`.

        Returns:
            What the command printed.
        """
        if not _is_text(command):
            return _wrong("command", "a text with a shell command in it, for example `ls -l`")
        return self._exec(command)

    def start_process(self, command: str) -> str:
        """
        Start a shell command in the background and return at once, with the number of the process. Use it for servers,
        for programs that ask for input, and for what takes minutes.

        Args:
            command: The shell command, for example `python3 -m http.server 8000`.

        Returns:
            The number of the process, for the other tools, and its first output.
        """
        if not _is_text(command):
            return _wrong("command", "a text with a shell command in it, for example `python3 server.py`")
        if len(self._commands) >= MAX_PROCESSES:
            self._forget_ended()
        if len(self._commands) >= MAX_PROCESSES:
            return (
                f"[not started: {MAX_PROCESSES} processes run already, which is the most. Stop one with stop_process.]"
            )
        number = self._last_id + 1
        text, state = self._act("start", number, command, MAX_PROCESS_OUTPUT_BYTES // 1024)
        if state is None:
            return text
        self._last_id = number
        self._commands[number] = command
        return _join(f"[process {number} started, {self._describe(number, state)}]", text)

    def read_output(self, process_id: int, wait_seconds: int = 5) -> str:
        """
        Return what a background process printed since it was last read. If there is nothing new, wait for it a little.

        Args:
            process_id: The number that start_process gave.
            wait_seconds: How many seconds to wait for new output at most; 0 to 60.

        Returns:
            The new output, and whether the process still runs.
        """
        number = self._known(process_id)
        if isinstance(number, str):
            return number
        wait = _number(wait_seconds)
        if wait is None:
            return _wrong("wait_seconds", f"a number from 0 to {MAX_WAIT_SEC}")
        return self._new_output(number, int(min(max(wait, 0), MAX_WAIT_SEC)))

    def send_input(self, process_id: int, text: str, press_enter: bool = True, end_of_input: bool = False) -> str:
        """
        Type text into a background process, as if on its keyboard, and return what it prints next.

        Args:
            process_id: The number that start_process gave.
            text: The text. It may have several lines, and it may be empty.
            press_enter: Whether to end the text with the Enter key.
            end_of_input: Whether this was the last input (Ctrl-D); many programs then finish.

        Returns:
            What the process printed since it was last read.
        """
        number = self._known(process_id)
        if isinstance(number, str):
            return number
        if not isinstance(text, str) or "\0" in text:
            return _wrong("text", "a text without NUL characters")
        answer, state = self._act("send", number, text + ("\n" if press_enter else ""), int(end_of_input))
        if state is None:
            return answer
        if state != "running":
            return _join(self._new_output(number, 0), "[the input was not sent: the process has ended]")
        return _join(answer, self._new_output(number, 2))

    def stop_process(self, process_id: int) -> str:
        """
        Stop a background process and all that it started.

        Args:
            process_id: The number that start_process gave.

        Returns:
            The output that was not read yet, and how the process ended.
        """
        number = self._known(process_id)
        if isinstance(number, str):
            return number
        text, state = self._act("stop", number, self._read.get(number, 0))
        if state is None:
            return text
        self._forget(number)
        return _join(text, f"[process {number}: {self._describe(number, state)}; its output is not kept]")

    def list_processes(self) -> str:
        """
        List the background processes: number, whether each still runs, its command.

        Returns:
            One line for each process.
        """
        if not self._commands:
            return self._exec("echo '[there are no background processes: start_process starts one]'")
        text, states = self._states()
        if states is None:
            return text
        return "\n".join(
            f"{number}: {self._describe(number, states.get(number, 'gone'))}: {_shortened(command)}"
            for number, command in self._commands.items()
        )

    # ── notes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def write_note(self, title: str, text: str) -> str:
        """
        Keep a note, for instance a plan, a result or a file name that you will need later. A note of the same title is
        replaced.

        Args:
            title: A short title, by which you find the note again.
            text: What to keep.

        Returns:
            Whether the note was kept.
        """
        if not _is_text(title) or len(title.strip()) > MAX_TITLE_CHARS:
            return _wrong("title", f"a text of 1 to {MAX_TITLE_CHARS} characters")
        if not isinstance(text, str):
            return _wrong("text", "a text")
        if len(text) > MAX_NOTE_CHARS:
            return (
                f"[not kept: the text has {len(text)} characters, a note at most {MAX_NOTE_CHARS}. Shorten it, split "
                "it over several notes, or write it to a file.]"
            )
        title = title.strip()
        if title not in self._notes and len(self._notes) >= MAX_NOTES:
            return f"[not kept: there are {MAX_NOTES} notes, which is the most. Remove one with delete_note.]"
        known = title in self._notes
        self._notes[title] = text
        return f"[note {title!r} {'replaced' if known else 'kept'}; {len(self._notes)} of {MAX_NOTES} notes]"

    def read_note(self, title: str) -> str:
        """
        Return the text of a note.

        Args:
            title: The title of the note.

        Returns:
            The text of the note.
        """
        found = self._find(title)
        return self._notes[found] if found is not None else self._no_note(title)

    def search_notes(self, query: str = "") -> str:
        """
        List the notes, or those that contain a word.

        Args:
            query: A word or phrase to look for in titles and texts, in upper or lower case. Leave it empty to list all.

        Returns:
            The titles, each with the first line that fits.
        """
        wanted = query.strip().casefold() if isinstance(query, str) else ""
        lines = []
        for title, text in self._notes.items():
            fitting = [line for line in text.splitlines() if wanted in line.casefold()]
            if fitting or wanted in title.casefold():
                lines.append(f"{title}: {_shortened(fitting[0] if fitting else text)}")
        if lines:
            return "\n".join(lines)
        if not self._notes:
            return "[there are no notes: write_note keeps one]"
        return f"[none of the {len(self._notes)} notes contains {query!r}; an empty query lists all]"

    def delete_note(self, title: str) -> str:
        """
        Remove a note.

        Args:
            title: The title of the note.

        Returns:
            Whether the note was removed.
        """
        found = self._find(title)
        if found is None:
            return self._no_note(title)
        del self._notes[found]
        return f"[note {found!r} removed; {len(self._notes)} left]"

    def _find(self, title: object) -> str | None:
        if not isinstance(title, str):
            return None
        wanted = title.strip()
        if wanted in self._notes:
            return wanted
        alike = [it for it in self._notes if it.casefold() == wanted.casefold()]
        return alike[0] if len(alike) == 1 else None

    def _no_note(self, title: object) -> str:
        if not self._notes:
            return f"[there is no note {title!r}, nor any other: write_note keeps one]"
        return f"[there is no note {title!r}. The notes are: {', '.join(map(repr, self._notes))}]"

    # ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _known(self, process_id: object) -> int | str:
        number = _number(process_id)
        if number is not None and number in self._commands:
            return int(number)
        if not self._commands:
            # Also what says that there is no sandbox at all.
            return self._exec("echo '[there are no background processes: start_process starts one]'")
        return f"[there is no process {process_id!r}. The processes are: {', '.join(map(str, self._commands))}]"

    def _run_script(self, *arguments: object, timeout: float = _SHELL_TIMEOUT_SEC) -> str:
        """Run processes.sh."""
        words = " ".join(shlex.quote(str(it)) for it in arguments)
        return self._exec(_RUN.format(token=self._token, script=_script(), words=words), timeout=timeout)

    def _act(self, action: str, number: int, *arguments: object) -> tuple[str, str | None]:
        """Run an action on one process. Returns text, and the process's state; None if the sandbox gave none."""
        timeout = _SHELL_TIMEOUT_SEC + (float(str(arguments[1])) if action == "read" else 0)
        text = self._run_script(action, number, *arguments, timeout=timeout)
        reports = list(_REPORT.finditer(text))
        if not reports:
            return text, None
        last = reports[-1]
        if action in ("read", "start"):
            self._read[number] = int(last[3])
        return (text[: last.start()] + text[last.end() :]).rstrip("\n"), last[2]

    def _new_output(self, number: int, wait: int) -> str:
        text, state = self._act("read", number, self._read.get(number, 0), wait)
        if state is None:
            return text
        if self._read[number] >= MAX_PROCESS_OUTPUT_BYTES:
            text = _join(text, f"[output beyond {MAX_PROCESS_OUTPUT_BYTES >> 20} MiB is thrown away]")
        return _join(text or "[no new output]", f"[process {number}: {self._describe(number, state)}]")

    def _describe(self, number: int, state: str) -> str:
        if state == "running":
            return "running"
        if state.isdigit():
            return f"ended with exit code {state}" if int(state) < 128 else f"ended by signal {int(state) - 128}"
        return "gone: its files in the sandbox were removed" if state == "gone" else "ended"

    def _states(self) -> tuple[str, dict[int, str] | None]:
        text = self._run_script("list", *self._commands)
        states = {int(found[1]): found[2] for found in _REPORT.finditer(text)}
        return text, states or None

    def _forget_ended(self) -> None:
        _, states = self._states()
        ended = [number for number, state in (states or {}).items() if state != "running"]
        if ended:
            self._run_script("drop", *ended)
        for number in ended:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._commands.pop(number, None)
        self._read.pop(number, None)


@functools.cache
def _script() -> str:
    return Path(__file__).with_name("processes.sh").read_text(encoding="utf-8")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _wrong(argument: str, wanted: str) -> str:
    return f"[nothing was done: `{argument}` must be {wanted}]"


def _number(value: object) -> float | None:
    """A number as a model writes it: 3, 3.0 or "3"."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if number == number else None


def _join(*parts: str) -> str:
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _shortened(text: str, limit: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
