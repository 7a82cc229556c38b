"""Which units make a gene: how many, which a client sends, and which most clients sent recently."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhelix.components.genes.scores import (
    Measure,
    Per,
    Select,
    choose,
    shrunk,
    unit_scores,
)
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Granularity, Layers
from fedhelix.core.method import Context
from fedhelix.core.tree import State, Tree

Entries = Mapping[str, Sequence[str]]  # units by name, each with its entries

FIRST = 4  # units of the first genes, when neither the user nor a budget says how many
WINDOWS = 33  # in a run, when the user does not say after how many rounds a gene shrinks
RECENT = 10  # rounds whose genes decide what newcomers inherit


def gene_units(layers: Layers, granularity: Granularity) -> dict[str, tuple[str, ...]]:
    """The units that a gene is made of; the head is none of them, for it only names the classes."""
    units = layers.split(granularity)
    return {name: mine for name, mine in units.items() if not set(mine) <= set(layers.head)}


def entries_of(units: Entries, places: Iterable[int] | Tensor | None = None) -> list[str]:
    """The entries of all units, of those at some places, or of those that a vector marks."""
    if isinstance(places, Tensor):
        places = places.nonzero().flatten().tolist()
    every = list(units.values())
    chosen = range(len(every)) if places is None else places
    return [name for place in chosen for name in every[place]]


def learnt_layers(layers: Entries, model: State) -> Tensor:
    """One for each layer of which a received model has all entries, zero for the others."""
    return torch.tensor([float(set(entries) <= model.keys()) for entries in layers.values()])


@dataclass(frozen=True)
class GeneSize:
    """How large a gene may be, and how it shrinks."""

    budget: float  # share of the model; 0: count units instead
    first: int | None  # units of the first genes; None: 4, or with a budget all that fit
    smallest: int | None  # units of the last ones; None: 1, or with a budget as many as the first
    shrink_every: int | None  # rounds; None: a 33rd of all
    tolerance: float  # a greater loss of validation accuracy stops the shrinking
    rotate: bool = False  # those units first that were not sent for longest

    def check(self, units: Entries, layers: Entries) -> None:
        """Refuse a model without units or layers, and more units than there are."""
        if not units or not layers:
            raise UserError(
                "gene-fl needs a convolution or a linear layer below the last one; this model has "
                "none."
            )
        if self.smallest is not None and self.smallest > len(units):
            raise UserError(
                f"gene_gamma_min is {self.smallest}, but the model has only {len(units)} units; "
                "lower it."
            )

    def most(self, units: Entries) -> int:
        """How many units the first genes may have."""
        usual = len(units) if self.budget else FIRST
        return min(self.first or usual, len(units))

    def least(self, units: Entries) -> int:
        """How many units the last genes may have; a budget alone does not shrink."""
        usual = self.most(units) if self.budget and self.first is None else 1
        return self.smallest or usual

    def best(
        self,
        scores: Sequence[float],
        select: Select,
        units: Entries,
        sizes: Mapping[str, int],
        gamma: int,
        waiting: Sequence[float] | None = None,
    ) -> list[int]:
        """The `gamma` best units, as far as they fit into the budget."""
        weights = [sum(sizes[name] for name in entries) for entries in units.values()]
        budget = self.budget * sum(sizes.values()) or None
        return choose(scores, weights, select, gamma, budget, waiting)

    def gene(
        self,
        after: State,
        before: State,
        units: Entries,
        due: Tree,
        scored: tuple[Measure, Per, Select],
    ) -> list[str]:
        """The entries of the units that make a client's gene."""
        measure, per, select = scored
        scores = unit_scores(after, before, units, measure, per).tolist()
        sizes = {name: value.numel() for name, value in after.items()}
        waiting = due["waiting"].tolist() if self.rotate else None
        best = self.best(scores, select, units, sizes, int(due["gamma"]), waiting)
        return entries_of(units, best)

    # The book is what the server keeps about genes: the units of the last ten rounds (`seen`), the
    # round in which each unit was `sent` last (-1: never) and a `page` with the current number of
    # units, the number of windows that are over, sum and count of this window's validation
    # accuracies, and the mean of the window before.

    def open_book(self, units: Entries) -> Tree:
        """The book before the first round."""
        page = torch.tensor([float(self.most(units)), 0, 0, 0, -math.inf])
        sent = torch.full((len(units),), -1.0)
        return {"seen": torch.zeros(RECENT, len(units)), "sent": sent, "page": page}

    def turned(self, page: Tensor, units: Entries, ctx: Context) -> Tensor:
        """The page after all windows that are over have been evaluated."""
        gamma, windows, total, count, last = page.tolist()
        every = self.shrink_every or max(1, ctx.rounds // WINDOWS)
        while windows < ctx.round // every:
            mean = total / count if count else last  # nobody reported: nothing has fallen
            gamma = shrunk(int(gamma), self.least(units), last, mean, self.tolerance)
            windows, total, count, last = windows + 1, 0, 0, mean
        return torch.tensor([gamma, windows, total, count, last])

    def due(self, book: Tree, units: Entries, ctx: Context) -> Tree:
        """Marks of the units that most recent genes had and of all that were ever sent, how many
        units to send, and with `rotate` for how many rounds each has not been sent.

        A gene that rotates is all that was ever sent.
        """
        gamma, counts = self.turned(book["page"], units, ctx)[0], book["seen"].sum(0).tolist()
        best = self.best(counts, "highest", units, ctx.layers.sizes, int(gamma))
        marks = [float(place in best and count > 0) for place, count in enumerate(counts)]
        sent = _last_sent(book)
        learnt = (sent >= 0).float()
        due: Tree = {"units": torch.tensor(marks), "learnt": learnt, "gamma": gamma}
        if self.rotate:
            due |= {"units": learnt, "waiting": ctx.round - sent}
        return due

    def entered(self, book: Tree, uploads: Sequence[Tree], units: Entries, ctx: Context) -> Tree:
        """The book after a round."""
        firsts = [entries[0] for entries in units.values()]
        counts = torch.tensor(
            [[float(name in upload["model"]) for name in firsts] for upload in uploads]
        ).sum(0)
        page = self.turned(book["page"], units, ctx)
        valids = [upload["report"][1] for upload in uploads if len(upload["report"]) > 1]
        page[2:4] += torch.tensor([float(sum(valids)), len(valids)])
        seen = torch.cat([book["seen"][1:].cpu(), counts[None]])
        sent = torch.where(counts > 0, float(ctx.round), _last_sent(book).cpu())
        return {"seen": seen, "sent": sent, "page": page}


def _last_sent(book: Tree) -> Tensor:
    """The round in which each unit was sent last; version 0.1 knew the last ten rounds only."""
    known: Tensor | None = book.get("sent")
    return torch.where(book["seen"].sum(0) > 0, 0.0, -1.0) if known is None else known


def gene_metadata(uploads: Mapping[str, Tree], units: Entries) -> Tree:
    """The units of every gene, their largest number, and the mean density of the masks."""
    sent = {
        client: [unit for unit, entries in units.items() if entries[0] in upload["model"]]
        for client, upload in uploads.items()
    }
    density = torch.stack([upload["report"][0] for upload in uploads.values()]).mean()
    return {"units": sent, "gamma": max(map(len, sent.values())), "mask_density": float(density)}


def gene_report(mask: State, valid: float, device: torch.device) -> Tensor:
    """What a client sends beside its gene: the density of its mask and, if known, its accuracy."""
    every = [value.flatten() for value in mask.values()]
    density = torch.cat(every).mean() if every else torch.ones((), device=device)
    return torch.stack([density, density.new_tensor(valid)] if math.isfinite(valid) else [density])
