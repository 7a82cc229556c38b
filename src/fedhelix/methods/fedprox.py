"""FedProx: local training stays near the global model by a quadratic penalty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedhelix.core.method import Batch, Client, Local
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, take
from fedhelix.methods.fedavg import FedAvg


@register("fedprox", paper="Li et al., MLSys 2020, arXiv:1812.06127")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a penalty on the distance to the received model.

    FedAvg with mu/2 times the squared distance to the received model in the local objective.
    """

    mu: float = option(0.01, "strength of the pull towards the received model", low=0)

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the received parameters."""
        return take(payload["model"], client.layers.parameters)

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss plus the penalty."""
        drift = sum((params[name] - value).square().sum() for name, value in local.context.items())
        return local.base_loss(params, batch) + self.mu / 2 * drift
