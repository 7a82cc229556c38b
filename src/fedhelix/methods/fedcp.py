"""FedCP: a small network divides the features of a sample between a global and a personal head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhelix.core.method import Batch, Client, Local, LocalRound
from fedhelix.core.options import option
from fedhelix.core.parts import Inputs
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.companion import Companion, head_outputs, linear_entries

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the kernels by which features are compared
CONTEXT = "(context)"  # what tells the policy which client it is
GLOBAL = "(global)"  # before the names of the global head's entries


@register("fedcp", paper="Zhang et al., KDD 2023, arXiv:2307.01217")
@dataclass(frozen=True)
class FedCP(Companion):
    """Splits the features between a global and a personal head.

    A conditional policy says, for each sample and feature, which share goes to the global head,
    which is frozen during the round, and which to the personal one, which stays with its client.

    Body and policy are averaged; of the heads each client sends the mean of both. Features are
    drawn to those of the received model.
    """

    strength: float = option(1.0, "lambda: weight of the distance to the received features", low=0)

    def _companion(self, features: int, classes: int, draw: torch.Generator) -> State:
        """Server: the policy, a linear layer with two outputs for each feature."""
        return linear_entries("policy", features, 2 * features, draw)

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the received model with its own head beside the global one."""
        model = super().start(payload, {}, client)["model"]
        received = take(model, client.layers.head)
        head = client_state.get("head", received)
        context = F.normalize(head[client.layers.head[0]].float().sum(0), dim=0)
        return {
            "model": {
                **model,
                **head,
                **{f"{GLOBAL} {name}": value for name, value in received.items()},
                CONTEXT: context,
            }
        }

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the received model."""
        return {"received": {**client.initial, **payload["model"]}}

    def _policy(self, params: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Client: the share of each feature that goes to the personal head."""
        hidden = F.linear(
            features * params[CONTEXT], params["(policy weight)"], params["(policy bias)"]
        )
        norm = params["(policy norm weight)"], params["(policy norm bias)"]
        hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm).relu()
        personal, shared = hidden.chunk(2, dim=-1)
        return (personal - shared).sigmoid()

    def predict(self, params: Mapping[str, Tensor], x: Inputs, local: Local) -> Tensor:
        """Client: both heads together, each with its share of the features."""
        features = local.features(params, x)
        share = self._policy(params, features)
        head = {name: params[f"{GLOBAL} {name}"] for name in local.layers.head}
        return head_outputs(params, local.layers, share * features) + head_outputs(
            head, local.layers, (1 - share) * features
        )

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss, and how differently its features are distributed from those of the
        received model.
        """
        features = local.features(self._frozen(params, local), batch.x)
        before = local.features(local.context["received"], batch.x)
        distance = discrepancy(features, before.detach(), batch.mask)
        return self._used_loss(params, batch, local) + self.strength * distance

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: body, policy and the mean of both heads leave; its own head stays."""
        model, names = local.models["model"], local.layers.head
        mean = {name: (model[name] + model[f"{GLOBAL} {name}"]) / 2 for name in names}
        sent, _ = super().upload(replace(local, models={"model": {**model, **mean}}))
        return sent, {"head": take(model, names)}


def discrepancy(one: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
    """The maximum mean discrepancy of two sets of rows, summed over Gaussian kernels."""
    rows = torch.ones_like(one[:, 0]) if mask is None else mask
    pairs = rows[:, None] * rows / rows.sum().clamp_min(1).square()

    def alike(a: Tensor, b: Tensor) -> Tensor:
        gaps = (a[:, None] - b).square().sum(-1)
        return torch.stack([(-gaps / (2 * width)).exp() for width in BANDWIDTHS]).sum(0)

    return ((alike(one, one) + alike(other, other) - 2 * alike(one, other)) * pairs).sum()
