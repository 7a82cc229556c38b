"""Squared gradients of single samples, from one backward pass of all of them.

The gradient of a layer's weights in one sample is a product of what went into the layer and of the
gradient of what came out. Both are known for every sample after one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.core.cpu import one_thread
from fedhelix.core.parts import Inputs, each
from fedhelix.core.tree import State
from fedhelix.engines.local.network import channels_last, forward
from fedhelix.engines.local.setup import Setup

# On a CPU, whose caches they should fit, and on a GPU, which needs many to be busy.
SAMPLES_AT_ONCE = (128, 256)
VALUES_AT_ONCE = (2**28, 2**30)  # of a layer's gradients: 1 and 4 GiB

Passed = tuple[Tensor, Tensor]  # what went into a layer, and the gradient of what came out


@one_thread()
def squared_gradients(
    setup: Setup, state: State, names: Sequence[str], x: Inputs, y: Tensor
) -> State | None:
    """For each entry the mean over samples of its squared gradient, in evaluation mode and in the
    precision of the training.

    None where a layer is of another kind than those below, or is used more than once.
    """
    if setup.layers.tied or not all(_is_known(_owner(setup, name)) for name in names):
        return None
    setup.module.eval()
    which = (tuple(names), tuple(state))
    sums: Callable[..., tuple[Tensor, ...]] = partial(_sums, setup, *which)
    if isinstance(x, Tensor):
        sums = setup.recorded(("squares", *which), sums)
    total = [torch.zeros_like(state[name]) for name in names]
    try:
        count = SAMPLES_AT_ONCE[y.is_cuda]
        for at in range(0, len(y), count):
            rows = slice(at, at + count)
            torch._foreach_add_(total, sums(each(itemgetter(rows), x), y[rows], *state.values()))
    except _Unsuited:
        return None
    return dict(zip(names, torch._foreach_div(total, len(y)), strict=True))


class _Unsuited(Exception):
    """A layer is not used once, with one row or image per sample."""


def _owner(setup: Setup, name: str) -> nn.Module:
    """The layer that has an entry."""
    return setup.module.get_submodule(name.rpartition(".")[0])


def _sums(
    setup: Setup,
    names: Sequence[str],
    entries: Sequence[str],
    x: Inputs,
    y: Tensor,
    *values: Tensor,
) -> tuple[Tensor, ...]:
    """For each name the sum over some samples of the squared gradients under a model's values."""
    state = dict(zip(entries, values, strict=True))
    owners = {name: _owner(setup, name) for name in names}
    passed = _pass(setup, state, set(owners.values()), x, y)
    with torch.no_grad():
        return tuple(_squares(layer, name, state, *passed[layer]) for name, layer in owners.items())


def _pass(
    setup: Setup, state: State, layers: Collection[nn.Module], x: Inputs, y: Tensor
) -> dict[nn.Module, Passed]:
    """What went into each layer, and the gradient of what came out."""
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def remember(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.append((layer, inputs[0].detach(), output))

    hooks = [layer.register_forward_hook(remember) for layer in layers]
    try:
        leaves = {name: state[name].detach().requires_grad_() for name in setup.layers.parameters}
        losses = setup.objective.losses(
            forward(setup, {**state, **leaves}, each(channels_last, x)), y
        )
    finally:
        for hook in hooks:
            hook.remove()
    if losses.dim() == 0 or len(seen) != len(layers) or {layer for layer, *_ in seen} != layers:
        raise _Unsuited
    if not all(_is_plain(layer, entered, len(y)) for layer, entered, _ in seen):
        raise _Unsuited
    slopes = torch.autograd.grad(losses.sum(), [left for *_, left in seen])
    return {
        layer: (entered, slope) for (layer, entered, _), slope in zip(seen, slopes, strict=True)
    }


def _is_known(layer: nn.Module) -> bool:
    """Whether there is a rule for this kind of layer."""
    if type(layer) is nn.Conv2d:
        simple = layer.groups == 1 and set(layer.dilation) == {1}
        return simple and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d)


def _is_plain(layer: nn.Module, entered: Tensor, samples: int) -> bool:
    """Whether the layer got one row, or one image, per sample."""
    images = isinstance(layer, (nn.Conv2d, nn.BatchNorm2d))
    return entered.dim() == (4 if images else 2) and len(entered) == samples


def _squares(layer: nn.Module, name: str, state: State, entered: Tensor, slope: Tensor) -> Tensor:
    """The sum over samples of the squared gradients of one of a layer's entries."""
    prefix, _, entry = name.rpartition(".")
    if isinstance(layer, nn.Conv2d) and entry == "weight":
        return _of_kernels(layer, entered.to(slope.dtype), slope)
    entered, slope = entered.float(), slope.float()
    if entry == "weight" and isinstance(layer, nn.Linear):
        return slope.square().T @ entered.square()
    if entry == "weight":  # BatchNorm's
        assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
        mean, var = (
            state[f"{prefix}.{name}"].view(-1, *[1] * (entered.dim() - 2))
            for name in ("running_mean", "running_var")
        )
        slope = slope * (entered - mean) * (var + layer.eps).rsqrt()
    return slope.flatten(2).sum(2).square().sum(0) if slope.dim() > 2 else slope.square().sum(0)


def _of_kernels(layer: nn.Conv2d, entered: Tensor, slope: Tensor) -> Tensor:
    """The same for a convolution's kernels, in parts that are small enough for the memory.

    The channels of a place lie side by side, so that patches are copied in long runs.
    """
    outputs, inputs, *size = layer.weight.shape
    count = max(1, VALUES_AT_ONCE[slope.is_cuda] // layer.weight.numel())
    total = layer.weight.new_zeros(outputs, math.prod(size) * inputs)
    for images, slopes in zip(entered.split(count), slope.split(count), strict=True):
        places = slopes.permute(0, 2, 3, 1).flatten(1, 2)
        each = places.mT @ _patches(layer, images)
        # The norm reads the gradients once, and writes no squares of them.
        total += torch.linalg.vector_norm(each, dim=0, dtype=total.dtype).square()
    return total.view(outputs, *size, inputs).movedim(-1, 1).contiguous()


def _patches(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """What each output of a convolution sees: samples x places x (kernel * channels).

    F.unfold starts a kernel of the GPU for every sample; this copies all of them at once.
    """
    assert not isinstance(layer.padding, str)
    (high, wide), (down, across) = layer.padding, layer.stride
    last = images.contiguous(memory_format=torch.channels_last)
    padded = F.pad(last, (wide, wide, high, high))
    size = layer.kernel_size
    windows = padded.unfold(2, size[0], down).unfold(3, size[1], across)
    return windows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
