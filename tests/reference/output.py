"""The output buffer in plain Python: reads the whole output, then says what is shown of it."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HELD_CHARS = 4096
NEAR = 8

CSI = re.compile(r"\x1b\[[ -?]*[@-~]")
STRING = re.compile(r"\x1b[\]PX^_][^\x07\x1b\n\r]*(?:\x07|\x1b\\)")
SHORT = re.compile(r"\x1b(?:[ -/]+[0-~]|[0-OQ-WYZ\\`-~])")
BEGUN = re.compile(r"\x1b(?:\[[ -?]*|[\]PX^_][^\x07\x1b\n\r]*\x1b?|[ -/]+)?")
RETURNS = {"\x1b[G", "\x1b[0G", "\x1b[1G", "\x1b[2K"}


class Shown(NamedTuple):
    text: str
    dropped_bytes: int
    dropped_lines: int


def show(data: bytes, limit: int, *, head: int | None = None, fold: bool = True, note: str = "") -> Shown:
    """What `OutputBuffer(limit, head=head, fold=fold)` shows of `data`."""
    head = limit // 2 if head is None else head
    text = data.decode("utf-8", errors="replace")
    if fold:
        text = fold_terminal(text)
    if len(text) <= limit:
        return Shown(text, 0, 0)
    first, last = head, len(text) - (limit - head)
    line_end = text.rfind("\n", first - head // NEAR, first)
    if line_end >= 0:
        first = line_end + 1
    if text[last - 1 : last] != "\n" or last == head:
        line_end = text.find("\n", last, last + (limit - head) // NEAR)
        if line_end >= 0:
            last = line_end + 1
    missing = text[first:last]
    counts = len(missing.encode()), missing.count("\n")
    line = f"[... left out: {counts[0]} bytes, {counts[1]} lines{'; ' if note else ''}{note} ...]\n"
    begin = text[:first]
    return Shown(begin + ("\n" if begin and not begin.endswith("\n") else "") + line + text[last:], *counts)


def fold_terminal(text: str) -> str:
    """Of a line drawn several times, the last draw that is not blank, else the first not empty; no escape sequences."""
    lines = [fold_line(line) for line in without_sequences(text).split("\n")]
    return "\n".join(lines)


def without_sequences(text: str) -> str:
    parts, at = [], 0
    while (escape := text.find("\x1b", at)) >= 0:
        parts.append(text[at:escape])
        found = next((m for kind in (CSI, STRING, SHORT) if (m := kind.match(text, escape))), None)
        if found and len(found[0]) <= MAX_HELD_CHARS:
            parts.append("\r" if found[0] in RETURNS else "")
            at = found.end()
        else:
            begun = BEGUN.match(text, escape)
            assert begun
            at = min(begun.end(), escape + MAX_HELD_CHARS)
            parts.append(text[escape:at])
    return "".join(parts) + text[at:]


def fold_line(line: str) -> str:
    done, shown = [], ""
    draws = line.split("\r")
    for draw in draws:
        if len(draw) >= MAX_HELD_CHARS:
            done.append(draw)
            shown = ""
        elif draw.strip(" \t") or not shown:
            shown = draw
    return "\n".join([*done, shown] if shown or not done else done)
