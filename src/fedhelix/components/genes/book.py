"""Which units make a gene: how many, which a client sends, and which most clients sent recently."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhelix.components.genes.scores import Measure, Select, choose, shrunk, unit_scores
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Granularity, Layers
from fedhelix.core.method import Context
from fedhelix.core.tree import State, Tree

Entries = Mapping[str, Sequence[str]]  # units by name, each with its entries

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


@dataclass(frozen=True)
class GeneSize:
    """How large a gene may be, and how it shrinks."""

    budget: float  # share of the model; 0: count units instead
    first: int  # units of the first genes
    smallest: int  # units of the last ones
    shrink_every: int | None  # rounds; None: a 33rd of all
    tolerance: float  # a greater loss of validation accuracy stops the shrinking

    def check(self, units: Entries, layers: Entries) -> None:
        """Refuse a model without units or layers, and more units than there are."""
        if not units or not layers:
            raise UserError(
                "gene-fl needs a convolution or a linear layer below the last one; this model has "
                "none."
            )
        if not self.budget and self.smallest > len(units):
            raise UserError(
                f"gene_gamma_min is {self.smallest}, but the model has only {len(units)} units; "
                "lower it."
            )

    def best(
        self,
        scores: Sequence[float],
        select: Select,
        units: Entries,
        sizes: Mapping[str, int],
        gamma: int,
    ) -> list[int]:
        """The `gamma` best units, or those of the best that fit into the budget."""
        weights = [sum(sizes[name] for name in entries) for entries in units.values()]
        return choose(scores, weights, select, gamma, self.budget * sum(sizes.values()) or None)

    def gene(
        self,
        after: State,
        before: State,
        units: Entries,
        gamma: int,
        measure: Measure,
        select: Select,
    ) -> list[str]:
        """The entries of the units that make a client's gene."""
        scores = unit_scores(after, before, units, measure).tolist()
        sizes = {name: value.numel() for name, value in after.items()}
        return entries_of(units, self.best(scores, select, units, sizes, gamma))

    # The book is what the server keeps about genes: the units of the last ten rounds (`seen`) and
    # a `page` with the current number of units, the number of windows that are over, sum and count
    # of this window's validation accuracies, and the mean of the window before.

    def open_book(self, units: Entries) -> Tree:
        """The book before the first round."""
        gamma = float(min(self.first, len(units)))
        page = torch.tensor([gamma, 0, 0, 0, -math.inf])
        return {"seen": torch.zeros(RECENT, len(units)), "page": page}

    def turned(self, page: Tensor, ctx: Context) -> Tensor:
        """The page after all windows that are over have been evaluated."""
        gamma, windows, total, count, last = page.tolist()
        every = self.shrink_every or max(1, ctx.rounds // WINDOWS)
        while windows < ctx.round // every:
            mean = total / count if count else last  # nobody reported: nothing has fallen
            gamma = shrunk(int(gamma), self.smallest, last, mean, self.tolerance)
            windows, total, count, last = windows + 1, 0, 0, mean
        return torch.tensor([gamma, windows, total, count, last])

    def due(self, book: Tree, units: Entries, ctx: Context) -> Tree:
        """Marks of the units that most recent genes had, and how many units to send."""
        gamma, counts = self.turned(book["page"], ctx)[0], book["seen"].sum(0).tolist()
        best = self.best(counts, "highest", units, ctx.layers.sizes, int(gamma))
        marks = [float(place in best and count > 0) for place, count in enumerate(counts)]
        return {"units": torch.tensor(marks), "gamma": gamma}

    def entered(self, book: Tree, uploads: Sequence[Tree], units: Entries, ctx: Context) -> Tree:
        """The book after a round."""
        firsts = [entries[0] for entries in units.values()]
        sent = [[float(name in upload["model"]) for name in firsts] for upload in uploads]
        page = self.turned(book["page"], ctx)
        valids = [upload["report"][1] for upload in uploads if len(upload["report"]) > 1]
        page[2:4] += torch.tensor([float(sum(valids)), len(valids)])
        seen = torch.cat([book["seen"][1:].cpu(), torch.tensor(sent).sum(0)[None]])
        return {"seen": seen, "page": page}


def gene_metadata(uploads: Mapping[str, Tree], units: Entries) -> Tree:
    """The units of every gene, their largest number, and the mean density of the masks."""
    sent = {
        client: [unit for unit, entries in units.items() if entries[0] in upload["model"]]
        for client, upload in uploads.items()
    }
    density = torch.stack([upload["report"][0] for upload in uploads.values()]).mean()
    return {"units": sent, "gamma": max(map(len, sent.values())), "mask_density": float(density)}


def gene_report(context: Tree, valid: float) -> Tensor:
    """What a client sends beside its gene: its mask's density and, if known, its accuracy."""
    mask = [value.flatten() for value in context.get("mask", {}).values()]
    density = float(torch.cat(mask).mean()) if mask else 1.0
    report = [density, valid] if math.isfinite(valid) else [density]
    return torch.tensor(report, device=context["scale"].device)
