"""Residual blocks: the parts of a network that can be left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedhelix.core.copies import copied
from fedhelix.core.errors import UserError
from fedhelix.core.fit import probe
from fedhelix.core.parts import Inputs


class Block(NamedTuple):
    """Behind others of its stage; with zeros for all of its entries it gives what it gets."""

    entries: tuple[str, ...]
    place: int  # in its stage, from 0 on
    stage: int  # how many parts the stage has


def residual_blocks(module: nn.Module, names: Iterable[str], example: Inputs) -> tuple[Block, ...]:
    """The residual blocks among the parts of every Sequential, except for the first ones."""
    parts = {
        part: (f"{name}.{key}." if name else f"{key}.", place, len(stage))
        for name, stage in module.named_modules()
        if isinstance(stage, nn.Sequential | nn.ModuleList)
        for place, (key, part) in enumerate(stage.named_children())
        if place and any(True for _ in part.children())
    }
    inputs = _inputs(module, parts, example) if parts else {}
    return tuple(
        Block(tuple(name for name in names if name.startswith(prefix)), place, stage)
        for part, (prefix, place, stage) in parts.items()
        if part in inputs and _passes_on(part, inputs[part])
    )


def _inputs(
    module: nn.Module, parts: Iterable[nn.Module], example: Inputs
) -> dict[nn.Module, Tensor]:
    """What the parts get for an example, where that is a single tensor."""
    inputs: dict[nn.Module, Tensor] = {}

    def record(part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and not keywords:
            inputs[part] = args[0].clone()

    hooks = [part.register_forward_pre_hook(record, with_kwargs=True) for part in parts]
    try:
        probe(module, example)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@torch.no_grad()
def _passes_on(part: nn.Module, x: Tensor) -> bool:
    """Whether a part with zeros for all of its values gives what it gets."""
    empty = copied(part)
    for value in empty.state_dict().values():
        value.zero_()
    try:
        output = probe(empty, x)
    except UserError:
        return False
    return isinstance(output, Tensor) and bool(x.any()) and torch.equal(output, x)
