"""MOON: a client's features are drawn to those of the global model and away from its last ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Client, Local, LocalRound
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, clone, take
from fedhelix.methods.fedavg import FedAvg


@register("moon", paper="Li et al., CVPR 2021, arXiv:2103.16257")
@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a contrastive loss between models' features.

    FedAvg with a contrastive term: of two models, the features should be similar to the received
    one's rather than to those of the client's own last one.

    Features are what the head gets; the paper adds a projection to its networks for this.
    """

    mu: float = option(1.0, "weight of the contrastive term", low=0)
    temperature: float = option(0.5, "temperature of the contrastive term", above=0)

    def check(self, layers: Layers) -> None:
        """Without a layer below the head all models have the same features."""
        super().check(layers)
        if len(layers.weighted) < 2:
            raise UserError(f"{self.name} needs a model with a layer below its head.")

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the received model and its last one.

        At first the received one stands for both: the term is then a constant.
        """
        received = {**client.initial, **payload["model"]}
        return {"received": received, "previous": client_state.get("previous", received)}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: base loss plus the cross-entropy of choosing the received model of the two."""
        # BatchNorm's statistics must not be updated twice by one batch.
        still = {**params, **clone(take(params, local.layers.buffers))}
        features = local.features(still, batch.x)
        received, previous = (
            cosine_similarity(features, local.features(local.context[name], batch.x))
            for name in ("received", "previous")
        )
        # -log(exp(a) / (exp(a) + exp(b))) is softplus(b - a), which cannot overflow.
        contrast = softplus((previous - received) / self.temperature)
        return local.base_loss(params, batch) + self.mu * batch.mean(contrast)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model leaves, and a copy of it stays."""
        tree, client_state = super().upload(local)
        return tree, {**client_state, "previous": local.models["model"]}
