"""Names of methods. A method registers itself beside its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fedhelix.errors import BadInput, unknown
from fedhelix.imports import import_file
from fedhelix.options import build

if TYPE_CHECKING:
    from fedhelix.method import Method

M = TypeVar("M", bound="type[Method]")

METHODS: dict[str, type[Method]] = {}


def register(name: str, paper: str = "") -> Callable[[M], M]:
    """Give a method its name on the command line and in run folders, and the paper that it comes from."""

    def keep(kind: M) -> M:
        if "__dataclass_params__" not in vars(kind):  # forgotten, and there is only one way to do it
            kind = dataclass(frozen=True)(kind)  # type: ignore[assignment]
        kind.name, kind.paper = name, paper
        METHODS[name] = kind
        return kind

    return keep


def method_type(name: str) -> type[Method]:
    """The method of that name; `FILE.py` or `FILE.py:NAME` takes it from a file of the user's."""
    if ".py" in name:
        return _from_file(name)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def make(name: str, options: dict[str, Any] | None = None) -> Method:
    """A method by name with some of its options set."""
    return build(method_type(name), options or {}, f"the method {name}")


def _from_file(spec: str) -> type[Method]:
    path, _, wanted = spec.partition(":")
    known = dict(METHODS)
    import_file(path)
    found = {name: kind for name, kind in METHODS.items() if known.get(name) is not kind}
    if wanted:
        if wanted not in found:
            raise unknown(f"method in '{path}'", wanted, found)
        return found[wanted]
    if len(found) != 1:
        raise BadInput(
            f"'{path}' registers {len(found)} methods; name one as {path}:NAME (it has: {', '.join(found) or 'none'})."
        )
    return next(iter(found.values()))
