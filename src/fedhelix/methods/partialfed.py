"""PartialFed (ParFed): a client loads only a fixed part of the global model and keeps the rest its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register(
    "partialfed", paper="Sun et al., NeurIPS 2021, with the fixed rule of GENE-FL, arXiv:2504.14628"
)
@dataclass(frozen=True)
class PartialFed(FedAvg):
    """Shares one convolution of each stage, the last one.

    One convolution of each stage is shared, the last one; a stage is a run of layers of equal
    width.
    """

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """In ResNet-18: layer1.1.conv2, layer2.1.conv2, layer3.1.conv2 and layer4.1.conv2."""
        return [name for stage in layers.stages for name in stage[-1].entries]
