"""Fields that document and check themselves: a method's hyperparameters and a run's settings are made of them."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fedhelix.errors import BadInput, unknown


def option(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its meaning and its range (`low` and `high` are allowed, `above` and `below` are not)."""
    rule = {"meaning": meaning, "low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=rule)


class Checked:
    """Base of dataclasses whose fields are checked against their types and ranges when they are made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = convert(field.name, getattr(self, field.name), hints[field.name])
            check_range(field, value)
            object.__setattr__(self, field.name, value)


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a number outside the field's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    rule = field.metadata
    if rule.get("low") is not None and not value >= rule["low"]:
        raise BadInput(f"{field.name} must be at least {rule['low']}, not {value}.")
    if rule.get("above") is not None and not value > rule["above"]:
        raise BadInput(f"{field.name} must be greater than {rule['above']}, not {value}.")
    if rule.get("high") is not None and not value <= rule["high"]:
        raise BadInput(f"{field.name} must be at most {rule['high']}, not {value}.")
    if rule.get("below") is not None and not value < rule["below"]:
        raise BadInput(f"{field.name} must be less than {rule['below']}, not {value}.")
    if not math.isfinite(value):
        raise BadInput(f"{field.name} must be finite, not {value}.")


def convert(name: str, value: Any, kind: Any) -> Any:
    """The value as its declared type; text is read as on a command line, anything else must fit already."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in choices:
            return value
        raise BadInput(f"{name} must be one of {', '.join(map(str, choices))}, not '{value}'.")
    if origin in (typing.Union, types.UnionType):
        # Where any text is a value (a folder may be called none), no text stands for nothing.
        nothing = ("none", "auto") if type(None) in choices and str not in choices else ()
        if value is None or (isinstance(value, str) and value.lower() in nothing):
            return None
        return convert(name, value, next(choice for choice in choices if choice is not type(None)))
    if kind is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise BadInput(f"{name} must be true or false, not '{value}'.")
    if kind in (int, float):
        word = "a whole number" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
            raise BadInput(f"{name} must be {word}, not '{value}'.")
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            raise BadInput(f"{name} must be {word}, not '{value}'.") from None
        if number != number or (not isinstance(value, str) and number != value):
            raise BadInput(f"{name} must be {word}, not '{value}'.")
        return number
    if kind is str and not isinstance(value, str):
        raise BadInput(f"{name} must be text, not '{value}'.")
    return value


def find(key: str, names: Iterable[str], kind: str = "key", grouped: bool = True) -> str:
    """The field that a key means: a dot reads as an underscore, and (if `grouped`) a leading group may be left out.

    So `bn.filter` and `bn_filter` find the field `bn_filter`, and `fedlp.redraw` finds the field `redraw`.
    """
    known = list(names)
    flat = key.replace(".", "_").replace("-", "_")
    if flat in known:
        return flat
    tail = key.partition(".")[2].replace(".", "_").replace("-", "_")
    if grouped and tail in known:
        return tail
    raise unknown(kind, key, known)


def build(kind: type, values: Mapping[str, Any], what: str) -> Any:
    """A checked dataclass from keys and values; unknown keys are refused with the nearest right one."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return kind(**{find(key, names, f"key of {what}"): value for key, value in values.items()})


def build_all(kinds: Iterable[type], values: Mapping[str, Any], what: str) -> list[Any]:
    """Several checked dataclasses from one set of keys and values; each takes the keys that it knows."""
    chosen = list(kinds)
    names = {kind: [field.name for field in dataclasses.fields(kind) if field.init] for kind in chosen}
    known = [name for mine in names.values() for name in mine]
    found = {find(key, known, f"key of {what}", grouped=False): value for key, value in values.items()}
    return [kind(**{name: found[name] for name in names[kind] if name in found}) for kind in chosen]
