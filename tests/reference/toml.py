"""What Harbor makes of the text of a `task.toml`: `Path.read_text`, then `tomllib`."""

from __future__ import annotations

import tomllib
from typing import Any


def read(text: str) -> dict[str, Any] | None:
    """The document, or None where it is refused."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None
