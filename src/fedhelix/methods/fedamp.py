"""FedAMP: the server keeps every client's model and sends each client a mean of those like its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedhelix.core.method import Capabilities, Client, Context, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, masked_mean, take, updates_of, zeros
from fedhelix.methods.fedprox import FedProx


def attention(
    client: str, models: Mapping[str, State], own_weight: float, sharpness: float
) -> dict[str, float]:
    """How much each client's model counts in the mean of one of them."""
    others = [name for name in models if name != client]
    if not others:
        return {client: 1.0}
    ordered = [models[name] for name in (client, *others)]
    own, rest = updates_of(ordered, zeros(models[client])).tensor_split([1])
    cosines = torch.nn.functional.cosine_similarity(own, rest)
    shares = (1 - own_weight) * (sharpness * cosines).softmax(0)
    return {client: own_weight} | dict(zip(others, shares.tolist(), strict=True))


@register("fedamp", paper="Huang et al., AAAI 2021, arXiv:2007.03797")
@dataclass(frozen=True)
class FedAMP(FedProx):
    """Clients with similar models attract each other.

    Attentive message passing in the paper's form for deep networks, HeurFedAMP: clients whose
    models have a large cosine attract each other.

    A client trains near the mean that it receives, and uses what it trained.
    """

    mu: float = option(0.01, "strength of the pull towards the received model", low=0)
    own_weight: float = option(0.5, "weight of the client's own model", low=0, high=1)
    sharpness: float = option(10.0, "factor on the cosines before they become weights", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """Uploads are updates of their clients' own models."""
        return replace(super().capabilities, central_model=False)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the client's mean; who has sent nothing yet gets the mean of all."""
        models, name = server.get("clients", {}), str(client)
        if name not in models:
            return super().download(server, client, ctx)
        weights = attention(name, models, self.own_weight, self.sharpness)
        mean = masked_mean([models[key] for key in weights], list(weights.values()), models[name])
        return {"model": {**server["model"], **mean}}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the received model, to train, and its last one, to use."""
        model = super().start(payload, {}, client)["model"]
        return {"model": model, "trained": client_state.get("trained", model)}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model leaves, and a copy of it stays."""
        return super().upload(local)[0], {"trained": local.models["model"]}

    def personal(self, models: dict[str, State]) -> str:
        """Client: what it trained last."""
        return "trained"

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the newest model of each client, and the mean of the round."""
        state = super().aggregate(server, uploads, weights, ctx)
        newest = {
            str(upload.client): take(upload.tree["model"], ctx.layers.parameters)
            for upload, weight in zip(uploads, weights, strict=True)
            if weight > 0
        }
        return {**state, "clients": server.get("clients", {}) | newest}
