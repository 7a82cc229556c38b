"""JSON files that every JSON reader can parse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError

# More digits or a larger exponent than most numbers have: these are looked at one by one.
SUSPICIOUS = re.compile(rb"\d{19}|[eE]\+?\d{3}")
MOST_DIGITS = 20  # of an integer


def loads(content: bytes) -> Any:
    """Parse JSON; ValueError too for numbers that no double holds, and for what nests too deep."""
    odd = SUSPICIOUS.search(content) is not None
    try:
        if odd:
            return json.loads(content, parse_int=_integer, parse_float=_real)
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"the number {digits[:MOST_DIGITS]} is too large")
    return value


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is no such file."""
    content = read_bytes(path)
    return None if content is None else json_object(content, path)


def read_bytes(path: Path) -> bytes | None:
    """What a file holds; None when there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None


def json_object(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        value = loads(content)
    except ValueError as problem:
        raise UserError(f"'{path}' is damaged: {problem}.") from None
    if not isinstance(value, dict):
        raise UserError(f"'{path}' is damaged: it does not hold a JSON object.")
    return value


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line."""
    return json.dumps(strict(record), allow_nan=False).encode() + b"\n"


def strict(value: Any) -> Any:
    """The value as strict JSON: NaN and infinity become null, NumPy's numbers plain numbers."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
