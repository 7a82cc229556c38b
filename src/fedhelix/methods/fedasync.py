"""FedAsync: every upload is mixed into the server's model as soon as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedhelix.components.staleness import Discount, discount
from fedhelix.core.method import Capabilities, Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree
from fedhelix.methods.fedavg import FedAvg
from fedhelix.methods.fedbuff import Asynchronous


@register("fedasync", paper="Xie et al., 2019, arXiv:1903.03934")
@dataclass(frozen=True)
class FedAsync(Asynchronous):
    """Asynchronous: the server mixes in each model as it arrives.

    The server's model moves a part of the way to each model that arrives, less if it is old.
    """

    inner: Method = option(FedAvg(), "the method whose clients need not wait for each other")
    mixing: float = option(0.6, "part of the way to a fresh model", above=0, high=1)
    discount: Discount = option(
        "polynomial", "how old models count less: constant (they do not), polynomial or hinge"
    )
    slope: float = option(
        0.5, "polynomial: exponent; hinge: how fast it falls (the paper's 10)", low=0
    )
    grace: int = option(4, "hinge: versions that a model may be old and count fully", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """It is asynchronous, and a round ends with one upload."""
        return replace(super().capabilities, buffer=1)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: (1 - a) times its model plus a times what has arrived."""
        state = self.inner.aggregate(server, uploads, weights, ctx)
        oldest = max(upload.staleness for upload in uploads)
        factor = discount(oldest, self.discount, self.slope, self.grace)
        return self.stepped(server, state, self.mixing * factor, ctx)
