"""Samples of any form: one tensor, or several parts that a network takes as its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhelix.core.errors import UserError

Inputs = Tensor | dict[str, Tensor] | tuple[Tensor, ...]

MASK = "attention_mask"  # of padded sequences, as Hugging Face's networks call it


def each(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """The same with a function applied to every part."""
    if isinstance(x, dict):
        return {name: function(part) for name, part in x.items()}
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """What a network is called with: parts with names are keywords."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def in_order(x: Inputs) -> tuple[Tensor, ...]:
    """All parts, whether they have names or not."""
    args, keywords = arguments(x)
    return (*args, *keywords.values())


def shapes(x: Inputs) -> str:
    """The shapes of all parts, for people."""
    if isinstance(x, dict):
        return ", ".join(f"{name} {tuple(part.shape)}" for name, part in x.items())
    return " and ".join(str(tuple(part.shape)) for part in arguments(x)[0])


def output_of(returned: Any) -> Tensor:
    """A network's outputs: the tensor that it returns, or the `logits` of the object."""
    output = getattr(returned, "logits", returned)
    if isinstance(output, Tensor):
        return output
    kind, bare = type(returned).__name__, hasattr(returned, "last_hidden_state")
    how = "take one with a head, such as AutoModelForSequenceClassification"
    raise UserError(
        f"the model must return one tensor, or an object with the outputs as .logits, not {kind}; "
        f"{how if bare else 'let its forward return the outputs alone'}."
    )
