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
from typing import Any

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
        return ctypes.CDLL(str(path))
    return None


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


def call(function: str, *arguments: Any) -> None:
    """Call a function of the C files."""
    compiled = library()
    if compiled is None or getattr(compiled, function)(*arguments):
        raise MemoryError("there is not enough memory for a convolution.")


def address(value: Tensor | None) -> ctypes.c_void_p | None:
    """The address of the values."""
    return None if value is None else ctypes.c_void_p(value.data_ptr())


def readable(*values: Tensor) -> bool:
    """Whether the C files can read these tensors; they do not work under `torch.func`."""
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return False
    return all(value.dtype == torch.float32 and value.device.type == "cpu" for value in values)
