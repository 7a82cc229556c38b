"""Read and write TOML: Python's standard library only reads it, and a run's settings must be
written too.
"""

from __future__ import annotations

import json
import numbers
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(values: Mapping[str, Any]) -> str:
    """A dictionary as TOML: nested dictionaries become tables, and entries that are None are left
    out.
    """
    return "\n".join(_lines(values, ())).lstrip("\n") + "\n"


def loads(text: str) -> dict[str, Any]:
    """The inverse of `dumps`."""
    return tomllib.loads(text)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flattened


def read(path: Path | str) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise UserError(f"'{path}' is missing.") from None
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None
    except (
        ValueError,
        RecursionError,
    ) as problem:  # TOML's own error and broken UTF-8 are both ValueErrors
        raise UserError(f"'{path}' is not valid TOML: {problem}.") from None


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    # TOML reads everything after a [header] as part of that table, so plain entries come before
    # nested tables.
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value, (*path, key))}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = (*path, key)
            yield f"\n[{'.'.join(map(_key, inner))}]"
            yield from _lines(value, inner)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # A JSON string is a TOML string, but for the delete character, which only TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, path: tuple[str, ...]) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case numbers.Integral():
            return str(int(value))
        case numbers.Real():
            return repr(float(value))  # Python spells inf, nan and exponents as TOML does
        case list() | tuple():
            return f"[{', '.join(_value(item, path) for item in value)}]"
    kind = type(value).__name__
    raise UserError(
        f"'{'.'.join(path)}' holds a {kind}; settings are texts, numbers, true or false, or "
        "lists of them."
    )
