"""Condensation: what a client does to its model so that a small part of it, the gene, is worth
passing on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedhelix.components.genes.drift import Norm, drift, scales
from fedhelix.components.genes.fisher import (
    Normalisation,
    State,
    elastic_mask,
    fisher_values,
    normalise,
)
from fedhelix.components.genes.scores import Measure, Select, choose, shrunk, unit_scores
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Granularity, Layers
from fedhelix.core.options import Checked, option

if TYPE_CHECKING:
    from fedhelix.core.method import Client, Context

Entries = Mapping[str, Sequence[str]]  # units by name, each with its entries
Tree = dict[str, Any]

WINDOWS = 33  # in a run, when the user does not say after how many rounds a gene shrinks
RECENT = 10  # rounds whose genes decide what newcomers inherit


@dataclass(frozen=True)
class Condensation(Checked):
    """The options of GENE-FL's client side, and what follows from them."""

    lambda_gen: float = option(
        0.5, "strength of the pull of all layers towards the cluster's model", low=0
    )
    lambda_elg: float = option(0.05, "strength of the pull of the elastic parameters", low=0)
    epsilon: float = option(
        0.5, "normalised Fisher value up to which a parameter is elastic", low=0, high=1
    )
    gen_norm: Norm = option(
        "relative", "what the drift of a layer is divided by: its length, sqrt(size), nothing"
    )
    gen_squared: bool = option(
        True, "square the drift of every layer, so that small steps are free"
    )
    elg_mask: Literal["low", "high"] = option(
        "low", "which parameters the elastic pull holds, by Fisher value"
    )
    elg_hard: bool = option(False, "hold all other parameters at the cluster's values")
    fisher_norm: Normalisation = option(
        "layer_minmax", "Fisher values on [0, 1]: by range or by rank"
    )
    fisher_samples: int = option(256, "samples of a client for its Fisher values", low=1)
    fisher_mode: Literal["sample", "batch"] = option(
        "sample", "squared gradients of samples, or (biased) of batches"
    )
    gene_score: Measure = option(
        "similarity", "how a unit's change is measured; divided by its size"
    )
    gene_select: Select = option("highest", "which scores make the gene")
    gene_granularity: Granularity = option("conv", "what a unit is")
    gene_budget: float = option(
        0.25, "share of the model that a gene may weigh; 0: count units instead", low=0, high=1
    )
    gene_gamma0: int = option(4, "units of the first genes", low=1)
    gene_gamma_min: int = option(1, "units of the last genes", low=1)
    gene_shrink_every: int | None = option(
        None, "rounds between two sizes (auto: a 33rd of all)", low=1
    )
    gene_shrink_tolerance: float = option(
        0.005, "a greater loss of validation accuracy stops the shrinking", low=0
    )
    gene_overwrite: bool = option(
        True, "load the cluster's gene into the client's model in every round"
    )

    # Units
    # -----------------------------------------------------------------------------------------------------

    def split(self, units: Layers) -> dict[str, tuple[str, ...]]:
        """The units that a gene is made of; the head is none of them, for it only names the
        classes.
        """
        found = units.split(self.gene_granularity)
        return {
            name: entries for name, entries in found.items() if not set(entries) <= set(units.head)
        }

    def names(self, units: Entries, places: Iterable[int] | Tensor | None = None) -> list[str]:
        """The entries of all units, of those at some places, or of those that a vector marks."""
        if isinstance(places, Tensor):
            places = places.nonzero().flatten().tolist()
        every = list(units.values())
        return [
            name for at in (range(len(every)) if places is None else places) for name in every[at]
        ]

    def check_units(self, units: Entries, layers: Entries) -> None:
        """Refuse a model without units or layers, and more units than there are."""
        if not units or not layers:
            raise UserError(
                "gene-fl needs a convolution or a linear layer below the last one; this model has none."
            )
        if not self.gene_budget and self.gene_gamma_min > len(units):
            raise UserError(
                f"gene_gamma_min is {self.gene_gamma_min}, but the model has only {len(units)} units; lower it."
            )

    # Client
    # ----------------------------------------------------------------------------------------------------

    def ties(self, model: State, centre: State, client: Client) -> Tree:
        """What a loss needs: the cluster's layers, the elastic mask at the client's model, scales
        of the drift.
        """
        layers = client.layers.split("conv")
        names = self.names(layers)
        held = {name: centre[name] for name in names}
        found = {"centre": held, "scale": scales(held, list(layers.values()), self.gen_norm)}
        return (
            {**found, "mask": self.mask(model, names, client)}
            if self.lambda_elg or self.elg_hard
            else found
        )

    def mask(self, model: State, names: Sequence[str], client: Client) -> State:
        """The elastic mask, by Fisher values from some of the client's samples or from its batches."""
        if self.fisher_mode == "batch":
            squares = [
                {name: gradient[name].square() for name in names}
                for gradient in client.gradients(model)
            ]
            fisher = {
                name: torch.stack([found[name] for found in squares]).mean(0) for name in names
            }
        else:
            x, y = client.inputs(), client.targets()
            some = torch.randperm(len(x), generator=client.draw("fisher"))[
                : self.fisher_samples
            ].to(x.device)
            fisher = fisher_values(client.sample_loss, model, names, x[some], y[some])
        return elastic_mask(normalise(fisher, self.fisher_norm), self.epsilon, self.elg_mask)

    def elastic(self, params: Mapping[str, Tensor], ties: Tree) -> State:
        """Eq. 6 taken literally: outside the mask the cluster's values; otherwise the parameters as
        they are.
        """
        if not self.elg_hard:
            return dict(params)
        mask, centre = ties["mask"], ties["centre"]
        return {
            **params,
            **{name: torch.where(mask[name] > 0, params[name], centre[name]) for name in mask},
        }

    def pulls(self) -> dict[str, Any]:
        """The options that `elastic` and `penalty` look at."""
        return {
            name: getattr(self, name)
            for name in ("lambda_gen", "lambda_elg", "gen_squared", "elg_hard")
        }

    def penalty(self, params: Mapping[str, Tensor], ties: Tree, layers: Entries) -> Tensor:
        """`lambda_gen` times the drift from the cluster's model, plus `lambda_elg` times that of
        the elastic part.
        """
        entries, centre, scale = list(layers.values()), ties["centre"], ties["scale"]
        total = scale.new_zeros(())
        if self.lambda_gen:
            total = total + self.lambda_gen * drift(
                params, centre, entries, scale, None, self.gen_squared
            )
        if self.lambda_elg:
            total = total + self.lambda_elg * drift(
                params, centre, entries, scale, ties["mask"], self.gen_squared
            )
        return total

    def gene(self, after: State, before: State, units: Entries, gamma: int) -> list[str]:
        """The entries of the units that make the gene."""
        scores = unit_scores(after, before, units, self.gene_score).tolist()
        sizes = {name: value.numel() for name, value in after.items()}
        return self.names(units, self.best(scores, self.gene_select, units, sizes, gamma))

    def best(
        self,
        scores: Sequence[float],
        select: Select,
        units: Entries,
        sizes: Mapping[str, int],
        gamma: int,
    ) -> list[int]:
        """The best units by number, or those of the best that fit into the budget."""
        weights = [sum(sizes[name] for name in entries) for entries in units.values()]
        return choose(
            scores, weights, select, gamma, self.gene_budget * sum(sizes.values()) or None
        )

    def report(self, ties: Tree, valid: float) -> Tensor:
        """What a client tells beside its gene: the mask's density and, if known, its accuracy on
        validation samples.
        """
        mask = [value.flatten() for value in ties.get("mask", {}).values()]
        density = float(torch.cat(mask).mean()) if mask else 1.0
        return torch.tensor(
            [density, valid] if math.isfinite(valid) else [density], device=ties["scale"].device
        )

    # Server
    # ----------------------------------------------------------------------------------------------------

    def open_book(self, units: Entries) -> Tree:
        """The units of recent genes, how many units a gene has now, and the accuracies by which it
        shrinks.
        """
        gamma = float(min(self.gene_gamma0, len(units)))
        return {
            "seen": torch.zeros(RECENT, len(units)),
            "page": torch.tensor([gamma, 0, 0, 0, -math.inf]),
        }

    def turned(self, page: Tensor, now: Context) -> Tensor:
        """The page after all windows that are over have been judged."""
        gamma, windows, total, count, last = page.tolist()
        while windows < now.round // (self.gene_shrink_every or max(1, now.rounds // WINDOWS)):
            mean = total / count if count else last  # nobody told: nothing has fallen
            gamma = shrunk(int(gamma), self.gene_gamma_min, last, mean, self.gene_shrink_tolerance)
            windows, total, count, last = windows + 1, 0, 0, mean
        return torch.tensor([gamma, windows, total, count, last])

    def due(self, book: Tree, units: Entries, now: Context) -> Tree:
        """What the cluster's gene is, the units that most recent genes had, and how many units to
        send.
        """
        gamma, counts = self.turned(book["page"], now)[0], book["seen"].sum(0).tolist()
        best = self.best(counts, "highest", units, now.layers.sizes, int(gamma))
        marks = torch.tensor([float(at in best and counts[at] > 0) for at in range(len(counts))])
        return {"units": marks, "gamma": gamma}

    def entered(self, book: Tree, uploads: Sequence[Tree], units: Entries, now: Context) -> Tree:
        """The book after a round."""
        firsts = [entries[0] for entries in units.values()]
        genes = torch.tensor(
            [[float(name in upload["model"]) for name in firsts] for upload in uploads]
        ).sum(0)
        page = self.turned(book["page"], now)
        valids = [upload["report"][1] for upload in uploads if len(upload["report"]) > 1]
        page[2:4] += torch.tensor([float(sum(valids)), len(valids)])
        return {"seen": torch.cat([book["seen"][1:].cpu(), genes[None]]), "page": page}

    def metadata(self, uploads: Mapping[str, Tree], units: Entries) -> Tree:
        """For the record of a round: the units of every gene, their largest number, the density of
        the masks.
        """
        sent = {
            client: [unit for unit, entries in units.items() if entries[0] in upload["model"]]
            for client, upload in uploads.items()
        }
        density = torch.stack([upload["report"][0] for upload in uploads.values()]).mean()
        return {
            "units": sent,
            "gamma": max(map(len, sent.values())),
            "mask_density": float(density),
        }
