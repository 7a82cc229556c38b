"""A method's hooks with their returned values checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fedhelix.core import returns
from fedhelix.core.entries import check_fit, check_types
from fedhelix.core.errors import UserError
from fedhelix.core.method import HOOKS, Context, Method


@dataclass(frozen=True, eq=False)
class CheckedHooks:
    """Has every hook of a method; one that returns the wrong thing raises
    UserError with its name.
    """

    method: Method

    def __getattr__(self, name: str) -> Any:  # only called for names that are not there
        if name not in HOOKS:
            raise AttributeError(f"there is no hook '{name}'")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        value = getattr(self.method, name)(*args)
        where = f"{self.method.label}.{name}"
        value = HOOKS[name].check(where, value, args)
        if name in ("download", "deliver") and not self.method.overrides("start"):
            check_fit(where, value.get("model", {}), args[2].initial)
        if name == "upload" and self._sends_plain:
            check_types(where, value[0].get("model", {}), args[0].client.initial)
        return value

    @property
    def _sends_plain(self) -> bool:
        """Whether uploads are models that FedAvg averages."""
        return not self.method.overrides("decode") and not self.method.overrides("aggregate")


def checked(method: Method) -> Method:
    """The hooks of a method, with their signatures and with checks of what they return."""
    return cast(Method, CheckedHooks(method))


def other_bytes(method: Method, ctx: Context) -> int:
    """What the method records of traffic that is not simulated."""
    count = returns.metadata(method.label, ctx.metadata.get("other_bytes", 0), "other_bytes")
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number or not 0 <= count < math.inf:
        raise UserError(
            f"{method.label} records {count!r} as 'other_bytes', which is a number of bytes."
        )
    return int(count)


def recorded(method: Method, ctx: Context) -> dict[str, Any]:
    """What the method wants recorded of a round, with tensors as lists."""
    return {key: returns.metadata(method.label, item, key) for key, item in ctx.metadata.items()}
