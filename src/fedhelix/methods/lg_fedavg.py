"""LG-FedAvg: personal representations under one shared head, the mirror image of FedPer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedhelix.core.layers import Layers
from fedhelix.core.method import Context, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.fedavg import FedAvg


@register("lg-fedavg", paper="Liang et al., 2020, arXiv:2001.01523")
@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """Averages the last layers; the others stay with their client."""

    shared_layers: int = option(1, "how many layers, counted from the output, are shared", low=1)
    warm_start: int = option(
        0, "rounds of plain FedAvg before, whose model everybody then starts from", low=0
    )

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The last layers."""
        return layers.tail(self.shared_layers)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: with a warm start it keeps the whole model, and who has received it since."""
        if not self.warm_start:
            return super().server_init(client_inits, ctx)
        return {"model": ctx.initial, "warmed": torch.zeros(ctx.clients, dtype=torch.bool)}, {}

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the whole model until the client has been warmed, then the shared layers."""
        if "warmed" in server and not server["warmed"][client]:
            return {"model": server["model"]}
        return {"model": take(server["model"], self.shared_params(ctx.layers))}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: everything while warming up, then the shared layers."""
        method = FedAvg() if local.client.round < self.warm_start else replace(self, warm_start=0)
        return FedAvg.upload(method, local)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: after the warm-up a client that took part has its own body."""
        state = super().aggregate(server, uploads, weights, ctx)
        if "warmed" in server and ctx.round >= self.warm_start:
            state["warmed"] = server["warmed"].clone()
            state["warmed"][[upload.client for upload in uploads]] = True
        return state

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: a newcomer is still to be warmed."""
        if "warmed" in server:
            new = (
                ctx.clients + 1 - len(server["warmed"])
            )  # more than one where others joined other clusters
            server = {
                **server,
                "warmed": torch.cat([server["warmed"], server["warmed"].new_zeros(new)]),
            }
        return super().onboard_server(server, message, ctx)

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: one model for all only while warming up; later the bodies differ."""
        apart = "warmed" in server and bool(server["warmed"].any())
        return None if apart else super().model(server, ctx)
