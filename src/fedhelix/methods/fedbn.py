"""FedBN: BatchNorm stays at home, because its statistics describe the client's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedbn", paper="Li et al., ICLR 2021, arXiv:2102.07623")
@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg, but each client keeps its own BatchNorm layers.

    Everything is averaged but BatchNorm's parameters and running statistics.
    """

    bn_filter: Literal["type", "name"] = option(
        "type",
        "which entries count as BatchNorm: by module type, or (as in public code) names with "
        "'bn' in them",
    )

    def check(self, layers: Layers) -> None:
        """Without BatchNorm this would silently be FedAvg."""
        if len(self.shared_params(layers)) == len(layers.names):
            raise UserError(
                "fedbn needs a model with BatchNorm and this one has none; try resnet18 or "
                "digits-bn-cnn."
            )

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """All but BatchNorm."""
        if self.bn_filter == "name":
            return [name for name in layers.names if "bn" not in name]
        return layers.without(layers.norm)
