"""FedProto: clients exchange the mean features of their classes; no model travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, clone, masked_mean, take
from fedhelix.methods.fedavg import FedAvg


@register("fedproto", paper="Tan et al., AAAI 2022, arXiv:2105.00243")
@dataclass(frozen=True)
class FedProto(FedAvg):
    """Clients share class prototypes instead of models.

    Every client trains a model of its own, whose features are pulled towards the prototypes.

    A prototype is the mean feature vector of a class, over all clients that have it. The distance
    is the squared Euclidean one, divided by the number of features.
    """

    strength: float = option(1.0, "lambda: weight of the distance to the prototypes", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """The server has prototypes of classes instead of a model."""
        return replace(super().capabilities, central_model=False, classification=True)

    def check(self, layers: Layers) -> None:
        """Prototypes live between the head and the layers below."""
        layers.check_linear_head(self.name, plain=False)

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """No entry travels."""
        return ()

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the prototypes of all classes that some client has uploaded; at first none."""
        return {"prototypes": server.get("prototypes", {})}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: a prototype for every class, and 1 where there is one."""
        head = max(take(client.initial, client.layers.head).values(), key=Tensor.numel)
        prototypes, known = torch.zeros_like(head), torch.zeros_like(head[:, 0])
        for label, prototype in payload["prototypes"].items():
            prototypes[int(label)], known[int(label)] = prototype, 1
        return {"prototypes": prototypes, "known": known}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: base loss plus the distance of each sample's features to its prototype."""
        # BatchNorm's statistics must not be updated twice by one batch.
        still = {**params, **clone(take(params, local.layers.buffers))}
        gap = local.features(still, batch.x) - local.context["prototypes"][batch.y]
        distance = gap.square().mean(1) * local.context["known"][batch.y]
        return local.base_loss(params, batch) + self.strength * batch.mean(distance)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the mean features of its classes, and the share of its samples in each class."""
        features = local.client.features(local.models["model"])
        targets, classes = local.client.targets(), local.layers.weighted[-1].outputs
        shares = targets.bincount(minlength=classes) / len(targets)
        prototypes = {str(c): features[targets == c].mean(0) for c in targets.unique().tolist()}
        return {"prototypes": prototypes, "shares": shares}, super().upload(local)[1]

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the mean prototype of each class, weighted by the clients' samples of it; a class
        that nobody uploaded keeps its last one.
        """
        counted = [(u.tree, w) for u, w in zip(uploads, weights, strict=True) if w > 0]
        sent = [tree["prototypes"] for tree, _ in counted]
        # A weight is a client's share of all samples: times a class's share of the client's.
        samples = [(w * tree["shares"]).tolist() for tree, w in counted]
        trees = (*sent, server.get("prototypes", {}))
        last = {label: value for tree in trees for label, value in tree.items()}
        means: State = {}
        for label in sorted(last, key=int):
            means |= masked_mean(sent, [row[int(label)] for row in samples], {label: last[label]})
        return {**server, "prototypes": means}
