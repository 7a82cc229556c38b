"""Samples of several parts, such as token ids and a mask: read, padded, and packed into rows.

A pool of such samples is one tensor as any other: every sample is a row of bytes, which
`Fields.unpack` takes apart again. So engines, splits and shared memory know nothing of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.parts import Inputs, in_order

ALIGNMENT = 8  # bytes: the start of a part can be seen as any type
WIDTHS = 8  # that a batch of sequences can have, so that few programs are needed


@dataclass(frozen=True)
class Parts:
    """Samples of several parts, before they are packed; without names they are positional."""

    tensors: dict[str, Tensor]
    named: bool

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, chosen: Any) -> Parts:
        return Parts({name: part[chosen] for name, part in self.tensors.items()}, self.named)


@dataclass(frozen=True)
class Fields:
    """Where the parts of a sample lie in its row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    named: bool

    @classmethod
    def of(cls, parts: Parts) -> Fields:
        """The places of these parts."""
        values = parts.tensors.values()
        return cls(
            tuple(parts.tensors),
            tuple(tuple(part.shape[1:]) for part in values),
            tuple(part.dtype for part in values),
            parts.named,
        )

    @property
    def shape(self) -> Any:
        """The shapes of a sample's parts, by name or in order."""
        return dict(zip(self.names, self.shapes, strict=True)) if self.named else self.shapes

    @property
    def values(self) -> int:
        """How many numbers a sample has."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def __str__(self) -> str:
        kinds = zip(self.names, self.shapes, self.dtypes, strict=True)
        return ", ".join(
            f"{name} {'×'.join(map(str, shape)) or 1} {str(dtype).removeprefix('torch.')}"
            for name, shape, dtype in kinds
        )

    @property
    def mask(self) -> int | None:
        """Which part says where a sequence has values, if one does."""
        parts = enumerate(zip(self.names, self.shapes, self.dtypes, strict=True))
        return next(
            (
                place
                for place, (name, shape, dtype) in parts
                if len(shape) == 1
                and ("mask" in name if self.named else place > 0 and dtype == torch.bool)
            ),
            None,
        )

    @property
    def length(self) -> int | None:
        """How long padded sequences are."""
        return None if self.mask is None else self.shapes[self.mask][0]

    def lengths(self, rows: Tensor) -> Tensor | None:
        """How long every sequence is without its padding; None where that is not at the end."""
        if self.mask is None:
            return None
        filled = self.part(rows, self.mask) != 0
        lengths = filled.sum(1)
        at_end = torch.arange(filled.shape[1], device=rows.device) < lengths[:, None]
        return lengths if torch.equal(filled, at_end) else None

    def cut(self, x: Inputs, width: int) -> Inputs:
        """The parts with only the first places of sequences."""
        pairs = zip(in_order(x), self.shapes, strict=True)
        return self._inputs(
            [
                part.narrow(part.dim() - len(shape), 0, width)
                if shape[:1] == (self.length,)
                else part
                for part, shape in pairs
            ]
        )

    def pack(self, parts: Parts) -> Tensor:
        """The samples as rows of bytes."""
        columns = []
        for part in parts.tensors.values():
            values = part.reshape(len(part), -1).contiguous().view(torch.uint8)
            columns.append(F.pad(values, (0, -values.shape[1] % ALIGNMENT)))
        return torch.cat(columns, 1)

    def part(self, rows: Tensor, place: int) -> Tensor:
        """One part of samples, with any axes in front; pixels become floats in [0, 1]."""
        kinds = zip(self.shapes, self.dtypes, strict=True)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
        start = sum(size + -size % ALIGNMENT for size in sizes[:place])
        values = rows[..., start : start + sizes[place]].contiguous().view(self.dtypes[place])
        part = values.view(*rows.shape[:-1], *self.shapes[place])
        return part.float() / 255 if part.dtype == torch.uint8 else part

    def unpack(self, rows: Tensor) -> Inputs:
        """All parts of samples."""
        return self._inputs([self.part(rows, place) for place in range(len(self.names))])

    def _inputs(self, parts: Sequence[Tensor]) -> Inputs:
        return dict(zip(self.names, parts, strict=True)) if self.named else tuple(parts)


def is_ragged(values: Any) -> bool:
    """Whether these are sequences of different lengths."""
    if isinstance(values, str | bytes | Tensor) or not hasattr(values, "__len__"):
        return False
    if getattr(values, "dtype", None) not in (None, object):
        return False
    sizes = [_length(value) for value in values]
    return all(size is not None for size in sizes) and len(set(sizes)) > 1


def _length(value: Any) -> int | None:
    if isinstance(value, str | bytes | Mapping) or getattr(value, "shape", None) == ():
        return None
    return len(value) if hasattr(value, "__len__") else None


def padded(sequences: Sequence[Tensor], where: str, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences filled up to the longest, and a mask that is true where they have values."""
    if len({(sequence.shape[1:], sequence.dtype) for sequence in sequences}) > 1:
        raise UserError(f"sequences in {where} may differ in their lengths alone.")
    whole = torch.nn.utils.rnn.pad_sequence(list(sequences), True, fill)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return whole, torch.arange(whole.shape[1]) < lengths[:, None]


def joined(samples: Sequence[Tensor | Parts]) -> Parts:
    """All samples as one; sequences are filled up to the longest of all.

    Where some have a mask because their lengths differ, the others get one, too.
    """
    parts = [Parts({"0": part}, False) if isinstance(part, Tensor) else part for part in samples]
    most = max(parts, key=lambda part: len(part.tensors))
    names, named = list(most.tensors), most.named
    parts = [aligned(part, Fields.of(most)) for part in parts]
    for other in parts:
        if list(other.tensors) != names or other.named != named:
            raise UserError(
                f"samples must all have the parts {', '.join(names)}, not "
                f"{_names(other)}; give every client the same ones."
            )
    return Parts(
        {name: cat_padded([part.tensors[name] for part in parts]) for name in names}, named
    )


def _names(part: Parts) -> str:
    """What the parts of a sample are called, for people."""
    return ", ".join(part.tensors) if part.named else f"{len(part.tensors)} without a name"


def aligned(part: Parts, fields: Fields) -> Parts:
    """The samples with their parts in this order, and with a mask that is true everywhere, where
    that is all they lack.
    """
    known = {name: part.tensors[name] for name in fields.names if name in part.tensors}
    tensors, first = known | part.tensors, next(iter(part.tensors.values()))
    last = len(fields.names) - 1
    if fields.mask == last and tuple(tensors) == fields.names[:last] and first.dim() > 1:
        tensors[fields.names[last]] = torch.ones(first.shape[:2], dtype=fields.dtypes[last])
    return Parts(tensors, part.named)


def cat_padded(tensors: Sequence[Tensor], fill: int = 0) -> Tensor:
    """Tensors one below the other; a shorter second axis is filled up."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [
            F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1]), value=fill)
            for tensor in tensors
        ]
    return torch.cat(list(tensors))
