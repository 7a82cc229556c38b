"""FedAvg: everybody trains the same model and the server averages what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from fedhelix.method import Method
from fedhelix.registry import register


@register("fedavg", paper="McMahan et al., AISTATS 2017, arXiv:1602.05629")
@dataclass(frozen=True)
class FedAvg(Method):
    """One model for all: the mean of the clients' models, weighted by their numbers of samples."""
