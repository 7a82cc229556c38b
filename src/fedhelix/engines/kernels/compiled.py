"""Blocks of a network in C: a convolution with the ReLU and the pooling that follow it.

The C file is compiled for this processor when it is first needed, and kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.core.errors import UserError
from fedhelix.core.files import cache_folder
from fedhelix.engines.kernels.tuned import Pair, is_plain_convolution, is_plain_pooling

SOURCE = Path(__file__).with_name("block.c")
LANES = 8  # samples that the C file computes side by side
MOST_CELLS = 255  # of a pooling window: their numbers are bytes
# The flags by which different compilers optimise for this processor.
FOR_THIS_PROCESSOR: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])
FIELDS = (
    *("samples", "channels", "height", "width"),
    *("outputs", "rows", "columns", "down", "right", "relu", "pool"),
)


class Shape(ctypes.Structure):
    """As in the C file."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in FIELDS]


def available() -> bool:
    """Whether the C file can be compiled on this machine."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled C file; None if there is no compiler."""
    source = SOURCE.read_bytes()
    name = hashlib.blake2b(source + processor().encode(), digest_size=8).hexdigest()
    path = cache_folder() / f"block-{name}.so"
    with suppress(OSError, subprocess.SubprocessError):
        if not path.exists():
            compile_to(path)
        return ctypes.CDLL(str(path))
    return None


def compile_to(path: Path) -> None:
    """Compile the C file; several processes may do so at once."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        files = [str(SOURCE), "-o", str(target)]
        for options in FOR_THIS_PROCESSOR:
            command = [compiler, "-O2", *options, "-w", "-shared", "-fPIC", *files]
            if subprocess.run(command, capture_output=True, timeout=120).returncode == 0:
                target.replace(path)
                return
    raise FileNotFoundError("the C compiler failed")


def processor() -> str:
    """The processor's model, as exactly as the system reports it."""
    fields = ("model name", "CPU implementer", "CPU part", "CPU variant")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        words = [line.partition(":")[2].strip() for line in lines if line.startswith(fields)]
        return " ".join([platform.machine(), *words])
    return f"{platform.machine()} {platform.processor()}"


def layers_for(module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """The convolutions that become blocks, and the layers that these blocks absorb."""
    if not available():
        raise UserError(
            "compiled kernels need a C compiler (cc); install one or choose other kernels."
        )
    layers = list(module.modules())
    used = Counter(child for layer in layers for child in layer._modules.values())
    convolutions = set(filter(is_plain_convolution, layers))
    replaced: dict[nn.Module, type[nn.Module]] = dict.fromkeys(convolutions, block(False, 1))
    for chain in (list(layer) for layer in layers if type(layer) is nn.Sequential):
        for place, convolution in enumerate(chain):
            if convolution in convolutions and used[convolution] == 1:
                absorbed = followers(
                    [layer for layer in chain[place + 1 : place + 3] if used[layer] == 1]
                )
                pools = [layer.kernel_size for layer in absorbed if isinstance(layer, nn.MaxPool2d)]
                replaced[convolution] = block(len(absorbed) > len(pools), *(pools or [1]))
                replaced |= dict.fromkeys(absorbed, Absorbed)
    return replaced


def followers(layers: list[nn.Module]) -> list[nn.Module]:
    """The layers right after a convolution that join its block.

    At most one ReLU and one pooling, in any order.
    """
    absorbed: list[nn.Module] = []
    for layer in layers:
        if not (is_relu(layer) or is_tiling(layer)) or type(layer) in map(type, absorbed):
            break
        absorbed.append(layer)
    return absorbed


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
    """A convolution of stride 1, optionally ReLU, and the maxima of `pool` x `pool` squares."""

    relu: ClassVar[bool]
    pool: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        """The same function as PyTorch's layers one after the other."""
        padding: Pair = self.padding  # type: ignore[assignment]
        if not is_for_c(x, self.weight, padding):
            return plain(x, self.weight, self.bias, padding, self.relu, self.pool)
        arguments = x, self.weight, self.bias, padding, self.relu, self.pool
        return Compute.apply(*arguments) if torch.is_grad_enabled() else forward(*arguments)[0]


@cache
def block(relu: bool, pool: int) -> type[Block]:
    """The type of a block with these options."""
    return type("Block", (Block,), {"relu": relu, "pool": pool})


def is_for_c(x: Tensor, weight: Tensor, padding: Pair) -> bool:
    """Whether the C file can read these images; it cannot work under `torch.func`'s transforms."""
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return False
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or not x.numel():
        return False
    large = all(x.shape[2 + k] + 2 * padding[k] >= weight.shape[2 + k] for k in (0, 1))
    return (
        large
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
    )


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, relu: bool, pool: int
) -> Tensor:
    """The same block in PyTorch."""
    out = F.conv2d(x, weight, bias, padding=padding)
    out = F.relu(out) if relu else out
    return F.max_pool2d(out, pool) if pool > 1 else out


def address(value: Tensor | None) -> ctypes.c_void_p | None:
    """The address of the values."""
    return None if value is None else ctypes.c_void_p(value.data_ptr())


def call(function: str, *arguments: Any) -> None:
    """Call a function of the C file."""
    compiled = library()
    if compiled is None or getattr(compiled, function)(*arguments):
        raise MemoryError("there is not enough memory for a convolution.")


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Pair,
    relu: bool,
    pool: int,
    remember: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The block's outputs, and with `remember` the places of the maxima."""
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    shape = Shape(*x.shape, len(weight), *weight.shape[2:], *padding, relu, pool)
    tall, broad = (
        (x.shape[2 + k] + 2 * padding[k] - weight.shape[2 + k] + 1) // pool for k in (0, 1)
    )
    out = x.new_empty(len(x), len(weight), tall, broad)
    blocks = -(-len(x) // LANES)
    where = torch.empty(blocks * LANES * out[0].numel(), dtype=torch.uint8) if remember else None
    arrays = (address(value) for value in (x, weight, bias, out, where))
    call("forward", ctypes.byref(shape), *arrays)
    return out, where


class Compute(torch.autograd.Function):
    """A block with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Pair,
        relu: bool,
        pool: int,
    ) -> Tensor:
        """All maps of all samples."""
        out, where = forward(x, weight, bias, padding, relu, pool, remember=relu or pool > 1)
        ctx.save_for_backward(x, weight, bias, where)
        ctx.options = padding, relu, pool
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of images, weights and bias, as far as they are needed."""
        x, weight, bias, where = ctx.saved_tensors
        padding, relu, pool = ctx.options
        inputs, needed = (x, weight, bias), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # for second derivatives, which only PyTorch's own layers have
            leaves = [value for value, need in zip(inputs, needed, strict=True) if need]
            out = plain(x, weight, bias, padding, relu, pool)
            grads = iter(torch.autograd.grad(out, leaves, gradient, create_graph=True))
            return (*(next(grads) if need else None for need in needed), None, None, None)
        x, weight, gradient = x.contiguous(), weight.contiguous(), gradient.contiguous()
        shape = Shape(*x.shape, len(weight), *weight.shape[2:], *padding, relu, pool)
        to = [
            torch.empty_like(value) if need else None
            for value, need in zip(inputs, needed, strict=True)
        ]
        arrays = (address(value) for value in (x, weight, where, gradient, *to))
        call("backward", ctypes.byref(shape), *arrays)
        return (*to, None, None, None)
