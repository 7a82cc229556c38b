"""Names of methods. A method registers itself beside its definition."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.imports import import_file
from fedhelix.core.method import Method
from fedhelix.core.naming import check_names
from fedhelix.core.options import build, checks_options, find
from fedhelix.core.wrapper import Wrapper, check_wrappers

M = TypeVar("M", bound=type[Method])

METHODS: dict[str, type[Method]] = {}
FILE_AND_REST = re.compile(
    r"(.+?\.py(?::[^+]+)?)(?:\+(.*))?"
)  # FILE.py or FILE.py:NAME, and what it is put around


def register(name: str, paper: str = "") -> Callable[[M], M]:
    """Give a method its name on the command line and in run folders, and the paper that it comes
    from.
    """

    def keep(kind: M) -> M:
        check_names(kind)
        if "__dataclass_params__" not in vars(
            kind
        ):  # forgotten, and there is only one way to do it
            kind = dataclass(frozen=True)(kind)  # type: ignore[assignment]
        holder = METHODS.get(name)
        if holder is not None and not _are_one(home_of(holder), home_of(kind)):
            raise UserError(
                f"{holder.__name__} of {home_of(holder)} is called '{name}' already; choose "
                "another name."
            )
        kind.name, kind.paper = name, paper
        METHODS[name] = checks_options(kind)
        return kind

    return keep


def home_of(kind: type[Method]) -> str:
    """Where a method is written: a file that is read once more may replace its own methods, and no
    others.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ if file is None else str(Path(file).resolve())


def _are_one(one: str, other: str) -> bool:
    """Whether two homes are one file, or copies of it: every site of a deployment has its own."""
    if one == other or not (Path(one).is_file() and Path(other).is_file()):
        return one == other
    return Path(one).read_bytes() == Path(other).read_bytes()


def method_type(name: str) -> type[Method]:
    """The method of that name; `FILE.py` or `FILE.py:NAME` takes it from a file of the user's."""
    if ".py" in name:
        return _from_file(name)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def resolve(spec: str) -> list[type[Method]]:
    """The methods of a spec such as `genfed+fedau`, the outermost first; all but the last are
    wrappers.
    """
    names = parts(spec)
    if len(names) > 1 and "" in names:
        raise UserError(
            f"a name is missing around '+' in '{spec}'; write WRAPPER+METHOD, such as genfed+fedau."
        )
    kinds = [method_type(name) for name in names]
    taken: set[str] = set()
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True), start=1):
        rest = "+".join(names[place:])
        if rest and not is_wrapper(kind):
            raise UserError(
                f"{name} cannot be put around {rest}; of '{spec}' only the last may be an "
                "ordinary method."
            )
        if both := sorted(taken & set(option_names(kind))):
            raise UserError(
                f"'{spec}' has the option {both[0]} twice; leave one of the methods out."
            )
        taken.update(option_names(kind))
    return kinds


def is_wrapper(kind: type[Method]) -> bool:
    """Whether it can be put around a method of the user's choice."""
    return issubclass(kind, Wrapper) and any(
        field.name == "inner" and field.init for field in fields(kind)
    )


def parts(spec: str) -> list[str]:
    """The names and files of a spec, the outermost first; a '+' in the path of a file separates
    nothing.
    """
    head, plus, rest = spec.partition("+")
    if plus and not is_file(spec):
        if "/" in head and (match := FILE_AND_REST.fullmatch(spec)):
            head, rest = match[1], match[2]
        return [head, *parts(rest)] if rest is not None else [head]
    return [spec]


def is_file(part: str) -> bool:
    """Whether this is a file of the user's: `FILE.py` or `FILE.py:NAME`."""
    path, _, name = part.partition(":")
    return "+" not in name and Path(path).suffix == ".py" and Path(path).is_file()


def option_names(kind: type[Method]) -> list[str]:
    """The options of one method, without those of what it wraps."""
    return [field.name for field in fields(kind) if field.init and field.name != "inner"]


def make(spec: str, options: dict[str, Any] | None = None, beside: Iterable[str] = ()) -> Method:
    """A method by name with some of its options set; of wrapped methods each takes the options that
    it knows. Keys that are read elsewhere (`beside`) may be what was meant.
    """
    chain = resolve(spec)
    homes = {name: number for number, kind in enumerate(chain) for name in option_names(kind)}
    parts: list[dict[str, Any]] = [{} for _ in chain]
    for key, value in (options or {}).items():
        if key not in homes and (around := _wrappers_with(key)):
            mine = {name: given for name, given in (options or {}).items() if name in homes}
            raise UserError(f"{spec} has no option {key}{_elsewhere(key, spec, mine, around)}")
        name = find(key, homes, f"key of the method {spec}", beside=beside)
        parts[homes[name]][name] = value
    method: Method | None = None
    for kind, mine in reversed(list(zip(chain, parts, strict=True))):
        method = build(
            kind, mine if method is None else {**mine, "inner": method}, f"the method {spec}"
        )
    assert method is not None
    return method


def _elsewhere(key: str, spec: str, options: dict[str, Any], around: Iterable[str]) -> str:
    """What to take for an option that wrappers have, as the end of a sentence: those that suit the
    method; otherwise what it names instead.
    """
    outside = [f"{name}+{spec}" for name in around]
    inside = [f"{spec}+{name}" for name in around]
    others = [other for kind in resolve(spec) for other in kind.instead]
    suit = [one for one in outside if _suits(one, options)]
    suit = suit or [one for one in inside if _suits(one, options)]
    suit = suit or [_in_words(*other) for other in others if key in _all_options(other[0])]
    if suit:
        return f"; use {' or '.join(suit)}."
    return f", and {' and '.join(outside)} are refused; choose another method."


def _suits(spec: str, options: dict[str, Any]) -> bool:
    try:
        check_wrappers(make(spec, options))
    except UserError:
        return False
    return True


def _in_words(spec: str, options: Mapping[str, Any]) -> str:
    return f"{spec} with {', '.join(f'{name} = {value}' for name, value in options.items())}"


def _all_options(spec: str) -> list[str]:
    return [name for kind in resolve(spec) for name in option_names(kind)]


def _wrappers_with(key: str) -> list[str]:
    return sorted(
        name for name, kind in METHODS.items() if is_wrapper(kind) and key in option_names(kind)
    )


def is_known(spec: str) -> bool:
    """Whether all methods of a spec are registered."""
    return all(name in METHODS for name in parts(spec))


def _from_file(spec: str) -> type[Method]:
    path, _, wanted = spec.partition(":")
    known = dict(METHODS)
    import_file(path)
    new = {name: kind for name, kind in METHODS.items() if known.get(name) is not kind}
    if wanted:
        if wanted not in new:
            raise unknown(f"method in '{path}'", wanted, new)
        return new[wanted]
    if not new:
        raise UserError(
            f"'{path}' registers no method; write @register(\"name\") above the class of yours."
        )
    if len(new) != 1:
        raise UserError(
            f"'{path}' registers {len(new)} methods; name one as {path}:NAME (it has: "
            f"{', '.join(new)})."
        )
    return next(iter(new.values()))
