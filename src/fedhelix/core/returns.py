"""What hooks must return: a wrong value is reported where it appears, with the name of its hook.

A check takes where the value came from (such as `fedprox.upload`), the value, and the hook's
arguments. It returns the value, perhaps in a plainer form, or raises UserError with one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.entries import check_dense, check_fit, check_whole
from fedhelix.core.errors import UserError, brief, unknown
from fedhelix.core.parts import in_order
from fedhelix.core.tree import SEPARATOR, State, Tree, flatten

PARTS = ("all", "head", "body")

Check = Callable[[str, Any, tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Phase:
    """Train one part of one of the client's models for some epochs, with a fresh optimiser."""

    part: str = "all"  # or head, or body
    epochs: int | None = None  # None: as many as the federation says
    model: str = "model"  # which of the models that `start` returned
    rate: float = 1.0  # factor on the learning rate
    extra: tuple[str, ...] = ()  # entries that `start` added to the model and that train, too
    frozen: tuple[str, ...] = ()  # entries of the part that stay as they are

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise UserError(
                f"a phase trains one of the parts {', '.join(PARTS)}, not '{self.part}'."
            )
        whole = isinstance(self.epochs, int | np.integer) and not isinstance(self.epochs, bool)
        if self.epochs is not None and not (whole and self.epochs >= 0):
            raise UserError(
                "epochs of a phase is a whole number of at least 0, or None for as many as the "
                f"federation says, not {brief(self.epochs)}."
            )
        if not isinstance(self.rate, Real) or not math.isfinite(self.rate):
            raise UserError(
                f"rate of a phase is a number, a factor on the learning rate, not "
                f"{brief(self.rate)}."
            )
        for what in ("extra", "frozen"):
            names = getattr(self, what)
            if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
                raise UserError(
                    f"{what} of a phase is a tuple of names of entries, such as ('fc.bias',), not "
                    f"{brief(names)}."
                )


def nothing(where: str, value: Any, args: tuple[Any, ...]) -> None:
    """Nothing: the hook raises what it has to say."""
    if value is not None:
        raise wrong(where, "nothing", value)


def entries(where: str, value: Any, args: tuple[Any, ...]) -> Any:
    """Entries of the network."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong(where, "names of entries", value)
    for name in value:
        if name not in args[0].names:
            raise unknown(f"entry in {where}", name, args[0].names)
    return value


def tree(where: str, value: Any, args: tuple[Any, ...] = (), what: str = "a dict") -> Tree:
    """A tree that can be kept, sent and written to disk."""
    if not isinstance(value, Mapping):
        raise wrong(where, f"{what} of named tensors and numbers", value)
    if not isinstance(model := value.get("model", {}), Mapping):
        raise wrong(where, "as 'model' a dict of tensors", model)
    checked = _level(where, value, "")
    check_dense(where, checked)
    return checked


def next_state(where: str, value: Any, args: tuple[Any, ...]) -> Tree:
    """A tree with what the server's state has had before."""
    checked = tree(where, value)
    for name in args[0]:
        if name not in checked:
            raise UserError(
                f"{where} must return the next server state, such as {{**server, 'model': ...}}, "
                f"but it lacks '{name}'."
            )
    if args[-1].initial.keys() <= checked.keys() - args[0].keys():
        raise UserError(
            f"{where} has the model's entries beside 'model', not in it; return "
            "{**server, 'model': model}."
        )
    return checked


def tensors(where: str, value: Any, args: tuple[Any, ...]) -> Tree:
    """A tree of tensors alone, which stays where it is."""
    if not isinstance(value, Mapping):
        raise wrong(where, "a dict of named tensors and numbers", value)
    checked = _level(where, value, "")
    for name, item in flatten(checked).items():
        if name.endswith(SEPARATOR):
            raise UserError(
                f"{where} returns an empty part '{name[: -len(SEPARATOR)]}', perhaps of a network "
                "without such entries; leave it out there, and let the loss do without it."
            )
        if not isinstance(item, Tensor):
            raise wrong(where, f"tensors alone; '{name}' is", item, "")
    return checked


def models(where: str, value: Any, args: tuple[Any, ...]) -> dict[str, State]:
    """Models by their names; the one that is called so has the entries of the network."""
    if not isinstance(value, Mapping) or not value or not all(map(_is_state, value.values())):
        raise wrong(where, "models by their names, such as {'model': {...}}", value)
    if "model" not in value:
        raise UserError(
            f"{where} must return models by their names, one of which is 'model'; it returns "
            f"{', '.join(map(repr, value))}."
        )
    received, initial, model = args[0].get("model", {}), args[2].initial, value["model"]
    # What came as it is from the server is a mistake of the hook that sent it.
    came = {name: item for name, item in model.items() if received.get(name) is item}
    check_fit(f"{where.removesuffix('start')}download", came, initial)
    check_fit(where, {name: item for name, item in model.items() if name not in came}, initial)
    check_whole(where, "model", model, initial)
    return dict(value)


def model_or_none(where: str, value: Any, args: tuple[Any, ...]) -> State | None:
    """A whole model, or None where the method has no global one."""
    if value is None:
        return None
    if not _is_state(value):
        raise wrong(where, "a dict of tensors by their names, or None", value)
    ctx = args[1]
    for name in value:
        if name not in ctx.initial:
            raise unknown(f"entry in {where}", name, ctx.initial)
    for name in ctx.initial:
        if name not in value:
            raise UserError(f"{where} must return a whole model; it lacks '{name}'.")
    check_fit(where, value, ctx.initial)
    return dict(value)


def model_name(where: str, value: Any, args: tuple[Any, ...]) -> str:
    """The name of one of the models."""
    return known_model(where, value, args[0])


def known_model(where: str, name: Any, known: Mapping[str, State]) -> str:
    """A name that is one of the models'."""
    if not isinstance(name, str):
        raise wrong(where, "the name of a model", name)
    if name not in known:
        raise unknown(f"model in {where}", name, known)
    return name


def phases(where: str, value: Any, args: tuple[Any, ...]) -> list[Phase]:
    """Phases."""
    given = list(value) if isinstance(value, Iterable) else [value]
    valid = [phase for phase in given if isinstance(phase, Phase)]
    if len(valid) < len(given) or not isinstance(value, Iterable):
        raise wrong(where, "a tuple of phases, such as (Phase(),)", value)
    return valid


def one_number(where: str, value: Any, args: tuple[Any, ...]) -> Tensor:
    """One number for the whole batch."""
    if not isinstance(value, Tensor) or value.dim():
        raise wrong(where, "a tensor with one number for the batch", value)
    return value


def outputs(where: str, value: Any, args: tuple[Any, ...]) -> Tensor:
    """One row for every sample."""
    samples = in_order(args[1])[0].shape[0]  # not its length, which an export would take as fixed
    if not isinstance(value, Tensor) or value.dim() < 1 or value.shape[0] != samples:
        raise wrong(where, "a tensor with one row for every sample", value)
    return value


def upload(where: str, value: Any, args: tuple[Any, ...]) -> tuple[Tree, Tree]:
    """What is sent, with tensors as its `model`, and what is kept."""
    sent, kept = _pair(where, value, "what is sent", "what is kept")
    if not _is_state(sent.get("model", {})):
        raise wrong(where, "as 'model' a dict of tensors by their names", sent["model"])
    return sent, kept


def server_start(where: str, value: Any, args: tuple[Any, ...]) -> tuple[Tree, dict[int, Tree]]:
    """The first state, and trees for some clients."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Mapping):
        raise wrong(where, "two things, its first state and a dict of replies", value)
    return tree(where, value[0]), {i: tree(where, reply) for i, reply in value[1].items()}


def clients(where: str, value: Any, args: tuple[Any, ...]) -> list[int]:
    """Clients that are present, each once."""
    present = set(args[-1].present)
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, Tensor | np.ndarray | str | bytes) or not isinstance(value, Iterable):
        raise wrong(where, "a list of clients", value)
    chosen = [_client(where, client) for client in value]
    absent = [client for client in chosen if client not in present]
    if absent or len(set(chosen)) < len(chosen):
        which = f"client {absent[0]} is not" if absent else f"{chosen} are not"
        raise UserError(f"{where} must return clients that are present, each once; {which}.")
    return chosen


def _client(where: str, value: Any) -> int:
    """The number of a client."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return int(value) if isinstance(value, float) and value.is_integer() else index(value)
    except TypeError:
        raise UserError(
            f"{where} must return a list of clients, which are whole numbers, but has "
            f"{brief(value)} in it."
        ) from None


def weights(where: str, value: Any, args: tuple[Any, ...]) -> list[float]:
    """A weight for every upload."""
    uploads = args[1]
    if isinstance(value, Mapping | Set | bytes):  # whose order, or whose numbers, mean others
        raise wrong(where, "a list of numbers", value)
    try:
        value = value if isinstance(value, Tensor) else list(value)
        vector = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise wrong(where, "a list of numbers", value) from None
    numbers: list[float] = vector.flatten().tolist()
    in_range = all(0 <= weight < math.inf for weight in numbers)
    if vector.shape != (len(uploads),) or not in_range:
        raise UserError(
            f"{where} must return {len(uploads)} finite weights of at least 0, one for each "
            f"upload, not {f'{value}'[:100]}."
        )
    return numbers


def onboarding(where: str, value: Any, args: tuple[Any, ...]) -> tuple[Tree, Tree, bool]:
    """The next state, what the newcomer receives, and whether that was all."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise wrong(
            where, "three things, its next state, a payload and whether that was all", value
        )
    return *_pair(where, value[:2], "its next state", "what is received"), bool(value[2])


def metadata(label: str, value: Any, key: object = "") -> Any:
    """What a method records about a round, in a form that can be written down."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: metadata(label, item, key or name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [metadata(label, item, key) for item in value]
    if not _is_plain(value):
        raise UserError(
            f"{label} records a {type(value).__name__} as '{key}'; record numbers or text."
        )
    return value


def wrong(where: str, right: str, value: Any, instead: str = ", not") -> UserError:
    """An error that says what would have been right."""
    kind = "None" if value is None else f"a {type(value).__name__}"
    if isinstance(value, tuple | list):
        kind += f" of length {len(value)}"
    if isinstance(value, Tensor):
        kind += f" of shape {tuple(value.shape)}"
    return UserError(f"{where} must return {right}{instead} {kind}.")


def _level(where: str, level: Mapping[Any, Any], above: str) -> Tree:
    """One level of a tree, with NumPy's numbers as ordinary ones."""
    checked = dict(level)
    for name, value in level.items():
        if not isinstance(name, str) or SEPARATOR in name:
            inside = f" in '{above.rstrip(SEPARATOR)}'" if above else ""
            raise UserError(
                f"{where} has the name {name!r}{inside}; names are text without a '{SEPARATOR}'."
            )
        if isinstance(value, Tensor):  # most are
            continue
        if isinstance(value, Mapping):
            checked[name] = _level(where, value, f"{above}{name}{SEPARATOR}")
        elif isinstance(value, np.generic):
            checked[name] = value.item()
        elif not isinstance(value, str | int | float | None):
            raise UserError(
                f"{where} has a {type(value).__name__} as '{above}{name}'; only tensors, numbers "
                "and dicts of them can be kept and sent."
            )
    return checked


def _pair(where: str, value: Any, *parts: str) -> tuple[Tree, Tree]:
    """Two trees."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise wrong(where, f"two trees, {' and '.join(parts)}", value)
    one, other = (
        tree(where, part, what=f"as {what} a dict") for part, what in zip(value, parts, strict=True)
    )
    return one, other


def _is_state(value: Any) -> bool:
    """Whether it maps names to tensors."""
    return isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values())


def _is_plain(value: Any) -> bool:
    """Whether it can be written down without being a tensor."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
