"""Whether models have the entries of their network; what they have otherwise is told with the name
of the hook that made them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedhelix.core.errors import UserError
from fedhelix.core.layers import is_frozen
from fedhelix.core.tree import State, Tree, flatten, tensors

FEW = 4  # entries of a network that a sentence names


def unusual(value: Tensor) -> str:
    """How a tensor is stored, if not densely and in real numbers: nobody can average it, and few
    can be written to disk.
    """
    if value.is_complex():
        return "complex"
    if value.layout != torch.strided or value.is_quantized:
        return "quantised" if value.is_quantized else "sparse"
    return ""


def check_entries(module: nn.Module) -> None:
    """Refuse a network with an entry that clients cannot share."""
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or is_frozen(value) or not (form := unusual(value)):
            continue
        kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
        dense = f"torch.view_as_real({name})" if form == "complex" else "a dense tensor"
        alone = ", or register it with persistent=False if training does not change it"
        raise UserError(
            f"the model has the {form} {kind} '{name}', and only dense tensors of real numbers "
            f"can be averaged; keep {dense} instead{alone if kind == 'buffer' else ''}."
        )


def check_dense(where: str, tree: Tree) -> None:
    """Refuse a tensor in a tree that is stored in another way."""
    if not any(map(unusual, tensors(tree))):
        return
    for name, item in flatten(tree).items():
        if isinstance(item, Tensor) and (form := unusual(item)):
            dense = "torch.view_as_real(...)" if form == "complex" else "a dense tensor"
            raise UserError(
                f"{where} has a {form} tensor as '{name}'; only dense tensors of real numbers can "
                f"be kept and sent, so return {dense}."
            )


def check_fit(where: str, model: Mapping[str, Tensor], initial: State) -> None:
    """Refuse entries that the network does not have, or has in another shape or type; names in
    parentheses are a method's own.
    """
    for name, item in model.items():
        like = initial.get(name)
        if like is None:
            _check_known(where, name, initial)
        elif item.shape != like.shape:
            raise UserError(
                f"{where} has shape {tuple(item.shape)} for '{name}' instead of "
                f"{tuple(like.shape)}."
            )
    check_types(where, model, initial)


def check_types(where: str, model: Mapping[str, Tensor], initial: State) -> None:
    """Refuse another type than the network's where that is a floating-point one; counters may have
    any.
    """
    for name, item in model.items():
        like = initial.get(name)
        if like is not None and item.dtype != like.dtype and like.is_floating_point():
            given, wanted = (str(kind).removeprefix("torch.") for kind in (item.dtype, like.dtype))
            raise UserError(f"{where} has {given} for '{name}' instead of {wanted}.")


def _check_known(where: str, name: str, initial: State) -> None:
    """Refuse an entry that the network does not have; names in parentheses are a method's own."""
    if name.startswith("("):
        return
    names = list(initial)
    few = ", ".join(names[:FEW]) + f" and {len(names) - FEW} more" * (len(names) > FEW)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean '{close[0]}'?" if close else f"there are: {few}."
    raise UserError(f"{where} has the entry '{name}', which the network lacks; {meant}")


def check_named(where: str, tree: Mapping[str, object], initial: State, right: str) -> None:
    """Refuse entries of the network that stand where a tree has its names, and not in its model,
    as nothing takes them from there.
    """
    bare = next((name for name in tree if name in initial), None)
    if bare is not None and "model" not in tree:
        raise UserError(
            f"{where} must return {right}: it has the entry '{bare}' of the network outside of "
            "'model', from where nothing takes it."
        )


def check_kept(where: str, model: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Refuse a model that lacks what it had."""
    for name in before:
        if name not in model:
            raise UserError(
                f"{where} must return every entry that the model has had, such as {{**server, "
                f"'model': {{**server['model'], ...}}}}, but 'model' lacks '{name}'."
            )


def check_whole(where: str, which: str, model: Mapping[str, Tensor], initial: State) -> None:
    """Refuse a model that lacks an entry of the network."""
    for name in initial:
        if name not in model:
            raise UserError(
                f"{where} lacks the entry '{name}' in '{which}'; return whole models, such as "
                "{**client.initial, ...}."
            )
