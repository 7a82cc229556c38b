"""Names of hooks: a misspelt or guessed one is refused when its class is registered."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from fedhelix.core import renamed
from fedhelix.core.errors import UserError
from fedhelix.core.method import HOOKS, Method

# What people who know other libraries write.
GUESSES = {
    "aggregate_fit": "aggregate",
    "aggregate_train": "aggregate",
    "average": "aggregate",
    "broadcast": "download",
    "client_update": "upload",
    "combine": "aggregate",
    "configure_fit": "select_clients",
    "configure_train": "select_clients",
    "criterion": "loss",
    "fine_tune": "personalize",
    "finetune": "personalize",
    "fit": "phases",
    "get_parameters": "upload",
    "initialize_parameters": "server_init",
    "local_update": "upload",
    "sample_clients": "select_clients",
    "set_parameters": "start",
    "setup": "server_init",
    "train": "phases",
    "train_client": "phases",
}
FUNCTIONS = (property, staticmethod, classmethod)


def check_names(kind: type[Method]) -> None:
    """Refuse a class whose public functions are no hooks, or whose hooks have other arguments.

    A function that a base class has too is an override. Helpers begin with an underscore.
    """
    for name, value in vars(kind).items():
        if name in HOOKS:
            _check_signature(kind, name, value)
        elif not name.startswith("_") and (callable(value) or isinstance(value, FUNCTIONS)):
            _check_known(kind, name)


def _check_signature(kind: type[Method], name: str, value: Any) -> None:
    where, arguments = f"{kind.__name__}.{name}", HOOKS[name].arguments
    if not inspect.isfunction(value):
        raise UserError(f"{where} is a hook and must be a function; choose another name.")
    try:
        inspect.signature(value).bind(*[None] * (1 + arguments))
    except TypeError:
        names = inspect.signature(getattr(Method, name)).parameters
        raise UserError(f"{where} must take ({', '.join(names)}).") from None


def _check_known(kind: type[Method], name: str) -> None:
    if any(name in vars(base) for base in kind.__mro__[1:]):
        return
    where = f"{kind.__name__}.{name}"
    if name in renamed.HOOKS:
        raise UserError(f"{where} is now called {renamed.HOOKS[name]}; rename it.")
    if name in renamed.FLAGS:
        raise UserError(
            f"{where} is now the field {renamed.FLAGS[name]} of `capabilities`; return "
            f"replace(super().capabilities, {renamed.FLAGS[name]}=...) there."
        )
    close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.6)
    nearest = GUESSES.get(name) or (close[0] if close else None)
    hint = f"did you mean {nearest}?" if nearest else f"there are: {', '.join(HOOKS)}."
    raise UserError(f"{where} is no hook; {hint} (A helper's name begins with an underscore.)")
