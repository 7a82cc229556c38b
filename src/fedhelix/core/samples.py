"""A function of single samples, over many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedhelix.core.parts import Inputs, each


def of_each_sample(
    function: Callable[[Any, Any, Tensor], Any],
    model: Any,
    x: Inputs,
    y: Tensor,
    at_once: int | None = None,
) -> Any:
    """What a function of a model and one sample gives for each of them, stacked.

    Samples go together, or one by one where the network looks at values, as those of `transformers`
    do to see whether a mask is needed.
    """
    together = vmap(function, (None, 0, 0), chunk_size=at_once, randomness="different")
    try:
        return together(model, x, y)
    except RuntimeError as problem:
        if "vmap" not in str(problem):
            raise
    return _stacked([function(model, each(itemgetter(row), x), y[row]) for row in range(len(y))])


def _stacked(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values))
    if isinstance(first, dict):
        return {name: _stacked([value[name] for value in values]) for name in first}
    return tuple(_stacked(part) for part in zip(*values, strict=True))
