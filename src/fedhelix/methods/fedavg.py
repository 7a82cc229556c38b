"""FedAvg: everybody trains the same model and the server averages what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Method
from fedhelix.core.registry import register


@register("fedavg", paper="McMahan et al., AISTATS 2017, arXiv:1602.05629")
@dataclass(frozen=True)
class FedAvg(Method):
    """One model for all: the weighted mean of the clients' models.

    One model for all: the mean of the clients' models, weighted by their numbers of samples.
    """

    def check(self, layers: Layers) -> None:
        """A network may be too small for a method that shares only some of its layers."""
        if not self.shared_params(layers):
            raise UserError(
                f"{self.name} would share no layer of this model; choose a model with more layers."
            )
