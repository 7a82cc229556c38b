"""BatchNorm and what follows it in a residual network: a sum with the shortcut, and a ReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.core.cuda import with_triton


def norm_relu(
    norm: nn.BatchNorm2d, x: Tensor, shortcut: Callable[[], Tensor] | None = None
) -> Tensor:
    """relu(norm(x) + shortcut()), in training on a GPU as two kernels each way instead of five.

    The shortcut is a function, so that its layers are called after the norm as long as anybody
    watches: a layer and its norm are told by the order of calls.
    """
    fused = with_triton("fedhelix.models.fused") if _can_fuse(norm, x) else None
    if fused is None:
        return F.relu(norm(x) if shortcut is None else norm(x) + shortcut())
    added = None if shortcut is None else shortcut().to(x.dtype)
    out: Tensor = fused.FusedNorm.apply(x, added, *_entries(norm), True)
    return out


def norm_alone(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """norm(x), by the same kernels."""
    fused = with_triton("fedhelix.models.fused") if _can_fuse(norm, x) else None
    out: Tensor = (
        norm(x) if fused is None else fused.FusedNorm.apply(x, None, *_entries(norm), False)
    )
    return out


def _entries(norm: nn.BatchNorm2d) -> tuple[Any, ...]:
    """What the kernels take."""
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return norm.weight, norm.bias, *running, norm.momentum, norm.eps


def _can_fuse(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """The kernels are for plain batches whose channels lie side by side, as they do where clients
    are computed apart.
    """
    if not (norm.training and x.is_cuda) or torch._C._are_functorch_transforms_active():
        return False  # inside of transforms, layouts cannot be asked for
    return (
        norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous(memory_format=torch.channels_last)
    )
