"""FedLP: every layer is uploaded only with some probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedhelix.core.method import Client, LocalRound
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.fedavg import FedAvg


@register("fedlp", paper="Zhu et al., ICC 2023, arXiv:2303.06360")
@dataclass(frozen=True)
class FedLP(FedAvg):
    """Clients leave whole layers out of their uploads.

    Layer-wise pruning of uploads: the server averages each layer over the clients that sent it.
    """

    keep: float = option(0.5, "probability that a layer is uploaded", low=0, high=1)
    redraw: Literal["round", "run"] = option(
        "round", "draw the layers anew in each round, or once per client"
    )

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: trains the received model, and uses the one that it trained last."""
        models = super().start(payload, {}, client)
        return {**models, "trained": client_state.get("trained", models["model"])}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: a random part of the layers, each with its BatchNorm."""
        layers = list(local.layers.split("module").values())
        generator = local.client.draw("fedlp", every_round=self.redraw == "round")
        kept = torch.rand(len(layers), generator=generator) < self.keep
        names = [
            name
            for layer, keep in zip(layers, kept.tolist(), strict=True)
            if keep
            for name in layer
        ]
        return {"model": take(local.models["model"], names)}, {"trained": local.models["model"]}

    def personal(self, models: dict[str, State]) -> str:
        """Client: the locally trained model."""
        return "trained"
