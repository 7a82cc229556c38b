"""How values travel between the processes of one machine: large tensors in mapped files, the rest
as bytes.

Pickle is used between processes of one program only, never on disk or on a network.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhelix.core.imports import IMPORTED, find_in_file

ALIGNMENT = (
    64  # what PyTorch's own allocator gives: some kernels round differently on other addresses
)


class Unsendable(Exception):
    """Something that another process could not find again; the message names it."""


class Place(NamedTuple):
    """Where a tensor lies in a file."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Places = Mapping[int, Place]  # by the id of the tensor, which must be kept alive meanwhile


def folder_for(size: int) -> tempfile.TemporaryDirectory[str]:
    """A folder for shared files: in memory where there is room for `size` bytes and more, otherwise
    on disk.
    """
    memory = Path("/dev/shm")
    roomy = (
        memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * size
    )
    return tempfile.TemporaryDirectory(
        prefix="fedhelix-", dir=memory if roomy else None, ignore_cleanup_errors=True
    )


def share(tensors: Iterable[Tensor], path: Path) -> dict[int, Place]:
    """Write tensors into a new file, each one once, however often it occurs."""
    places: dict[int, Place] = {}
    # Not through a mapping: where memory is full, writing gives an error, but touching a mapped
    # page kills.
    with path.open("xb") as file:
        for tensor in tensors:
            if id(tensor) in places or not is_plain(tensor):
                continue
            file.write(bytes(-file.tell() % ALIGNMENT))
            places[id(tensor)] = Place(str(path), file.tell(), tuple(tensor.shape), tensor.dtype)
            file.write(view_bytes(tensor))
    return places


def mapped(path: str, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a shared file, without a copy; who writes into it gets a page of his own."""
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
    """Whether a tensor is no more than its values in a row; PyTorch itself knows how to pickle the
    others.
    """
    plain = (
        type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    )
    return plain and tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_conj()


def view_bytes(tensor: Tensor) -> memoryview:
    """The values of a plain tensor, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def shape_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many bytes such a tensor takes."""
    return torch.Size(shape).numel() * dtype.itemsize


def rebuild(values: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of `view_bytes`; the copy is aligned as PyTorch's kernels like it."""
    return (
        torch.frombuffer(values, dtype=dtype).view(shape).clone()
        if values
        else torch.empty(shape, dtype=dtype)
    )


class Pickler(pickle.Pickler):
    """Tensors as bare bytes, or as the place where they lie; nothing that only the main script
    knows.
    """

    def __init__(self, file: io.BytesIO, places: Places):
        super().__init__(file, protocol=5)
        self.places = places

    def reducer_override(self, value: Any) -> Any:
        """What pickle asks for every object."""
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
        return rebuild, (pickle.PickleBuffer(view_bytes(value)), tuple(value.shape), value.dtype)


def dumps(value: Any, places: Places | None = None) -> memoryview:
    """A value as bytes; tensors that have a place are only referred to."""
    file = io.BytesIO()
    Pickler(file, places or {}).dump(value)
    return file.getbuffer()


loads = pickle.loads
