"""FedIT: clients train adapters of a frozen network, and the server averages both matrices."""

from __future__ import annotations

from dataclasses import dataclass

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedit", paper="Zhang et al., ICASSP 2024, arXiv:2305.05644")
@dataclass(frozen=True)
class FedIT(FedAvg):
    """Averages the LoRA adapters of the clients.

    The mean of the clients' adapters, A and B each for itself; what else trains is averaged.
    """

    def check(self, layers: Layers) -> None:
        """Without adapters this would be FedAvg."""
        if not layers.adapters:
            raise UserError(
                f"{self.name} needs a model with LoRA adapters and this one has none; use "
                "fedhelix.add_lora, peft, or the model lora-mlp."
            )
        super().check(layers)
