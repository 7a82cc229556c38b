"""Tensors as NumPy reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedhelix.core.errors import UserError

KNOWN = (torch.float16, torch.float32, torch.float64)  # types of numbers that NumPy has


def without_tensors(values: Any) -> Any:
    """Values whose tensors are arrays; NumPy reads none with a gradient or of bfloat16."""
    if isinstance(values, Tensor):
        if values.layout is not torch.strided:
            raise UserError("a sparse tensor is no array; its to_dense() makes one.")
        return readable(values).numpy()
    if isinstance(values, list | tuple) and _has_tensors(values):
        return [without_tensors(value) for value in values]
    return values


def _has_tensors(values: Any) -> bool:
    """Whether a list begins with a tensor, or with a list that does."""
    while isinstance(values, list | tuple) and len(values):
        values = values[0]
    return isinstance(values, Tensor)


def readable(values: Tensor) -> Tensor:
    """A tensor in main memory without a gradient, of a type that NumPy knows."""
    values = values.detach().cpu()
    unknown = values.is_floating_point() and values.dtype not in KNOWN
    return values.float() if unknown else values
