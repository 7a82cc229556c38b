"""Blocks of a network in C: a convolution with the ReLU and the pooling that follow it, in one pass
and back.

The C file is compiled for the processor at hand when it is first needed, and kept in the user's
cache.
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
FOR_THIS_PROCESSOR: tuple[list[str], ...] = (
    ["-march=native"],
    ["-mcpu=native"],
    [],
)  # what compilers call it


class Shape(ctypes.Structure):
    """As in the C file."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("samples", "channels", "height", "width")),
        *(
            (name, ctypes.c_int64)
            for name in ("outputs", "rows", "columns", "down", "right", "relu", "pool")
        ),
    ]


def available() -> bool:
    """Whether the C file can be had on this machine."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled C file; None without a compiler."""
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
        made = Path(folder) / path.name
        for options in FOR_THIS_PROCESSOR:
            command = [
                compiler,
                "-O2",
                *options,
                "-w",
                "-shared",
                "-fPIC",
                str(SOURCE),
                "-o",
                str(made),
            ]
            if subprocess.run(command, capture_output=True, timeout=120).returncode == 0:
                made.replace(path)
                return
    raise FileNotFoundError("the C compiler failed")


def processor() -> str:
    """The kind of processor, as exactly as the system tells."""
    wanted = ("model name", "CPU implementer", "CPU part", "CPU variant")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        words = [line.partition(":")[2].strip() for line in lines if line.startswith(wanted)]
        return " ".join([platform.machine(), *words])
    return f"{platform.machine()} {platform.processor()}"


def layers_for(module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """The layers that become blocks, and those that are thereby done with."""
    if not available():
        raise UserError(
            "compiled kernels need a C compiler (cc); install one or choose other kernels."
        )
    layers = list(module.modules())
    used = Counter(child for layer in layers for child in layer._modules.values())
    convolutions = set(filter(is_plain_convolution, layers))
    lent: dict[nn.Module, type[nn.Module]] = dict.fromkeys(convolutions, block(False, 1))
    for chain in (list(layer) for layer in layers if type(layer) is nn.Sequential):
        for place, convolution in enumerate(chain):
            if convolution in convolutions and used[convolution] == 1:
                absorbed = followers(
                    [layer for layer in chain[place + 1 : place + 3] if used[layer] == 1]
                )
                pools = [layer.kernel_size for layer in absorbed if isinstance(layer, nn.MaxPool2d)]
                lent[convolution] = block(len(absorbed) > len(pools), *(pools or [1]))
                lent |= dict.fromkeys(absorbed, Done)
    return lent


def followers(layers: list[nn.Module]) -> list[nn.Module]:
    """Those directly after a convolution that belong to its block: one ReLU and one pooling at
    most, in any order.
    """
    found: list[nn.Module] = []
    for layer in layers:
        if not (is_relu(layer) or is_tiling(layer)) or type(layer) in map(type, found):
            break
        found.append(layer)
    return found


def is_relu(layer: nn.Module) -> bool:
    """Whether this is PyTorch's own, and nobody listens to it."""
    return type(layer) is nn.ReLU and not is_heard(layer)


def is_tiling(layer: nn.Module) -> bool:
    """Whether this takes the maxima of squares that lie side by side, and nobody listens to it."""
    if not is_plain_pooling(layer) or is_heard(layer) or not isinstance(layer.kernel_size, int):
        return False
    size = layer.kernel_size
    plain = (
        layer.stride == size and layer.padding == 0 and layer.dilation == 1 and not layer.ceil_mode
    )
    return bool(plain) and size * size <= MOST_CELLS


def is_heard(layer: nn.Module) -> bool:
    """Whether somebody wants to see what goes in or comes out."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


class Done(nn.Module):
    """A layer that the block before it has done already."""

    def forward(self, x: Tensor) -> Tensor:
        """Nothing is left to do."""
        return x


class Block(nn.Conv2d):
    """A convolution of stride 1, ReLU if wanted, and the maxima of `pool` x `pool` squares."""

    relu: ClassVar[bool]
    pool: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        """As PyTorch's layers would do it one after the other."""
        padding: Pair = self.padding  # type: ignore[assignment]
        if not is_for_c(x, self.weight, padding):
            return plain(x, self.weight, self.bias, padding, self.relu, self.pool)
        arguments = x, self.weight, self.bias, padding, self.relu, self.pool
        return Compute.apply(*arguments) if torch.is_grad_enabled() else forward(*arguments)[0]


@cache
def block(relu: bool, pool: int) -> type[Block]:
    """The kind of block."""
    return type("Block", (Block,), {"relu": relu, "pool": pool})


def is_for_c(x: Tensor, weight: Tensor, padding: Pair) -> bool:
    """Whether these are pictures that the C file can read, and none of `torch.func`'s transforms
    looks on.
    """
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
    """The same by PyTorch."""
    out = F.conv2d(x, weight, bias, padding=padding)
    out = F.relu(out) if relu else out
    return F.max_pool2d(out, pool) if pool > 1 else out


def address(value: Tensor | None) -> ctypes.c_void_p | None:
    """Where the values lie."""
    return None if value is None else ctypes.c_void_p(value.data_ptr())


def call(function: str, *arguments: Any) -> None:
    """Call a function of the C file."""
    found = library()
    if found is None or getattr(found, function)(*arguments):
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
    """The block's outputs, and if wanted where the maxima were."""
    x, weight, bias = (
        x.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
    )
    shape = Shape(*x.shape, len(weight), *weight.shape[2:], *padding, relu, pool)
    tall, broad = (
        (x.shape[2 + k] + 2 * padding[k] - weight.shape[2 + k] + 1) // pool for k in (0, 1)
    )
    out = x.new_empty(len(x), len(weight), tall, broad)
    blocks = -(-len(x) // LANES)
    where = torch.empty(blocks * LANES * out[0].numel(), dtype=torch.uint8) if remember else None
    call(
        "forward",
        ctypes.byref(shape),
        address(x),
        address(weight),
        address(bias),
        address(out),
        address(where),
    )
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
        ctx.what = padding, relu, pool
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are wanted."""
        x, weight, bias, where = ctx.saved_tensors
        padding, relu, pool = ctx.what
        if (
            torch.is_grad_enabled()
        ):  # second derivatives are wanted, which PyTorch's own layers have
            wanted = [
                value
                for value, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False)
                if needed
            ]
            out = plain(x, weight, bias, padding, relu, pool)
            found = iter(torch.autograd.grad(out, wanted, gradient, create_graph=True))
            return (
                *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]),
                None,
                None,
                None,
            )
        x, weight, gradient = x.contiguous(), weight.contiguous(), gradient.contiguous()
        shape = Shape(*x.shape, len(weight), *weight.shape[2:], *padding, relu, pool)
        to = [
            torch.empty_like(value) if needed else None
            for value, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        given = (address(value) for value in (x, weight, where, gradient, *to))
        call("backward", ctypes.byref(shape), *given)
        return (*to, None, None, None)
