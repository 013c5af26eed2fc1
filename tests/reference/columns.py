"""How the values of one metadata key over a suite become a column: the rules of the index, in plain Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import Any

MISSING = object()
JSON = "json"


def column(cells: Sequence[Any]) -> tuple[list[Any], bool]:
    """The column's cells as Python reads them back, and whether they are JSON text."""
    kind = _kind([cell for cell in cells if cell is not MISSING], 0)
    return [None if cell is MISSING else _cell(kind, cell) for cell in cells], kind == JSON


def _kind(values: list[Any], depth: int) -> Any:
    if not values:
        return None
    types = {type(value) for value in values}
    if types <= {int, float} and (types == {int} or all(type(v) is float or abs(v) <= 2**53 for v in values)):
        fits = all(type(v) is float or -(2**63) <= v < 2**63 for v in values)
        return (float if float in types else int) if fits else JSON
    if len(types) > 1:
        return JSON
    only = types.pop()
    if only is datetime:
        zones = {value.tzinfo is not None for value in values}
        if len(zones) > 1 or (zones == {True} and not all(_is_utc_possible(value) for value in values)):
            return JSON
        return "utc" if zones == {True} else only
    if only is list and depth < 8:
        inner = _kind([item for value in values for item in value], depth + 1)
        return JSON if inner == JSON else [inner]
    if only is dict and depth < 8:
        keys = list(dict.fromkeys(key for value in values for key in value))
        fields = {key: _kind([v[key] for v in values if key in v], depth + 1) for key in keys}
        return JSON if not keys or len(keys) > 64 or JSON in fields.values() else fields
    return JSON if only in (int, float, list, dict) else only


def _is_utc_possible(value: datetime) -> bool:
    try:
        value.astimezone(UTC)
    except OverflowError:
        return False
    return True


def _cell(kind: Any, value: Any) -> Any:
    if kind == JSON:
        return to_json(value)
    if isinstance(kind, list):
        return [_cell(kind[0], item) for item in value]
    if isinstance(kind, dict):
        return {key: _cell(inner, value[key]) if key in value else None for key, inner in kind.items()}
    if kind == "utc":
        return value.astimezone(UTC)
    return float(value) if kind is float else value


def to_json(value: Any) -> str:
    def iso(it: Any) -> str:
        assert isinstance(it, date | datetime | time)
        return it.isoformat()

    return json.dumps(value, ensure_ascii=False, default=iso)
