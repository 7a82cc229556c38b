"""FedRep: a shared representation under personal heads, trained in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.method import Client, Phase
from fedhelix.methods.fedavg import FedAvg
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.units import Units


@register("fedrep", paper="Collins et al., ICML 2021, arXiv:2102.07078")
@dataclass(frozen=True)
class FedRep(FedAvg):
    """The head learns first on the frozen body, then the body under the frozen head; only the body travels."""

    head_epochs: int = option(1, "epochs of the head", low=0)
    body_epochs: int = option(1, "epochs of the body", low=0)
    ft_epochs: int = option(0, "epochs of the head before the model is used", low=0)

    def shared(self, units: Units) -> Sequence[str]:
        """The body."""
        return units.body

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: head, then body."""
        return Phase("head", self.head_epochs), Phase("body", self.body_epochs)

    def tune(self, client: Client) -> Sequence[Phase]:
        """Client: the head may adapt to the newest body."""
        return (Phase("head", self.ft_epochs),) if self.ft_epochs else ()
