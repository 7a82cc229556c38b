"""FedPer: a shared body and a personal head, trained together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.method import Client, Phase
from fedhelix.methods.fedavg import FedAvg
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.units import Units


@register("fedper", paper="Arivazhagan et al., 2019, arXiv:1912.00818")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """All layers but the last are averaged; the last one stays with its client."""

    personal_layers: int = option(1, "how many layers, counted from the output, stay personal", low=1)
    ft_epochs: int | None = option(None, "epochs of training before use; auto: as many as in a round", low=0)

    def shared(self, units: Units) -> Sequence[str]:
        """The body."""
        return units.without(units.tail(self.personal_layers))

    def tune(self, client: Client) -> Sequence[Phase]:
        """Client: it uses the model that its local training leaves, not the one that arrived."""
        return (Phase(epochs=self.ft_epochs),)
