"""FedSA-LoRA: A is shared, B stays with its client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.registry import register
from fedhelix.methods.fedit import FedIT


@register("fedsa-lora", paper="Guo et al., ICLR 2025, arXiv:2410.01463")
@dataclass(frozen=True)
class FedSALoRA(FedIT):
    """LoRA: A is averaged, B stays with its client.

    Both matrices train; A, which learns what all have in common, is averaged, B is personal.
    """

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """All but B."""
        return layers.without(adapter.b for adapter in layers.adapters)
