"""Sends values between processes of one machine: large tensors in mapped files, the rest as bytes.

Pickle is used only between processes of one program, never on disk or over a network.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.imports import IMPORTED, find_in_file

# As PyTorch's allocator aligns: some kernels round differently on other addresses.
ALIGNMENT = 64

SMALL = 1 << 16  # bytes of tensors that are not worth a file
WRITTEN_AT_ONCE = 1 << 20  # bytes


class Unsendable(Exception):
    """A value that another process could not import; the message names it."""


class Place(NamedTuple):
    """The position of a tensor in a file."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Places = Mapping[int, Place]  # by the id of the tensor, which must stay alive


def folder_for(size: int) -> tempfile.TemporaryDirectory[str]:
    """A folder for shared files: in memory if it can hold twice `size` bytes, otherwise on disk."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    if usable:
        _clean(memory)
    fits = usable and shutil.disk_usage(memory).free > 2 * size
    return tempfile.TemporaryDirectory(
        prefix=f"fedhelix-{_namespace()}-{os.getpid()}-",
        dir=memory if fits else None,
        ignore_cleanup_errors=True,
    )


def _clean(memory: Path) -> None:
    """Delete the folders of processes that were killed."""
    for folder in memory.glob(f"fedhelix-{_namespace()}-*-*"):
        try:
            os.kill(int(folder.name.split("-")[2]), 0)
        except (ProcessLookupError, OverflowError):
            shutil.rmtree(folder, ignore_errors=True)
        except (PermissionError, ValueError):
            continue  # of another user


def _namespace() -> int:
    """Tells containers apart, which may share memory but not the numbers of processes."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def share(tensors: Iterable[Tensor], path: Path) -> dict[int, Place]:
    """Write tensors to a new file, each of them once."""
    places: dict[int, Place] = {}
    # Not through a mapping: with full memory a write raises an error, but touching a mapped page
    # kills the process.
    with path.open("xb") as file:
        for tensor in tensors:
            if id(tensor) in places or not is_plain(tensor):
                continue
            file.write(bytes(-file.tell() % ALIGNMENT))
            places[id(tensor)] = Place(str(path), file.tell(), tuple(tensor.shape), tensor.dtype)
            file.write(view_bytes(tensor))
    return places


def mapped(path: str, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a shared file, without a copy; writing to it copies the page (copy on write)."""
    size = shape_bytes(shape, dtype)
    return (
        open_map(path)[offset : offset + size].view(dtype).view(shape)
        if size
        else torch.empty(shape, dtype=dtype)
    )


@lru_cache(maxsize=2)  # the data and the current payloads
def open_map(path: str) -> Tensor:
    """A whole file as bytes."""
    return torch.from_file(path, shared=False, size=Path(path).stat().st_size, dtype=torch.uint8)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is just a dense array of values; PyTorch itself pickles the others."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_conj()


def view_bytes(tensor: Tensor) -> memoryview:
    """The values of a plain tensor, without a copy."""
    if tensor.dtype is torch.float32:  # most are; NumPy makes views faster
        return tensor.numpy().reshape(-1).view(np.uint8).data
    return tensor.view(-1).view(torch.uint8).numpy().data


def shape_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The number of bytes of such a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def view_values(values: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of `view_bytes`."""
    return (
        torch.frombuffer(values, dtype=dtype).view(shape)
        if len(values)
        else torch.empty(shape, dtype=dtype)
    )


def rebuild(values: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of `view_bytes`; a copy, with PyTorch's alignment."""
    return view_values(values, shape, dtype).clone()


class Pickler(pickle.Pickler):
    """Pickles tensors as bytes, or as their place in a file.

    Refuses what is defined in the main script, which a worker does not run.
    """

    def __init__(
        self,
        file: io.BytesIO,
        places: Places,
        brief: Collection[int] = (),
        out_of_band: Callable[[pickle.PickleBuffer], Any] | None = None,
    ):
        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        self.places, self.brief = places, brief

    def reducer_override(self, value: Any) -> Any:
        """How to pickle one object; pickle calls this for each of them."""
        if isinstance(value, type | FunctionType):
            if value.__module__ == "__main__":
                raise Unsendable(f"'{value.__qualname__}' is defined in the main script")
            if value.__module__ in IMPORTED:
                return find_in_file, (IMPORTED[value.__module__], value.__qualname__)
        if not isinstance(value, Tensor):
            return NotImplemented
        if id(value) in self.places:
            return mapped, tuple(self.places[id(value)])
        if not is_plain(value):
            return NotImplemented
        how = view_values if id(value) in self.brief else rebuild
        return how, (pickle.PickleBuffer(view_bytes(value)), tuple(value.shape), value.dtype)


def dumps(value: Any, places: Places | None = None) -> memoryview:
    """A value as bytes; a tensor that has a place is stored as a reference to it."""
    file = io.BytesIO()
    Pickler(file, places or {}).dump(value)
    return file.getbuffer()


loads = pickle.loads


class Packed(NamedTuple):
    """A value whose tensors lie apart, one after the other."""

    value: bytes
    sizes: list[int]  # of the parts, in bytes
    content: bytearray | Path


def pack(value: Any, path: Path, brief: Iterable[Tensor] = ()) -> memoryview:
    """A value as bytes; its tensors in a new file, unless they are few or it cannot be written.

    `brief` tensors come out as views of one block of memory, all others as copies.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    Pickler(file, {}, {id(one) for one in brief}, buffers.append).dump(value)
    parts = [buffer.raw() for buffer in buffers]
    sizes = [part.nbytes for part in parts]
    padded = [piece for part in parts for piece in (part, bytes(-part.nbytes % ALIGNMENT))]
    content: bytearray | Path = path
    try:
        if sum(sizes) < SMALL:
            content = bytearray().join(padded)
        else:
            with path.open("xb", buffering=WRITTEN_AT_ONCE) as target:
                target.writelines(padded)
    except OSError:  # the disk is full
        path.unlink(missing_ok=True)
        content = bytearray().join(padded)
    return dumps(Packed(file.getvalue(), sizes, content))


def unpack(message: bytes) -> Any:
    """The inverse of `pack`; it deletes the file."""
    value, sizes, content = loads(message)
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    memory = torch.empty(size, dtype=torch.uint8).numpy().data  # with PyTorch's alignment
    if isinstance(content, Path):
        with content.open("rb") as file:
            file.readinto(memory)
        content.unlink()
    else:
        memory[:] = content
    starts = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return loads(value, buffers=parts)
