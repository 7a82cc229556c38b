"""FedRolex: HeteroFL whose parts roll over the network, so that every channel is trained."""

from __future__ import annotations

from dataclasses import dataclass

from fedhelix.core.method import Context
from fedhelix.core.registry import register
from fedhelix.methods.heterofl import HeteroFL


@register("fedrolex", paper="Alam et al., NeurIPS 2022, arXiv:2212.01548")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """Small clients train a rolling window of channels.

    Each round the clients' parts begin one channel further on.
    """

    def _start(self, ctx: Context) -> int:
        """The number of the round; behind the last channel comes the first."""
        return ctx.round
