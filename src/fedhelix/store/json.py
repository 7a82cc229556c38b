"""JSON files that every JSON reader can parse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None
    except ValueError as problem:
        raise UserError(f"'{path}' is damaged: {problem}.") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is damaged: it does not hold a JSON object.")
    return content


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
