"""Fields that document and check themselves: a method's hyperparameters and a run's settings are
made of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeVar

from fedhelix.core.errors import UserError, unknown

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type)

UNIONS = (typing.Union, types.UnionType)
SWITCH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    object: "anything",
    Any: "anything",
}


def option(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    needs: str | tuple[str, ...] | None = None,
    idle_with: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """A dataclass field with its meaning and its range (`low` and `high` are allowed, `above` and
    `below` are not). It does nothing without the field that it `needs`, or one of several, nor with
    a value of another field in `idle_with`.
    """
    rule = {"meaning": meaning, "low": low, "high": high, "above": above, "below": below}
    needed = (needs,) if isinstance(needs, str) else needs or ()
    return dataclasses.field(
        default=default, metadata={**rule, "needs": needed, "idle_with": idle_with or {}}
    )


def without_effect(options: Any) -> Iterator[str]:
    """A sentence for each option that was set and does nothing, by what else was set or not."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    given = {name: getattr(options, name) for name in defaults}
    for field in dataclasses.fields(options):
        value, needs = given[field.name], field.metadata.get("needs", ())
        if value == field.default:
            continue
        if needs and all(given[name] == defaults[name] for name in needs):
            needed = " or ".join(needs)
            yield f"{field.name} = {value} does nothing without {needed}; set {needed} too."
        for name, idle in field.metadata.get("idle_with", {}).items():
            if given[name] in idle:
                other = f"{name} = {given[name]}"
                yield f"{field.name} = {value} does nothing with {other}; leave one of them out."


class Checked:
    """Base of dataclasses whose fields are checked against their types and ranges when they are
    made.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = convert(field.name, getattr(self, field.name), hints[field.name])
            check_range(field, value)
            object.__setattr__(self, field.name, value)


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a number outside the field's range, also inside of a tuple."""
    for part in value if isinstance(value, tuple) else ():
        check_range(field, part)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    rule = field.metadata
    if rule.get("low") is not None and not value >= rule["low"]:
        raise UserError(f"{field.name} must be at least {rule['low']}, not {value}.")
    if rule.get("above") is not None and not value > rule["above"]:
        raise UserError(f"{field.name} must be greater than {rule['above']}, not {value}.")
    if rule.get("high") is not None and not value <= rule["high"]:
        raise UserError(f"{field.name} must be at most {rule['high']}, not {value}.")
    if rule.get("below") is not None and not value < rule["below"]:
        raise UserError(f"{field.name} must be less than {rule['below']}, not {value}.")
    if not math.isfinite(value):
        raise UserError(f"{field.name} must be finite, not {value}.")


def convert(name: str, value: Any, kind: Any) -> Any:
    """The value as its declared type; text is read as on a command line, anything else must fit
    already.
    """
    right = words(kind)
    if right is None:
        raise UserError(
            f"{name} is declared as {kind}; an option is a number, text, a choice, or a tuple of "
            "these."
        )
    try:
        return read(value, kind)
    except (ValueError, OverflowError):
        raise UserError(f"{name} must be {right}, not '{value}'{_meant(value, kind)}") from None


def _meant(value: Any, kind: Any) -> str:
    """The end of a sentence about a value, with the name that is nearest to it."""
    parts = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)
    choices = (typing.get_args(part) for part in parts if typing.get_origin(part) is Literal)
    names = [name for several in choices for name in several if isinstance(name, str)]
    close = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.7)
    return f"; did you mean '{close[0]}'?" if close else "."


def words(kind: Any) -> str | None:
    """What values of a type are called; None for a type that cannot be checked, or whose values can
    change.
    """
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, choices))}"
    if origin in UNIONS:
        parts = [words(choice) for choice in choices if choice is not type(None)]
        return None if None in parts else " or ".join(str(part) for part in parts)
    if origin is tuple:
        parts = [words(choice) for choice in choices if choice is not ...]
        return (
            None if None in parts else f"a list, each {' and '.join(str(part) for part in parts)}"
        )
    if kind in NAMES:
        return NAMES[kind]
    if not isinstance(kind, type) or kind in (list, dict, set):
        return None
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def read(value: Any, kind: Any) -> Any:
    """The value as a type that has words; ValueError where it does not fit."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        fitting = [choice for choice in choices if value in (choice, str(choice))]
        return fitting[0] if fitting and not isinstance(value, bool) else refuse()
    if origin in UNIONS:
        return read_any(value, choices)
    if origin is tuple:
        return read_tuple(value, choices)
    if kind is bool and isinstance(value, str):
        return SWITCH[value.lower()] if value.lower() in SWITCH else refuse()
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
            refuse()
        number = kind(value)
        if math.isnan(number) or not (isinstance(value, str) or number == value):
            refuse()
        return number
    return value if kind is Any or isinstance(value, kind) else refuse()


def read_any(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The value as the first type that takes it: its own, if it is not text, and text only if
    nothing else does.
    """
    # Where any text is a value (a folder may be called none), no text stands for nothing.
    nothing = ("none", "auto") if type(None) in kinds and str not in kinds else ()
    if isinstance(value, str) and value.lower() in nothing:
        return None
    for kind in sorted(kinds, key=lambda kind: (kind is str, kind is not type(value))):
        try:
            return read(value, kind)
        except (ValueError, OverflowError):
            continue
    return refuse()


def read_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Some values of one type, or one of each; text has commas between them."""
    if isinstance(value, str):
        inside = (
            value.strip().removeprefix("[").removeprefix("(").removesuffix("]").removesuffix(")")
        )
        if any(bracket in inside for bracket in "[]()"):
            refuse()  # tuples within tuples are for Python and TOML
        value = [part.strip() for part in inside.split(",") if part.strip()]
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        refuse()
    parts = list(value)
    each = [kinds[0]] * len(parts) if kinds[-1] is ... else kinds
    return tuple(read(part, kind) for part, kind in zip(parts, each, strict=True))


def refuse() -> NoReturn:
    """It does not fit."""
    raise ValueError


def find(
    key: str,
    names: Iterable[str],
    kind: str = "key",
    grouped: bool = True,
    beside: Iterable[str] = (),
) -> str:
    """The field that a key means: a dot reads as an underscore, and (if `grouped`) a leading group
    may be left out.

    So `bn.filter` and `bn_filter` find the field `bn_filter`, and `fedlp.redraw` finds the field
    `redraw`. Keys that are read elsewhere (`beside`) may be what was meant.
    """
    known = list(names)
    flat = key.replace(".", "_").replace("-", "_")
    if flat in known:
        return flat
    tail = key.partition(".")[2].replace(".", "_").replace("-", "_")
    if grouped and tail in known:
        return tail
    raise unknown(kind, key, [*known, *beside])


def build(
    kind: type,
    values: Mapping[str, Any],
    what: str,
    grouped: bool = True,
    beside: Iterable[str] = (),
) -> Any:
    """A checked dataclass from keys and values; unknown keys are refused with the nearest right
    one.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    called = f"key of {what}"
    known = {find(key, names, called, grouped, beside): value for key, value in values.items()}
    return kind(**known)


def check_frozen(name: str, value: Any) -> None:
    """Refuse a user's object with options that its text, which a run records, does not show."""
    for kind in type(value).__mro__[:-1]:
        notes = inspect.get_annotations(kind).values()
        own = "__init__" in vars(kind) or any("ClassVar" not in str(note) for note in notes)
        if own and "__dataclass_params__" not in vars(kind):
            raise UserError(
                f"{name} has options of {kind.__name__}, which is no frozen dataclass, so that a "
                "run could not record them; write @dataclass(frozen=True) above the class, and its "
                "options as fields (strength: float = 0.5) without __init__."
            )


def options_of(kind: type, value: Any) -> dict[str, Any]:
    """The fields that a value has from one of its base classes."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}


def checks_arguments(function: F, name: str | None = None, more: Iterable[str] = ()) -> F:
    """Have a function answer unknown arguments with a sentence, and the nearest one that it has;
    `more` are those that it takes as `**`.
    """
    signature, called = inspect.signature(function), name or function.__name__
    named = [one.name for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    known = [one for one in dict.fromkeys([*named, *more]) if one != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            signature.bind(*args, **given)
        except TypeError as problem:
            for key in given:
                if key not in known:
                    raise unknown(f"option of {called}", key, known) from None
            raise UserError(f"{called}({', '.join(known)}): {problem}.") from None
        return function(*args, **given)

    return checked  # type: ignore[return-value]


def checks_options(kind: K) -> K:
    """The same for the arguments of a class, which are its options."""
    kind.__init__ = checks_arguments(kind.__init__, kind.__name__)  # type: ignore[misc]
    return kind
