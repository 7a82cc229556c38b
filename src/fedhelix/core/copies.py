"""Copies of networks, also of those that have run."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

# Sparse tensors that PyTorch cannot copy deeply.
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def copied(module: nn.Module) -> nn.Module:
    """A deep copy.

    Some layers, such as those of `nn.utils.weight_norm`, leave tensors of a forward pass behind,
    which PyTorch does not copy. The next pass computes them anew, so that any value will do.
    """
    left = {
        id(value): _plain(value)
        for part in module.modules()
        for value in (*vars(part).values(), *part._buffers.values())
        if isinstance(value, Tensor)
        and (value.grad_fn is not None or _is_stacked(value) or value.layout in COMPRESSED)
    }
    return copy.deepcopy(module, left)


def _plain(value: Tensor) -> Tensor:
    return torch.empty(0) if _is_stacked(value) else value.detach().clone()


def _is_stacked(value: Tensor) -> bool:
    """Whether this is a leftover of `torch.func.vmap`, which has no values any more."""
    stacked: bool = torch._C._functorch.is_batchedtensor(value)
    return stacked
