"""FedDBE: a client's own bias of the features is learnt apart, so that shared features need not
have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.shift import SHIFT, without_shift
from fedhelix.core.tree import State, Tree, clone, take
from fedhelix.methods.fedavg import FedAvg

MEMORY = "(memory)"  # the entry of a model that is added to the features


@register("feddbe", paper="Zhang et al., NeurIPS 2023, arXiv:2311.14975")
@dataclass(frozen=True)
class FedDBE(FedAvg):
    """FedAvg with a personal memory added to the features.

    FedAvg with the domain bias eliminator: every client has a memory, which is added to the
    features before the head and never leaves it, and the mean of the features themselves is pulled
    to one that all clients agreed on before the first round.

    Behind a linear head the memory is a shift of the outputs.
    """

    kappa: float = option(10.0, "weight of the pull of the mean features", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """The memory is added to the features of a sample."""
        return replace(super().capabilities, sample_features=True)

    def check(self, layers: Layers) -> None:
        """The memory is between the head and the layers below."""
        super().check(layers)
        layers.check_linear_head(self.name)

    def client_init(self, client: Client) -> Tree:
        """Client: its mean features after a first, local training."""
        mean = client.features(client.train(client.initial, 0)).mean(0)
        return {"mean": mean, "samples": client.samples}

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: the consensus, which is the mean over all samples."""
        server, replies = super().server_init(client_inits, ctx)
        total = sum(sent["samples"] for sent in client_inits.values())
        means = [sent["mean"] * (sent["samples"] / total) for sent in client_inits.values()]
        return {**server, "consensus": {"mean": torch.stack(means).sum(0)}}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the model and the consensus."""
        return {"model": server["model"], "consensus": server["consensus"]}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the received model with its memory, which starts at zero."""
        model = super().start(payload, {}, client)["model"]
        head = model[client.layers.head[0]]
        memory = client_state.get("memory", torch.zeros_like(head[0]))
        return {"model": {**model, MEMORY: memory, SHIFT: head @ memory}}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the consensus, and the shift with which it starts."""
        shift = FedDBE.start(self, payload, client_state, client)["model"][SHIFT]
        return {**payload["consensus"], "shift": shift}

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: the memory trains with the model."""
        return (Phase(extra=(MEMORY,)),)

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss with the memory, and how far the mean features are from the
        consensus.
        """
        # A wrapper may have added to the shift.
        shift = params[local.layers.head[0]] @ params[MEMORY]
        shift = shift + params[SHIFT] - local.context["shift"]
        # BatchNorm's statistics must not be updated twice by one batch.
        still = {**params, **clone(take(params, local.layers.buffers))}
        gap = batch.mean(local.features(still, batch.x)) - local.context["mean"]
        pull = self.kappa * gap.square().mean() / 2
        return local.base_loss({**params, SHIFT: shift}, batch) + pull

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model leaves; the memory stays."""
        model = local.models["model"]
        tree, _ = super().upload(replace(local, models={"model": without_shift(model)}))
        return tree, {"memory": model[MEMORY]}

    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """Newcomer: the consensus is there already."""
        return {}
