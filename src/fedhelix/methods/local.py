"""Local-only: no federation at all, the yardstick of every personalised method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.method import Context
from fedhelix.methods.fedavg import FedAvg
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.tree import Tree
from fedhelix.units import Units


@register("local", paper="the baseline of pFedGPA, arXiv:2409.05701")
@dataclass(frozen=True)
class LocalOnly(FedAvg):
    """Each client trains its own model from the common initial weights; nothing is ever sent."""

    follow_sampling: bool = option(False, "train only the sampled clients instead of everybody in every round")

    def check(self, units: Units) -> None:
        """Any network will do."""

    def shared(self, units: Units) -> Sequence[str]:
        """Nothing travels."""
        return ()

    def workers(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: without communication nobody has a reason to idle."""
        return cohort if self.follow_sampling else ctx.present
