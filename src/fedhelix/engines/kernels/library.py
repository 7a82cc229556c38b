"""Compiles the C files of this folder for the processor at hand, when they are first needed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedhelix.core.files import cache_folder

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.c"))
# The flags by which different compilers optimise for this processor.
FOR_THIS_PROCESSOR: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])


def available() -> bool:
    """Whether the C files can be compiled on this machine."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled C files; None if there is no compiler."""
    sources = b"".join(path.read_bytes() for path in sorted([*SOURCES, *FOLDER.glob("*.h")]))
    name = hashlib.blake2b(sources + processor().encode(), digest_size=8).hexdigest()
    path = cache_folder() / f"kernels-{name}.so"
    with suppress(OSError, subprocess.SubprocessError):
        if not path.exists():
            compile_to(path)
        return load(path)
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


def compile_to(path: Path, *more: str) -> None:
    """Compile the C files, with more options if given; several processes may do so at once."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        files = [*map(str, SOURCES), "-lm", "-o", str(target)]
        for options in FOR_THIS_PROCESSOR:
            command = [compiler, "-O2", *options, *more, "-w", "-shared", "-fPIC", *files]
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
