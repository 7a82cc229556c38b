"""Samples of several parts, such as token ids and a mask: read, padded, and packed into rows.

A pool of such samples is one tensor as any other: every sample is a row of bytes, which
`Fields.unpack` takes apart again. So engines, splits and shared memory know nothing of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.parts import Inputs, in_order
from fedhelix.data.checks import describe, describe_kind

ALIGNMENT = 8  # bytes: the start of a part can be seen as any type
WIDTHS = 8  # that a batch of sequences can have, so that few programs are needed


@dataclass(frozen=True)
class Parts:
    """Samples of several parts, before they are packed; without names they are positional."""

    tensors: dict[str, Tensor]
    named: bool
    sequences: frozenset[str] = frozenset()
    """Which parts were given as sequences of different lengths."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, chosen: Any) -> Parts:
        tensors = {name: part[chosen] for name, part in self.tensors.items()}
        return Parts(tensors, self.named, self.sequences)


@dataclass(frozen=True)
class Fields:
    """Where the parts of a sample lie in its row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    named: bool
    sequences: frozenset[str] = field(default=frozenset(), compare=False)
    """As in `Parts`."""

    @classmethod
    def of(cls, parts: Parts) -> Fields:
        """The places of these parts."""
        values = parts.tensors.values()
        return cls(
            tuple(parts.tensors),
            tuple(tuple(part.shape[1:]) for part in values),
            tuple(part.dtype for part in values),
            parts.named,
            parts.sequences,
        )

    @property
    def given(self) -> tuple[str, ...]:
        """The parts but for a mask that was made because sequences differ in length."""
        *others, last = self.names
        made = (
            len(self.sequences) > 0
            and last not in self.sequences
            and self.mask == len(others)
            and self.dtypes[-1] == torch.bool
        )
        return tuple(others) if made else self.names

    @property
    def keywords(self) -> tuple[str, ...] | None:
        """The names that a user gives; None where parts have no names."""
        return self.given if self.named else None

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
        return ", ".join(f"{name} {describe_kind(shape, dtype)}" for name, shape, dtype in kinds)

    @property
    def masks(self) -> tuple[int, ...]:
        """Which parts say where sequences have values."""
        parts = enumerate(zip(self.names, self.shapes, self.dtypes, strict=True))
        return tuple(
            place
            for place, (name, shape, dtype) in parts
            if len(shape) == 1
            and ("mask" in name if self.named else place > 0 and dtype == torch.bool)
        )

    @property
    def mask(self) -> int | None:
        """The first part that says where a sequence has values, if one does."""
        return next(iter(self.masks), None)

    @property
    def length(self) -> int | None:
        """How long padded sequences are."""
        return None if self.mask is None else self.shapes[self.mask][0]

    def lengths(self, rows: Tensor) -> Tensor | None:
        """How long every sequence is without its padding; None where that is not at the end."""
        if self.mask is None:
            return None
        filled = self.part(rows, self.mask) != 0
        return filled.sum(1) if ends_padded(filled) else None

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

    def filled(self, x: Inputs) -> Inputs:
        """The parts with shorter sequences filled up to the known length."""
        if self.mask is None or self.length is None:
            return x
        parts = in_order(x)
        width = parts[self.mask].shape[-1]
        lacking = max(0, self.length - width)
        return self._inputs(
            [
                F.pad(part, (0, 0) * (part.dim() - 2) + (0, lacking))
                if (*shape[:1], *part.shape[1:2]) == (self.length, width)
                else part
                for part, shape in zip(parts, self.shapes, strict=True)
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
        part = self._packed(rows, place)
        return part.float() / 255 if part.dtype == torch.uint8 else part

    def _packed(self, rows: Tensor, place: int) -> Tensor:
        """One part as it was packed."""
        kinds = zip(self.shapes, self.dtypes, strict=True)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
        start = sum(size + -size % ALIGNMENT for size in sizes[:place])
        values = rows[..., start : start + sizes[place]].contiguous().view(self.dtypes[place])
        return values.view(*rows.shape[:-1], *self.shapes[place])

    def parts(self, rows: Tensor) -> Parts:
        """The samples as they were before they were packed."""
        tensors = {name: self._packed(rows, place) for place, name in enumerate(self.names)}
        return Parts(tensors, self.named, self.sequences)

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


def ends_padded(filled: Tensor) -> bool:
    """Whether sequences have their values, where this is true, before all padding."""
    places = torch.arange(filled.shape[1], device=filled.device)
    return torch.equal(filled, places < filled.sum(1)[:, None])


def padded(sequences: Sequence[Tensor], where: str, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences filled up to the longest, and a mask that is true where they have values."""
    if len({(sequence.shape[1:], sequence.dtype) for sequence in sequences}) > 1:
        raise UserError(f"sequences in {where} may differ in their lengths alone.")
    whole = torch.nn.utils.rnn.pad_sequence(list(sequences), True, fill)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return whole, torch.arange(whole.shape[1]) < lengths[:, None]


def joined(samples: Sequence[Tensor | Parts], called: Sequence[str]) -> Parts:
    """All samples as one; sequences are filled up to the longest of all. `called` says whose they
    are.

    Where some have a mask because their lengths differ, the others get one, too.
    """
    parts = list(map(as_parts, samples))
    most = max(parts, key=lambda part: len(part.tensors))
    names, named = list(most.tensors), most.named
    given, parts = parts, [aligned(part, Fields.of(most)) for part in parts]
    for other, own in zip(parts, given, strict=True):
        if list(other.tensors) != names or other.named != named:
            right, wrong = part_names(most, own)
            raise UserError(
                f"samples must all have {right}, not {wrong}; give every client the same ones."
            )
    for name in names:
        _check_alike(name, parts, called)
    tensors = {name: cat_padded([part.tensors[name] for part in parts]) for name in names}
    return Parts(tensors, named, frozenset().union(*(part.sequences for part in parts)))


def _check_alike(name: str, parts: Sequence[Parts], called: Sequence[str]) -> None:
    """Refuse a part that has another shape or type at somebody; sequences may differ in length."""
    masks = [list(parts[0].tensors)[place] for place in Fields.of(parts[0]).masks]
    is_sequence = any(name in part.sequences for part in parts) or any(
        all(part.tensors[name].shape[1:2] == part.tensors[mask].shape[1:2] for part in parts)
        for mask in masks
    )
    own = [part.tensors[name] for part in parts]
    of_type = [place for place, part in enumerate(own) if part.dtype != torch.bool]
    first = of_type[0] if of_type else 0
    usual, may_be_bool = own[first], own[first].dtype != torch.uint8
    for part, whose in zip(own, called, strict=True):
        one_type = part.dtype == usual.dtype or (may_be_bool and part.dtype == torch.bool)
        same = (
            part.dim() == usual.dim()
            and part.shape[1 + is_sequence :] == (usual.shape[1 + is_sequence :])
        )
        if not same or not one_type:
            raise UserError(
                f"{whose} has samples of {describe(part)} in the part {name}, {called[first]} of "
                f"{describe(usual)}; give all of them the same columns or shape, and one type."
            )


def fitted(samples: Tensor | Parts, fields: Fields, known: str) -> Parts:
    """A newcomer's samples with the parts of known ones; shorter sequences are filled up."""
    part = aligned(as_parts(samples), fields)
    kinds = list(zip(fields.names, fields.shapes, fields.dtypes, strict=True))
    none = Parts(
        {name: torch.empty(0, *shape, dtype=dtype) for name, shape, dtype in kinds}, fields.named
    )
    if tuple(part.tensors) != fields.names or part.named != fields.named:
        own, right = part_names(as_parts(samples), fields)
        raise UserError(
            f"the newcomer has {own}, but samples of {known} have {right}; give it the same ones."
        )
    tensors = joined([none, part], [known, "the newcomer"]).tensors
    for name, shape, dtype in kinds:
        values = tensors[name]
        if tuple(values.shape[1:]) != shape:
            raise UserError(
                f"the newcomer's sequences are up to {values.shape[1]} long, those of {known} up "
                f"to {shape[0]}; cut the newcomer's to {shape[0]}."
            )
        tensors[name] = values.to(dtype)
        if not torch.equal(tensors[name].to(values.dtype), values):
            raise UserError(
                f"the newcomer has {describe(values)} in the part {name}, which is true or false "
                f"in {known}; give it 0 and 1 alone."
            )
    return Parts(tensors, fields.named)


def as_parts(samples: Tensor | Parts) -> Parts:
    """Samples as parts, even if it is only one."""
    return Parts({"0": samples}, False) if isinstance(samples, Tensor) else samples


def width(samples: Tensor | Parts) -> int | None:
    """How long the longest sequence is, where samples can be sequences."""
    parts = as_parts(samples)
    wide = [part.shape[1] for part in parts.tensors.values() if part.dim() > 1]
    return Fields.of(parts).length or next(iter(wide), None)


def part_names(*samples: Parts | Fields) -> list[str]:
    """What the parts of different samples are called, for people; where these differ in a mask that
    was made alone, also what they are.
    """
    fields = [one if isinstance(one, Fields) else Fields.of(one) for one in samples]
    if len({(one.named, one.given) for one in fields}) == 1:
        return [f"the part{'s' if len(one.names) > 1 else ''} {one}" for one in fields]
    return [_listed(one.given, one.named) for one in fields]


def _listed(names: Sequence[str], named: bool) -> str:
    if named:
        return f"the part{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return "one part without a name" if len(names) == 1 else f"{len(names)} parts without names"


def aligned(part: Parts, fields: Fields) -> Parts:
    """The samples with their parts in this order, and with a mask that is true everywhere, where
    that is all they lack.
    """
    known = {name: part.tensors[name] for name in fields.names if name in part.tensors}
    tensors, last = known | part.tensors, len(fields.names) - 1
    if fields.mask == last and tuple(tensors) == fields.names[:last]:
        pairs = zip(tensors.values(), fields.shapes, strict=False)
        long = [part for part, shape in pairs if shape[:1] == (fields.length,) and part.dim() > 1]
        if long:
            ones = torch.ones(long[0].shape[:2], dtype=fields.dtypes[last])
            tensors[fields.names[last]] = ones
    return Parts(tensors, part.named, part.sequences)


def cat_padded(tensors: Sequence[Tensor], fill: int = 0) -> Tensor:
    """Tensors one below the other; a shorter second axis is filled up."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [
            F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1]), value=fill)
            for tensor in tensors
        ]
    return torch.cat(list(tensors))
