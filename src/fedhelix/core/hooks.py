"""A method's hooks with their returned values checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fedhelix.core import returns
from fedhelix.core.entries import check_fit, check_kept, check_named, check_types
from fedhelix.core.errors import UserError
from fedhelix.core.method import HOOKS, Context, Method

# Hooks that make models, and those that may change them before the network has them.
TAKERS = {
    "server_init": ("download", "start"),
    "aggregate": ("download", "start"),
    "download": ("start",),
    "deliver": ("start",),
    "upload": ("decode", "aggregate"),
}
RIGHT = {
    "server_init": "({'model': {...}}, replies)",
    "upload": "({'model': {...}}, client_state)",
}


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
        self._check_models(name, where, value, args)
        return value

    def _check_models(self, name: str, where: str, value: Any, args: tuple[Any, ...]) -> None:
        """Refuse models that do not fit the network, where FedAvg's hooks take them as they are."""
        if name not in TAKERS or any(map(self.method.overrides, TAKERS[name])):
            return
        tree = value[0] if isinstance(value, tuple) else value
        initial = args[0].client.initial if name == "upload" else args[-1].initial
        if not (HOOKS[name].side == "server" and self.method.overrides("loss_context")):
            check_named(where, tree, initial, RIGHT.get(name, "{'model': {...}}"))
        model = tree.get("model", {})
        if name == "upload":  # whose names and shapes the server looks at
            check_types(where, model, initial)
        else:
            check_fit(where, model, initial)
        if name == "aggregate":
            check_kept(where, model, args[0].get("model", {}))


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
