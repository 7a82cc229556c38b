"""The gradients of single samples, clipped and summed with noise, as one loss to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedhelix.core.parts import Inputs
from fedhelix.core.samples import of_each_sample
from fedhelix.core.seeds import secret_normal
from fedhelix.core.tree import State, wide

SampleLoss = Callable[[Mapping[str, Tensor], Any, Tensor], Tensor]


def clipped_mean(
    loss: SampleLoss, params: State, x: Inputs, y: Tensor, mask: Tensor | None, clip: Tensor
) -> tuple[State, Tensor, Tensor]:
    """The sum of the samples' gradients, none longer than the clip, over their number; the mean
    loss; the number.
    """
    grads, losses = of_each_sample(grad_and_value(loss), params, x, y)
    present = torch.ones_like(losses) if mask is None else mask
    grads = {name: wide(grad) for name, grad in grads.items()}
    squares = [grad.reshape(len(grad), -1).square().sum(1) for grad in grads.values()]
    lengths = torch.stack(squares).sum(0).sqrt()
    factor = present * (clip / lengths.clamp_min(1e-12)).clamp(max=1)
    count = present.sum().clamp_min(1)
    mean = {
        name: torch.einsum("n,n...->...", factor.to(grad.dtype), grad) / count
        for name, grad in grads.items()
    }
    return mean, (losses * present).sum() / count, count


def with_noise(mean: State, deviation: Tensor, secret: bool) -> State:
    """A mean with Gaussian noise: the operating system's, or what PyTorch's generator gives."""
    if not secret:
        return {name: value + deviation * torch.randn_like(value) for name, value in mean.items()}
    draws = secret_normal(sum(value.numel() for value in mean.values()))
    parts = draws.split([value.numel() for value in mean.values()])
    return {
        name: value + deviation * part.view_as(value).to(value.device)
        for (name, value), part in zip(mean.items(), parts, strict=True)
    }


def surrogate(params: Mapping[str, Tensor], gradient: State, value: Tensor) -> Tensor:
    """A number that equals `value` and whose gradient by the parameters is the given one."""
    moved = [
        ((params[name] - params[name].detach()) * grad).sum() for name, grad in gradient.items()
    ]
    return value.detach() + torch.stack(moved).sum()
