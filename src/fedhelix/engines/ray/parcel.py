"""Values as they travel: the tensors of a call side by side in one array, the rest as it is.

An actor or the server gets them back as tensors of its own, on its own device. Tensors that many
tasks share lie in an array of their own, which every node receives once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.means import Means

ALIGNMENT = 64


class Slice(NamedTuple):
    """Stands for a tensor: its position in an array of bytes."""

    shared: bool  # in the array of the shared tensors
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Parcel(NamedTuple):
    """A value whose tensors lie in an array of bytes."""

    value: Any
    content: np.ndarray


Slices = Mapping[int, Slice]  # by the id of the tensor, which must stay alive


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """A value with its tensors, or what stands for them, replaced, however deep they lie."""
    if isinstance(value, Tensor | Slice):
        return function(value)
    if isinstance(value, Mapping):
        return {name: replaced(inner, function) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(inner, function) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(replaced(inner, function) for inner in value)
    if isinstance(value, Means):
        return value.replaced(function)
    return value


def pack(value: Any, known: Slices | None = None) -> tuple[Parcel, dict[int, Slice]]:
    """A value as a parcel, and where its tensors lie; `known` ones are not packed again."""
    slices: dict[int, Slice] = {}
    arrays: list[tuple[int, np.ndarray]] = []
    end = 0

    def placed(tensor: Tensor) -> Slice:
        nonlocal end
        if known is not None and id(tensor) in known:
            return known[id(tensor)]
        if id(tensor) not in slices:
            values = tensor.detach().cpu().contiguous()
            slices[id(tensor)] = Slice(False, end, tuple(tensor.shape), tensor.dtype)
            arrays.append((end, values.reshape(-1).view(torch.uint8).numpy()))
            end += -(-arrays[-1][1].size // ALIGNMENT) * ALIGNMENT
        return slices[id(tensor)]

    lean = replaced(value, placed)
    content = np.empty(end, np.uint8)
    for offset, array in arrays:
        content[offset : offset + array.size] = array
    return Parcel(lean, content), slices


def pack_shared(tensors: Iterable[Tensor]) -> tuple[np.ndarray, Slices]:
    """Tensors that several tasks use, each of them once, and where they lie."""
    parcel, slices = pack(list(tensors))
    return parcel.content, {key: place._replace(shared=True) for key, place in slices.items()}


class Unpacker:
    """Makes tensors of what actors receive; a shared one is the same object in every task."""

    def __init__(self, device: torch.device, shared: np.ndarray | None = None):
        self.device, self.shared = device, shared
        self.made: dict[int, Tensor] = {}  # shared tensors by their offset

    def unpack(self, parcel: Parcel) -> Any:
        """The value; its tensors are copies, since the array must not be written to."""
        own: dict[Slice, Tensor] = {}

        def tensor_of(place: Slice) -> Tensor:
            made: dict[Any, Tensor] = self.made if place.shared else own
            key = place.offset if place.shared else place
            if key not in made:
                content = self.shared if place.shared else parcel.content
                assert content is not None
                made[key] = copied(content, place).to(self.device)
            return made[key]

        return replaced(parcel.value, tensor_of)


def copied(content: np.ndarray, place: Slice) -> Tensor:
    """A tensor of its own with the values at a position."""
    tensor = torch.empty(place.shape, dtype=place.dtype)
    size = tensor.numel() * tensor.element_size()
    if size:
        target = tensor.view(-1).view(torch.uint8).numpy()
        target[:] = content[place.offset : place.offset + size]
    return tensor


def as_array(tensor: Tensor) -> np.ndarray:
    """Samples as an array that Ray's object store holds once per node."""
    return tensor.detach().cpu().contiguous().numpy()


def as_view(array: np.ndarray) -> Tensor:
    """Samples where the object store holds them, without a copy; nobody writes to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the array is not writable
        return torch.from_numpy(array)
