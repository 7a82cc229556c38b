"""Clustered: any method inside one-shot clusters."""

from __future__ import annotations

from dataclasses import dataclass

from fedhelix.clustering import Clusters
from fedhelix.method import Method
from fedhelix.methods.fedavg import FedAvg
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.wrapper import Wrapper


@register("clustered", paper="the one-shot clusters of GENE-FL, arXiv:2504.14628")
@dataclass(frozen=True)
class Clustered(Clusters, Wrapper):
    """Puts any method into one-shot clusters: each cluster is a federation of its own."""

    inner: Method = option(FedAvg(), "the method of every cluster")
