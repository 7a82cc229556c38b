"""FedLC: clients train with outputs that are calibrated by the sizes of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.core.method import Batch, Capabilities, Client, Local
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.shift import SHIFT
from fedhelix.core.tree import Tree
from fedhelix.methods.fedavg import FedAvg

ABSENT = 1e-8  # the size of a class without samples: its margin is 100 tau, and it plays no part


@register("fedlc", paper="Zhang et al., ICML 2022, arXiv:2209.00189")
@dataclass(frozen=True)
class FedLC(FedAvg):
    """FedAvg with a loss calibrated by the client's class counts.

    FedAvg with tau / n^(1/4) taken off the output of a class of which the client has n samples.

    The margin is part of the training loss alone: rare classes have to win by more. The model is
    used without it.
    """

    tau: float = option(1.0, "size of the margins", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """Margins are those of classes."""
        return replace(super().capabilities, classification=True)

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: what is added to the outputs."""
        assert client.classes is not None
        targets = client.targets()
        sizes = torch.zeros(client.classes, device=targets.device)
        sizes = sizes.index_add(0, targets, torch.ones_like(targets, dtype=sizes.dtype))
        return {"margins": -self.tau * sizes.clamp(min=ABSENT) ** -0.25}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss of the calibrated outputs."""
        shift = params.get(SHIFT, 0) + local.context["margins"]
        return local.base_loss({**params, SHIFT: shift}, batch)
