"""IFCA: there are several global models, and each client trains the one that fits it best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedhelix.core.method import Capabilities, Client, Context, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.samples import of_each_sample
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.fedavg import FedAvg

AT_ONCE = 500  # samples whose losses are computed together


def _loss(model: State, client: Client) -> float:
    """Client: the mean loss of a model on its training samples."""
    x, y = client.inputs(), client.targets()
    return float(of_each_sample(client.sample_loss, model, x, y, AT_ONCE).mean())


@register("ifca", paper="Ghosh et al., NeurIPS 2020, arXiv:2006.04088")
@dataclass(frozen=True)
class IFCA(FedAvg):
    """Several models; each client trains the one that fits best.

    The iterative federated clustering algorithm: clients receive all models, choose the one with
    the least loss on their samples, and train it; each model is the mean of its trainers'.

    Clients may choose anew in every round.
    """

    models: int = option(2, "how many global models there are", low=1)

    @property
    def capabilities(self) -> Capabilities:
        """The server has several models."""
        return replace(super().capabilities, several_models=True)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: the initial model, and others with its values in another order within each entry,
        which is another draw of random weights.
        """
        server, replies = super().server_init(client_inits, ctx)
        draw, parts = ctx.draw("ifca"), {"0": server}
        for k in range(1, self.models):
            shuffled = {
                name: value.flatten()[torch.randperm(value.numel(), generator=draw)].view_as(value)
                for name, value in take(server["model"], ctx.layers.parameters).items()
            }
            parts[str(k)] = {"model": {**server["model"], **shuffled}}
        return {"parts": parts}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: all models."""
        return {f"model-{k}": part["model"] for k, part in server["parts"].items()}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the model with the least loss; the first of equals."""
        models = list(payload.values())
        losses = [_loss(model, client) for model in models] if len(models) > 1 else [0.0]
        chosen = losses.index(min(losses))
        return {"model": models[chosen], "chosen": {"cluster": torch.tensor(chosen)}}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model, and which one it was."""
        return {**super().upload(local)[0], **local.models["chosen"]}, {}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the mean of each model; one that nobody chose stays as it is."""
        chosen = [str(int(upload.tree["cluster"])) for upload in uploads]
        ctx.metadata["clusters"] = {
            str(upload.client): int(k) for upload, k in zip(uploads, chosen, strict=True)
        }
        parts = {
            k: super(IFCA, self).aggregate(
                part,
                uploads,
                [weight * (other == k) for weight, other in zip(weights, chosen, strict=True)],
                ctx,
            )
            for k, part in server["parts"].items()
        }
        return {**server, "parts": parts}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: there is one model for all only if there is one at all."""
        return server["parts"]["0"]["model"] if len(server["parts"]) == 1 else None
