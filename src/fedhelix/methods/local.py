"""Local-only: no federation at all, the yardstick of every personalised method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.method import Context
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree
from fedhelix.methods.fedavg import FedAvg


@register("local", paper="the baseline of pFedGPA, arXiv:2409.05701")
@dataclass(frozen=True)
class LocalOnly(FedAvg):
    """Each client trains alone; nothing is sent.

    Each client trains its own model from the common initial weights; nothing is ever sent.
    """

    follow_sampling: bool = option(
        False, "train only the sampled clients instead of everybody in every round"
    )

    def check(self, layers: Layers) -> None:
        """Any network will do."""

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """Nothing travels."""
        return ()

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: without communication nobody has a reason to idle."""
        return cohort if self.follow_sampling else ctx.present
