"""FedPer: a shared body and a personal head, trained together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.method import Client, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedper", paper="Arivazhagan et al., 2019, arXiv:1912.00818")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """The last layer stays with its client; the rest is averaged."""

    personal_layers: int = option(
        1, "how many layers, counted from the output, stay personal", low=1
    )
    ft_epochs: int | None = option(
        None, "epochs of training before use; auto: as many as in a round", low=0
    )

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The body."""
        return layers.without(layers.tail(self.personal_layers))

    def personalize(self, client: Client) -> Sequence[Phase]:
        """Client: it uses the model that its local training leaves, not the one that arrived."""
        return (Phase(epochs=self.ft_epochs),)
