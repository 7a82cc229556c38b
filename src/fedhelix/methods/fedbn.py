"""FedBN: BatchNorm stays at home, because its statistics describe the client's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedhelix.errors import BadInput
from fedhelix.methods.fedavg import FedAvg
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.units import Units


@register("fedbn", paper="Li et al., ICLR 2021, arXiv:2102.07623")
@dataclass(frozen=True)
class FedBN(FedAvg):
    """Everything is averaged but BatchNorm's parameters and running statistics."""

    bn_filter: Literal["type", "name"] = option(
        "type", "which entries count as BatchNorm: by module type, or (as in public code) names with 'bn' in them"
    )

    def check(self, units: Units) -> None:
        """Without BatchNorm this would silently be FedAvg."""
        if len(self.shared(units)) == len(units.names):
            raise BadInput("fedbn needs a model with BatchNorm and this one has none; try resnet18 or digits-bn-cnn.")

    def shared(self, units: Units) -> Sequence[str]:
        """All but BatchNorm."""
        if self.bn_filter == "name":
            return [name for name in units.names if "bn" not in name]
        return units.without(units.norm)
