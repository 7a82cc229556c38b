"""Means of groups of models, which are only computed where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from fedhelix.core.flat import FlatLayout, layout_of
from fedhelix.core.tree import State, flat_rows, tensors


@dataclass(frozen=True, eq=False)
class Means(Sequence[State]):
    """Weighted means of models with the same entries. Every model is there once, however many means
    it is part of, so that another process or a GPU receives little.
    """

    values: Tensor  # the floating-point entries, one model in a row
    counts: State  # the other entries, stacked: a mean has the largest ones of its models
    layout: FlatLayout  # of the values
    shares: Tensor  # of the models in the means, one mean in a row

    def __len__(self) -> int:
        return len(self.shares)

    @overload
    def __getitem__(self, at: int) -> State: ...

    @overload
    def __getitem__(self, at: slice) -> Means: ...

    def __getitem__(self, at: int | slice) -> State | Means:
        if isinstance(at, slice):
            return replace(self, shares=self.shares[at])
        return next(iter(self.rows([range(len(self))[at]])))

    def __iter__(self) -> Iterator[State]:
        entries = {name: value.unbind() for name, value in self.stacked().items()}
        return ({name: entries[name][at] for name in entries} for at in range(len(self)))

    def rows(self, places: Sequence[int]) -> Means:
        """Some of the means."""
        return replace(self, shares=self.shares[list(places)])

    def stacked(self) -> State:
        """All means, entry by entry."""
        counts = {
            name: torch.stack([value[row > 0].amax(0) for row in self.shares.to(value.device)])
            for name, value in self.counts.items()
        }
        return stacked_means(self.values, self.shares, self.layout) | counts

    @property
    def names(self) -> set[str]:
        """The entries of each."""
        return {*self.layout.names, *self.counts}

    def replaced(self, function: Callable[[Any], Any]) -> Means:
        """The same with other tensors, or with what stands for them."""
        counts = {name: function(value) for name, value in self.counts.items()}
        return Means(function(self.values), counts, self.layout, function(self.shares))


def tensors_of(states: Sequence[State]) -> list[Tensor]:
    """What models are made of; means that nobody has computed yet are made of others."""
    if isinstance(states, Means):
        return [states.values, *states.counts.values()]
    return [tensor for state in states for tensor in tensors(state)]


def stacked_means(values: Tensor, shares: Tensor, layout: FlatLayout) -> State:
    """The floating-point entries of the means with these shares."""
    shares = shares.to(values)
    # One after the other on a CPU, so that a mean does not depend on which others it comes with.
    means = shares @ values if values.is_cuda else torch.stack([row @ values for row in shares])
    return layout.state(means)


def means_by_group(
    models: Sequence[State], weights: Sequence[float]
) -> Callable[[Sequence[Sequence[int]]], Means]:
    """Makes the weighted means of some groups of models that have the same entries.

    Each is `masked_mean` of its group up to rounding; without any weight it is the first model.
    """
    floats = [name for name, value in models[0].items() if value.is_floating_point()]
    layout, values = layout_of(floats, models[0]), flat_rows(models, floats)
    values = values.float() if values.element_size() < 4 else values  # half precision
    counts = {
        name: torch.stack([model[name] for model in models])
        for name in models[0]
        if name not in floats
    }

    def means(groups: Sequence[Sequence[int]]) -> Means:
        counted = [{i for i in group if weights[i] > 0} or {0} for group in groups]
        rows = [
            [(float(weights[i]) or 1.0) * (i in members) for i in range(len(models))]
            for members in counted
        ]
        shares = torch.tensor(rows, dtype=torch.float64)
        return Means(values, counts, layout, shares / shares.sum(1, keepdim=True))

    return means
