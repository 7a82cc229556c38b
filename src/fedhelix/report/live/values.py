"""Values from files that anybody may have written, made safe to send as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_CHARACTERS = 300
MOST_ENTRIES = 500
DEEPEST_TABLE = 4


def as_number(value: object) -> float:
    """A finite number, or NaN."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return math.nan


def or_none(value: float) -> float | None:
    """A number, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def shortened(value: float) -> float:
    """A number with six digits, which is enough for a chart."""
    return float(f"{value:.6g}")


def shortened_or_none(values: Iterable[float]) -> list[float | None]:
    """Numbers for a chart, with None for what is not finite."""
    return [shortened(value) if math.isfinite(value) else None for value in values]


def as_list(value: object) -> list[Any]:
    """A list, or an empty one."""
    return value if isinstance(value, list) else []


def as_whole(value: object) -> int | None:
    """A whole number that JavaScript can hold exactly, or None."""
    return value if type(value) is int and abs(value) < 2**53 else None


def as_text(value: object) -> str:
    """Short and valid Unicode."""
    text = "" if value is None else str(value).encode(errors="replace").decode()
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def is_unicode(name: str) -> bool:
    """Whether a file name is not empty and valid Unicode; other names cannot be sent."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested tables, with dotted keys."""
    for key, value in list(table.items())[:MOST_ENTRIES]:
        if isinstance(value, dict) and prefix.count(".") < DEEPEST_TABLE:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield as_text(f"{prefix}{key}"), value
