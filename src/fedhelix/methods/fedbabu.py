"""FedBABU: only the body learns during the federation; the head is a random, common frame until it
is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedhelix.core.layers import Layers
from fedhelix.core.method import Client, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedbabu", paper="Oh et al., ICLR 2022, arXiv:2106.06042")
@dataclass(frozen=True)
class FedBABU(FedAvg):
    """Trains the body under a frozen head; clients then fine-tune.

    The body is trained and averaged under a frozen head; each client fine-tunes before use.
    """

    ft_epochs: int = option(2, "epochs of fine-tuning before the model is used", low=0)
    ft_part: Literal["all", "head", "body"] = option("all", "which part is fine-tuned")
    # Under a small frozen head features grow large; once the head may learn, usual steps would
    # throw it about.
    ft_rate: float = option(0.1, "factor on the learning rate while fine-tuning", above=0)

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The body; everybody can make the random head from the seed."""
        return layers.body

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: the head stays as it was drawn."""
        return (Phase("body"),)

    def personalize(self, client: Client) -> Sequence[Phase]:
        """Client: now the head may learn too."""
        return (Phase(self.ft_part, self.ft_epochs, rate=self.ft_rate),)
