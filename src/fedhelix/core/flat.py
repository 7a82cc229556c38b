"""A model as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedhelix.core.tree import State


@dataclass(frozen=True)
class FlatLayout:
    """Where entries lie in one vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[torch.dtype, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """The values of each entry."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def count(self) -> int:
        """All values."""
        return sum(self.sizes)

    @cached_property
    def rows(self) -> int:
        """All rows."""
        return sum(shape[0] for shape in self.shapes)

    def flat(self, state: Mapping[str, Tensor]) -> Tensor:
        """The entries of a state as one vector."""
        return torch.cat([state[name].detach().flatten() for name in self.names]).float()

    def state(self, values: Tensor) -> State:
        """The inverse of `flat`: of one vector, or of many in rows, whose entries are stacked."""
        parts = values.split(self.sizes, dim=-1)
        return {
            name: part.view(*values.shape[:-1], *shape).to(dtype)
            for name, part, shape, dtype in zip(
                self.names, parts, self.shapes, self.types, strict=True
            )
        }

    def row_lengths(self, device: torch.device) -> Tensor:
        """The values of each row."""
        return _row_lengths(self, device)


@lru_cache(maxsize=16)  # a copy to a GPU waits for it
def _row_lengths(layout: FlatLayout, device: torch.device) -> Tensor:
    rows = torch.tensor([shape[0] for shape in layout.shapes])
    return (torch.tensor(layout.sizes) // rows).repeat_interleave(rows).to(device)


def layout_of(names: Sequence[str], initial: State) -> FlatLayout:
    """The layout of some entries of a network."""
    values = [initial[name] for name in names]
    shapes, types = (tuple(value.shape) for value in values), (value.dtype for value in values)
    return _known(tuple(names), tuple(shapes), tuple(types))


_known = lru_cache(maxsize=16)(FlatLayout)  # a layout remembers what was computed of it
