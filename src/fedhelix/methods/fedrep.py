"""FedRep: a shared representation under personal heads, trained in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.method import Client, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedrep", paper="Collins et al., ICML 2021, arXiv:2102.07078")
@dataclass(frozen=True)
class FedRep(FedAvg):
    """Like FedPer, but head and body train in turn.

    The head learns first on the frozen body, then the body under the frozen head; only the body
    travels.
    """

    head_epochs: int = option(1, "epochs of the head", low=0)
    body_epochs: int = option(1, "epochs of the body", low=0)
    ft_epochs: int = option(0, "epochs of the head before the model is used", low=0)

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The body."""
        return layers.body

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: head, then body."""
        return Phase("head", self.head_epochs), Phase("body", self.body_epochs)

    def personalize(self, client: Client) -> Sequence[Phase]:
        """Client: the head may adapt to the newest body."""
        return (Phase("head", self.ft_epochs),) if self.ft_epochs else ()
