"""Blocks of a network in C: a convolution or normalisation, and the ReLU and pooling after it."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.core.errors import UserError
from fedhelix.engines.kernels.library import available, call, lanes, readable
from fedhelix.engines.kernels.normalised import is_plain_norm, norm
from fedhelix.engines.kernels.tuned import Pair, is_plain_pooling

MOST_CELLS = 255  # of a pooling window: their numbers are bytes
FIELDS = (
    *("samples", "channels", "height", "width", "outputs", "rows", "columns"),
    *("down", "right", "stride_down", "stride_right", "relu", "pool"),
)


class Shape(ctypes.Structure):
    """As in the C file."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in FIELDS]


class BlockOptions(NamedTuple):
    """Of a block: its convolution's padding and stride, and what follows."""

    padding: Pair
    stride: Pair
    relu: bool
    pool: int


def layers_for(module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """The layers that become blocks, and the layers that these blocks absorb."""
    if not available():
        raise UserError(
            "compiled kernels need a C compiler (cc); install one or choose other kernels."
        )
    layers = list(module.modules())
    used = Counter(child for layer in layers for child in layer._modules.values())
    kinds: dict[nn.Module, Callable[..., type[nn.Module]]] = {
        **dict.fromkeys(filter(is_convolution, layers), block),
        **dict.fromkeys(filter(is_plain_norm, layers), norm),
    }
    replaced = {layer: kind(False, 1) for layer, kind in kinds.items()}
    for chain in (list(layer) for layer in layers if type(layer) is nn.Sequential):
        for place, layer in enumerate(chain):
            if layer in kinds and used[layer] == 1 and not has_hooks(layer):
                absorbed = followers(
                    [other for other in chain[place + 1 : place + 3] if used[other] == 1]
                )
                pools = [pool.kernel_size for pool in absorbed if isinstance(pool, nn.MaxPool2d)]
                replaced[layer] = kinds[layer](len(absorbed) > len(pools), *(pools or [1]))
                replaced |= dict.fromkeys(absorbed, Absorbed)
    return replaced


def followers(layers: list[nn.Module]) -> list[nn.Module]:
    """The layers right after a convolution or normalisation that join its block.

    At most one ReLU and one pooling, in any order.
    """
    absorbed: list[nn.Module] = []
    for layer in layers:
        if not (is_relu(layer) or is_tiling(layer)) or type(layer) in map(type, absorbed):
            break
        absorbed.append(layer)
    return absorbed


def is_convolution(layer: nn.Module) -> bool:
    """Whether this is a 2-D convolution without groups or dilation, of any stride."""
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str):
        return False
    narrow = all(pad < size for pad, size in zip(layer.padding, layer.kernel_size, strict=True))
    zeros = layer.padding_mode == "zeros"
    return narrow and zeros and layer.dilation == (1, 1) and layer.groups == 1


def is_relu(layer: nn.Module) -> bool:
    """Whether this is PyTorch's own ReLU without hooks."""
    return type(layer) is nn.ReLU and not has_hooks(layer)


def is_tiling(layer: nn.Module) -> bool:
    """Whether this takes the maxima of squares side by side, without hooks."""
    if not is_plain_pooling(layer) or has_hooks(layer) or not isinstance(layer.kernel_size, int):
        return False
    size = layer.kernel_size
    plain = (
        layer.stride == size and layer.padding == 0 and layer.dilation == 1 and not layer.ceil_mode
    )
    return bool(plain) and size * size <= MOST_CELLS


def has_hooks(layer: nn.Module) -> bool:
    """Whether a hook observes the layer's inputs or outputs."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


class Absorbed(nn.Module):
    """A layer whose work the block before it has done."""

    def forward(self, x: Tensor) -> Tensor:
        """Pass the values on."""
        return x


class Block(nn.Conv2d):
    """A convolution, optionally ReLU, and the maxima of `pool` x `pool` squares."""

    relu: ClassVar[bool]
    pool: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        """The same function as PyTorch's layers one after the other."""
        options = BlockOptions(self.padding, self.stride, self.relu, self.pool)  # type: ignore[arg-type]
        if not is_for_c(x, self.weight, options):
            return plain(x, self.weight, self.bias, options)
        arguments = x, self.weight, self.bias, options
        return ComputeBlock.apply(*arguments) if torch.is_grad_enabled() else forward(*arguments)[0]


@cache
def block(relu: bool, pool: int) -> type[Block]:
    """The type of a block with these options."""
    return type("Block", (Block,), {"relu": relu, "pool": pool})


def is_for_c(x: Tensor, weight: Tensor, options: BlockOptions) -> bool:
    """Whether the C file can compute this block."""
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or not x.numel():
        return False
    return readable(x, weight) and min(sides(x, weight, options)) > 0


def sides(x: Tensor, weight: Tensor, options: BlockOptions) -> Pair:
    """Height and width of the block's outputs."""
    tall, broad = (
        (x.shape[2 + k] + 2 * options.padding[k] - weight.shape[2 + k]) // options.stride[k] + 1
        for k in (0, 1)
    )
    return tall // options.pool, broad // options.pool


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, options: BlockOptions) -> Tensor:
    """The same block in PyTorch."""
    out = F.conv2d(x, weight, bias, stride=options.stride, padding=options.padding)
    out = F.relu(out) if options.relu else out
    return F.max_pool2d(out, options.pool) if options.pool > 1 else out


@lru_cache(maxsize=1000)
def shape_of(images: torch.Size, weight: torch.Size, options: BlockOptions) -> Shape:
    """The sizes, as the C file reads them."""
    (down, right), (stride_down, stride_right), relu, pool = options
    sizes = (*images, weight[0], *weight[2:])
    return Shape(*sizes, down, right, stride_down, stride_right, relu, pool)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: BlockOptions, remember: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The block's outputs, and with `remember` the places of the maxima."""
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(len(x), len(weight), *sides(x, weight, options))
    samples = -(-len(x) // lanes()) * lanes()
    where = torch.empty(samples * out[0].numel(), dtype=torch.uint8) if remember else None
    call("forward", shape_of(x.shape, weight.shape, options), x, weight, bias, out, where)
    return out, where


class ComputeBlock(torch.autograd.Function):
    """A block with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: BlockOptions
    ) -> Tensor:
        """All maps of all samples."""
        out, where = forward(x, weight, bias, options, remember=options.relu or options.pool > 1)
        ctx.save_for_backward(x, weight, bias, where)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of images, weights and bias, as far as they are needed."""
        x, weight, bias, where = ctx.saved_tensors
        inputs, needed = (x, weight, bias), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # for second derivatives, which only PyTorch's own layers have
            leaves = [value for value, need in zip(inputs, needed, strict=True) if need]
            out = plain(x, weight, bias, ctx.options)
            grads = iter(torch.autograd.grad(out, leaves, gradient, create_graph=True))
            return (*(next(grads) if need else None for need in needed), None)
        x, weight, gradient = x.contiguous(), weight.contiguous(), gradient.contiguous()
        to = [
            torch.empty_like(value) if need else None
            for value, need in zip(inputs, needed, strict=True)
        ]
        shape = shape_of(x.shape, weight.shape, ctx.options)
        call("backward", shape, x, weight, where, gradient, *to)
        return (*to, None)
