"""GENE-FL: clients condense what they learned into a small gene. Only the gene is uploaded, and it
is all that newcomers inherit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedhelix.components.genes.book import (
    entries_of,
    gene_metadata,
    gene_report,
    gene_units,
    learnt_layers,
)
from fedhelix.components.genes.drift import Norm, members, pull, scales
from fedhelix.components.genes.fisher import Normalisation, client_fisher, elastic_mask, normalise
from fedhelix.components.genes.options import GeneOptions
from fedhelix.core.cuda import sent
from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.clustered import Clusters
from fedhelix.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Genes(GeneOptions, FedAvg):
    """GENE-FL within one cluster."""

    lambda_gen: float = option(0.5, "strength of the pull towards the cluster's model", low=0)
    lambda_elg: float = option(0.05, "strength of the pull of the elastic parameters", low=0)
    epsilon: float = option(0.5, "elastic up to this normalised Fisher value", low=0, high=1)
    gen_norm: Norm = option(
        "relative",
        "divide a layer's drift by its length, sqrt(size), nothing; or one norm for all layers, "
        "as Eq. 4 has it",
    )
    gen_squared: bool = option(
        True, "square the drift of every layer, so that small steps are free"
    )
    elg_mask: Literal["low", "high"] = option("low", "which Fisher values the elastic pull holds")
    elg_hard: bool = option(False, "hold all other parameters at the cluster's values")
    fisher_norm: Normalisation = option("layer_minmax", "Fisher values on [0, 1]: range or rank")
    fisher_samples: int = option(256, "samples of a client for its Fisher values", low=1)
    fisher_mode: Literal["sample", "batch"] = option(
        "sample", "squared gradients of samples, or (biased) of batches"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Runs that differ in nothing that the loss looks at can be trained together."""
        whole = self.gen_norm == "whole"
        in_loss = (self.lambda_gen, self.lambda_elg, self.gen_squared, whole, self.elg_hard)
        # A class that inherits may look at more.
        key = ("gene-fl", *in_loss) if type(self) in (Genes, GeneFL) else self
        return replace(super().capabilities, loss_key=key)

    def check(self, layers: Layers) -> None:
        """There must be units to choose from, and layers whose drift can be measured."""
        self._size.check(self._units(layers), gene_units(layers, "conv"))

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """Whatever may become a gene."""
        return entries_of(self._units(layers))

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: a model, and a book on recent genes."""
        return {"model": ctx.initial, "book": self._size.open_book(self._units(ctx.layers))}, {}

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: what its model has learnt, which units are the gene, and how many to send.

        All else is as everybody drew it from the seed.
        """
        units = self._units(ctx.layers)
        gene = self._size.due(server["book"], units, ctx)
        return {"model": take(server["model"], entries_of(units, gene["learnt"])), "gene": gene}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: its own model, and the same with the cluster's gene in it, to train."""
        kept = {**client.initial, **client_state.get("model", {})}
        if not self.gene_overwrite:
            return {"model": kept, "kept": kept}
        gene = entries_of(self._units(client.layers), payload["gene"]["units"])
        return {"model": {**kept, **take(payload["model"], gene)}, "kept": kept}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the cluster's layers but for the head, which of them it has learnt, the scale of
        each layer's drift, and the elastic mask.
        """
        layers = gene_units(client.layers, "conv")
        names, units = entries_of(layers), list(layers.values())
        centre = take({**client.initial, **payload["model"]}, names)
        scale = scales(centre, units, self.gen_norm)
        learnt = sent(learnt_layers(layers, payload["model"]), scale.device)
        context: Tree = {"centre": centre, "learnt": learnt, "scale": scale}
        context["members"] = members(units, scale.device)
        if self.lambda_elg or self.elg_hard:
            model = self.start(payload, client_state, client)["model"]
            fisher = client_fisher(client, model, names, self.fisher_mode, self.fisher_samples)
            fisher = normalise(fisher, self.fisher_norm)
            mask = elastic_mask(fisher, self.epsilon, self.elg_mask)
            # What the cluster has not learnt is free.
            free = [name for name in names if name not in payload["model"]]
            mask |= {name: torch.ones_like(mask[name]) for name in free}
            context["mask"] = mask
        return context

    def _elastic(self, params: Mapping[str, Tensor], context: Tree) -> State:
        """Eq. 6 taken literally: outside the mask the cluster's values hold."""
        held = context["mask"] if self.elg_hard else {}
        return {**params} | {
            name: torch.where(mask > 0, params[name], context["centre"][name])
            for name, mask in held.items()
        }

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss, plus the drift of all layers and that of the elastic part."""
        units = list(gene_units(local.layers, "conv").values())
        params = self._elastic(params, local.context)
        how = (self.lambda_gen, self.lambda_elg, self.gen_squared, self.gen_norm == "whole")
        return local.base_loss(params, batch) + pull(params, local.context, units, *how)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the gene, its mask's density and its validation accuracy; the model stays."""
        before = self.start(local.payload, local.client_state, local.client)["model"]
        model = self._elastic(local.models["model"], local.context)
        units, due = self._units(local.layers), local.payload["gene"]
        gene = self._size.gene(model, before, units, due, self._scored)
        masks = take(local.context.get("mask", {}), local.payload["model"])
        report = gene_report(masks, local.client.valid(model), local.context["scale"].device)
        return {"model": take(model, gene), "report": report}, {"model": model}

    def personal(self, models: dict[str, State]) -> str:
        """Client: what it trained last."""
        return "kept"

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: every gene counts alike."""
        return [1 / len(uploads)] * len(uploads)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the mean of each unit over those whose gene has it."""
        trees, units = [upload.tree for upload in uploads], self._units(ctx.layers)
        book = self._size.entered(server["book"], trees, units, ctx)
        return {**super().aggregate(server, uploads, weights, ctx), "book": book}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: its model only ties the clients' models together; nobody uses it."""
        return None

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: a newcomer inherits the gene alone, or all that was learnt; never the head."""
        units = self._units(ctx.layers)
        due = self._size.due(server["book"], units, ctx)
        marked = due["units" if self.gene_inherit == "gene" else "learnt"]
        return server, {"model": take(server["model"], entries_of(units, marked))}, True

    def onboard_state(self, payload: Tree, client: Client) -> Tree:
        """Client: its model begins with the gene; the rest is drawn."""
        return payload


@register("gene-fl", paper="GENE-FL, arXiv:2504.14628, 2025")
@dataclass(frozen=True)
class GeneFL(Clusters, Genes):
    """Uploads a small, general part of the model, in clusters.

    Uploads only a small and general part of each model, within one-shot clusters.
    """

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: within every cluster."""
        sent = {str(upload.client): upload.tree for upload in uploads}
        ctx.metadata.update(gene_metadata(sent, self._units(ctx.layers)))
        return super().aggregate(server, uploads, weights, ctx)
