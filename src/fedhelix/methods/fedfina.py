"""FedFina: the last convolutions are shared, everything else is personal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedfina", paper="a baseline of GENE-FL, arXiv:2504.14628")
@dataclass(frozen=True)
class FedFina(FedAvg):
    """Shares only the last convolutions.

    The last four convolutions travel; in a smaller network the last half of them.
    """

    layers: int = option(4, "how many convolutions, counted from the output", low=1)

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """In ResNet-18: the four 3x3 convolutions of layer4."""
        count = min(self.layers, max(1, len(layers.convs) // 2))
        return [name for layer in layers.convs[-count:] for name in layer.entries]
