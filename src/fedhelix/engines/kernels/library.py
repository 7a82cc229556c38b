"""The compiled C files of this folder."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedhelix.core.compiler import compiled


def available() -> bool:
    """Whether the C files can be compiled on this machine."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled C files; None if there is no compiler."""
    path = compiled()
    with suppress(OSError):
        return load(path) if path else None
    return None


def load(path: Path) -> ctypes.CDLL:
    """A compiled library, with the types of its functions' arguments: sizes, arrays, numbers."""
    compiled = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    compiled.forward.argtypes = [pointer] * 6
    compiled.backward.argtypes = [pointer] * 8
    compiled.statistics.argtypes = [pointer, pointer, number, number, *[pointer] * 4]
    compiled.normalise.argtypes = [pointer] * 8
    compiled.normalise_back.argtypes = [pointer] * 11
    return compiled


@cache
def lanes() -> int:
    """The number of samples that the C files compute side by side."""
    compiled = library()
    return 0 if compiled is None else int(compiled.lanes())


def call(function: str, shape: ctypes.Structure, *arguments: Tensor | float | None) -> None:
    """Call a function of the C files with sizes, arrays and numbers."""
    compiled = library()
    values = [
        argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments
    ]
    if compiled is None or getattr(compiled, function)(ctypes.addressof(shape), *values):
        raise MemoryError("there is not enough memory for a convolution.")


def readable(*values: Tensor) -> bool:
    """Whether the C files can read these tensors; they do not work under `torch.func`."""
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return False
    return all(value.dtype == torch.float32 and value.device.type == "cpu" for value in values)
