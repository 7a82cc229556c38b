"""Compiles the C files of `engines/kernels` for the processor at hand, when they are first needed.

That takes a compiler some seconds but no PyTorch, so the command line begins with it while it
imports the rest.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from fedhelix.core.files import cache_folder

FOLDER = Path(__file__).parents[1] / "engines" / "kernels"
SOURCES = sorted(FOLDER.glob("*.c"))
# The flags by which different compilers optimise for this processor.
FOR_THIS_PROCESSOR: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])
COMPILING = Lock()


def compile_ahead() -> None:
    """Begin to compile what is not compiled yet, without waiting for it."""
    if not compiled_path().exists():
        Thread(target=compiled, daemon=True).start()


def compiled() -> Path | None:
    """The compiled C files; None if there is no compiler, or it fails."""
    path = compiled_path()
    with COMPILING, suppress(OSError, subprocess.SubprocessError):
        if not path.exists():
            compile_to(path)
        return path
    return None


def compiled_path() -> Path:
    """Where they are kept: another place for other files or another processor."""
    sources = b"".join(path.read_bytes() for path in sorted([*SOURCES, *FOLDER.glob("*.h")]))
    name = hashlib.blake2b(sources + processor().encode(), digest_size=8).hexdigest()
    return cache_folder() / f"kernels-{name}.so"


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
