"""GENE-FL: clients condense what they learnt into a small gene, all that travels up and all that
newcomers inherit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedhelix.components.genes.condense import Condensation
from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Upload
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.clustered import Clusters
from fedhelix.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Genes(Condensation, FedAvg):
    """GENE-FL within one cluster; its options and its maths are those of `Condensation`."""

    @property
    def capabilities(self) -> Capabilities:
        """Runs that differ in nothing that the loss looks at can be trained together."""
        # A class that inherits may look at more.
        same = type(self) in (Genes, GeneFL)
        key = ("gene-fl", *self.pulls().items()) if same else self
        return replace(super().capabilities, loss_key=key)

    def check(self, units: Layers) -> None:
        """There must be units to choose from, and layers whose drift can be measured."""
        self.check_units(self.split(units), units.split("conv"))

    def shared_params(self, units: Layers) -> Sequence[str]:
        """Whatever may become a gene."""
        return self.names(self.split(units))

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: a model, and a book on recent genes."""
        return {"model": ctx.initial, "book": self.open_book(self.split(ctx.layers))}, {}

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the model, for the penalties; which of its units are the gene, and how many units
        to send.
        """
        return {
            "model": server["model"],
            "gene": self.due(server["book"], self.split(ctx.layers), ctx),
        }

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: its own model, and to train on the same with the cluster's gene in it."""
        kept = {**client.initial, **client_state.get("model", {})}
        gene = (
            self.names(self.split(client.layers), payload["gene"]["units"])
            if self.gene_overwrite
            else []
        )
        return {"model": {**kept, **take(payload["model"], gene)}, "kept": kept}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the cluster's model, the elastic mask by Fisher values, and the scale of each
        layer's drift.
        """
        return self.ties(
            self.start(payload, client_state, client)["model"], payload["model"], client
        )

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the risk, plus the drift from the cluster's model and that of the elastic
        parameters.
        """
        params = self.elastic(params, local.context)
        return local.base_loss(params, batch) + self.penalty(
            params, local.context, local.layers.split("conv")
        )

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the gene, the density of its mask and its accuracy on validation samples; the
        whole model stays.
        """
        before = self.start(local.payload, local.client_state, local.client)["model"]
        model, told = self.elastic(local.models["model"], local.context), local.payload["gene"]
        gene = take(model, self.gene(model, before, self.split(local.layers), int(told["gamma"])))
        return {"model": gene, "report": self.report(local.context, local.client.valid(model))}, {
            "model": model
        }

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
        book = self.entered(
            server["book"], [upload.tree for upload in uploads], self.split(ctx.layers), ctx
        )
        return {**super().aggregate(server, uploads, weights, ctx), "book": book}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: its model only ties the clients' models together; nobody uses it."""
        return None

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: a newcomer inherits the gene alone."""
        gene = self.due(server["book"], self.split(ctx.layers), ctx)["units"]
        return (
            server,
            {"model": take(server["model"], self.names(self.split(ctx.layers), gene))},
            True,
        )

    def onboard_state(self, payload: Tree, client: Client) -> Tree:
        """Client: its model begins with the gene; the rest is drawn."""
        return payload


@register("gene-fl", paper="GENE-FL, arXiv:2504.14628, 2025")
@dataclass(frozen=True)
class GeneFL(Clusters, Genes):
    """Uploads only a small and general part of each model, within one-shot clusters; newcomers
    inherit that part.
    """

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: within every cluster."""
        sent = {str(upload.client): upload.tree for upload in uploads}
        ctx.metadata.update(self.metadata(sent, self.split(ctx.layers)))
        return super().aggregate(server, uploads, weights, ctx)
