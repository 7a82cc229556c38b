"""FedAvg-FT: FedAvg whose model every client fine-tunes before using it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedhelix.core.method import Client, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.methods.fedavg import FedAvg


@register("fedavg-ft", paper="the baseline of FedPAC, ICLR 2023, arXiv:2306.11867")
@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, then each client fine-tunes a copy for its own use."""

    ft_epochs: int | None = option(
        None, "epochs of fine-tuning; auto: as many as in a round", low=0
    )
    ft_part: Literal["all", "head"] = option("all", "which part is fine-tuned")
    ft_rate: float = option(1.0, "factor on the learning rate while fine-tuning", above=0)

    def personalize(self, client: Client) -> Sequence[Phase]:
        """Client: fine-tune the received model."""
        return (Phase(self.ft_part, self.ft_epochs, rate=self.ft_rate),)
