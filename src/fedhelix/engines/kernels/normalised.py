"""Batch normalisation in C, together with the ReLU and the pooling that follow it."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.engines.kernels.library import call, readable


class Maps(ctypes.Structure):
    """As in the C file."""

    _fields_: ClassVar = [
        (name, ctypes.c_int64)
        for name in ("samples", "channels", "height", "width", "relu", "pool")
    ]


class NormOptions(NamedTuple):
    """What normalisation adds to the variance, and what follows it."""

    eps: float
    relu: bool
    pool: int


@lru_cache(maxsize=1000)
def maps_of(sizes: torch.Size, options: NormOptions) -> Maps:
    """The sizes, as the C file reads them."""
    return Maps(*sizes, options.relu, options.pool)


def is_plain_norm(layer: nn.Module) -> bool:
    """Whether this is PyTorch's own BatchNorm2d with weights and with running statistics."""
    if type(layer) is not nn.BatchNorm2d:
        return False
    return layer.affine and layer.track_running_stats and layer.momentum is not None


class Norm(nn.BatchNorm2d):
    """Batch normalisation, optionally ReLU, and the maxima of `pool` x `pool` squares."""

    relu: ClassVar[bool]
    pool: ClassVar[int]
    # As `is_plain_norm` has checked.
    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The same function as PyTorch's layers one after the other."""
        if not self._is_for_c(x):
            return follow(super().forward(x), self.relu, self.pool)
        options = NormOptions(self.eps, self.relu, self.pool)
        if not self.training:
            inverse = (self.running_var + self.eps).rsqrt()
            return normalise(x, self.running_mean, inverse, self.weight, self.bias, options)[0]
        mean, inverse = self._statistics(x)
        arguments = x, mean, inverse, self.weight, self.bias, options
        return (
            ComputeNorm.apply(*arguments) if torch.is_grad_enabled() else normalise(*arguments)[0]
        )

    def _is_for_c(self, x: Tensor) -> bool:
        """Gradients in evaluation mode, which nothing here needs often, are PyTorch's work."""
        if x.dim() != 4 or x.shape[1] != self.num_features or x.numel() <= x.shape[1]:
            return False
        if min(x.shape[2:]) < self.pool or (torch.is_grad_enabled() and not self.training):
            return False
        state = (self.weight, self.bias, self.running_mean, self.running_var)
        return readable(x, *state) and all(value.is_contiguous() for value in state)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse deviation of each channel; updates the running statistics."""
        self.num_batches_tracked.add_(1)
        x = x.detach().contiguous()
        mean, inverse = torch.empty(2, x.shape[1]).unbind()
        numbers = self.eps, self.momentum
        running = self.running_mean, self.running_var
        maps = maps_of(x.shape, NormOptions(self.eps, False, 1))
        call("statistics", maps, x, *numbers, mean, inverse, *running)
        return mean, inverse


@cache
def norm(relu: bool, pool: int) -> type[Norm]:
    """The type of a normalisation with these options."""
    return type("Norm", (Norm,), {"relu": relu, "pool": pool})


def follow(x: Tensor, relu: bool, pool: int) -> Tensor:
    """ReLU and pooling in PyTorch."""
    x = F.relu(x) if relu else x
    return F.max_pool2d(x, pool) if pool > 1 else x


def normalise(
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    bias: Tensor,
    options: NormOptions,
    remember: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The outputs, and with `remember` the places of the maxima."""
    x = x.contiguous()
    samples, channels, height, width = x.shape
    out = x.new_empty(samples, channels, height // options.pool, width // options.pool)
    where = torch.empty(out.shape, dtype=torch.uint8) if remember else None
    call("normalise", maps_of(x.shape, options), x, mean, inverse, weight, bias, out, where)
    return out, where


class ComputeNorm(torch.autograd.Function):
    """A normalisation in training mode with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        inverse: Tensor,
        weight: Tensor,
        bias: Tensor,
        options: NormOptions,
    ) -> Tensor:
        """All maps of all samples."""
        out, where = normalise(x, mean, inverse, weight, bias, options, remember=options.pool > 1)
        ctx.save_for_backward(x, mean, inverse, weight, bias, where)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of maps, weights and biases."""
        x, mean, inverse, weight, bias, where = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, which only PyTorch's own layers have
            return twice_differentiable(ctx, gradient)
        x, gradient = x.contiguous(), gradient.contiguous()
        to_x, to_weight, to_bias = map(torch.empty_like, (x, weight, bias))
        arrays = (x, mean, inverse, weight, bias, where, gradient, to_x, to_weight, to_bias)
        call("normalise_back", maps_of(x.shape, ctx.options), *arrays)
        return to_x, None, None, to_weight, to_bias, None


def twice_differentiable(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients through PyTorch's own layers."""
    x, _, _, weight, bias, _ = ctx.saved_tensors
    eps, relu, pool = ctx.options
    inputs = dict(zip((0, 3, 4), (x, weight, bias), strict=True))
    leaves = {place: value for place, value in inputs.items() if ctx.needs_input_grad[place]}
    out = follow(F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), relu, pool)
    grads = torch.autograd.grad(out, list(leaves.values()), gradient, create_graph=True)
    found = dict(zip(leaves, grads, strict=True))
    return tuple(found.get(place) for place in range(6))
