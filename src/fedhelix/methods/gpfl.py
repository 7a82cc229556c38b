"""GPFL: features serve a global task, the embeddings of classes, and the personal task at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Local
from fedhelix.core.options import option
from fedhelix.core.parts import Inputs
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree
from fedhelix.methods.companion import COMPANION, Companion, head_outputs, linear_entries

EMBEDDINGS = "(embeddings)"
OWN = "(own condition)"
TINY = 1e-12


@register("gpfl", paper="Zhang et al., ICCV 2023, arXiv:2308.10279")
@dataclass(frozen=True)
class GPFL(Companion):
    """Splits the features into global and personal ones.

    A conditional valve turns the features into global ones, which lie near shared embeddings of the
    classes, and personal ones, which a client's own head gets.

    The condition is the mean of the embeddings; for a client it is weighted by its class shares.
    Body, embeddings and valve are averaged.
    """

    magnitude: float = option(0.01, "lambda: weight of the distance to the embeddings", low=0)
    decay: float = option(0.01, "mu: weight decay of embeddings and valve", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """Embeddings belong to classes."""
        return replace(super().capabilities, classification=True)

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """All but the head."""
        return layers.body

    def _companion(self, features: int, classes: int, draw: torch.Generator) -> State:
        """Server: embeddings, and a valve of two layers."""
        return {
            EMBEDDINGS: torch.randn(classes, features, generator=draw),
            **linear_entries("scale", features, features, draw),
            **linear_entries("offset", features, features, draw),
        }

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: its condition is the mean of the received embeddings over its samples."""
        model = super().start(payload, client_state, client)["model"]
        own = payload[COMPANION][EMBEDDINGS][client.targets()].mean(0)
        return {"model": {**model, OWN: own}}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the received embeddings."""
        return {"embeddings": payload[COMPANION][EMBEDDINGS]}

    def _valve(self, params: Mapping[str, Tensor], features: Tensor, condition: Tensor) -> Tensor:
        """Client: features, scaled and moved as the condition says."""
        scale, offset = (self._layer(params, name, condition) for name in ("scale", "offset"))
        return ((1 + scale) * features + offset).relu()

    def _layer(self, params: Mapping[str, Tensor], name: str, condition: Tensor) -> Tensor:
        hidden = F.linear(condition, params[f"({name} weight)"], params[f"({name} bias)"]).relu()
        norm = params[f"({name} norm weight)"], params[f"({name} norm bias)"]
        return F.layer_norm(hidden, hidden.shape[-1:], *norm)

    def predict(self, params: Mapping[str, Tensor], x: Inputs, local: Local) -> Tensor:
        """Client: its head on its personal features."""
        own = self._valve(params, local.features(params, x), params[OWN])
        return head_outputs(params, local.layers, own)

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss; the angles between global features and all embeddings, as a
        classification; the distance to the received embedding; and the decay.
        """
        received = local.context["embeddings"]
        features = local.features(self._frozen(params, local), batch.x)
        shared = self._valve(params, features, received.mean(0))
        angles = F.normalize(shared, dim=-1) @ F.normalize(params[EMBEDDINGS], dim=-1).T
        chosen = -angles.log_softmax(-1).gather(1, batch.y[:, None])[:, 0]
        distance = ((shared - received[batch.y]).square().sum(-1) + TINY).sqrt()
        guide = batch.mean(chosen + self.magnitude * distance)
        squares = [params[name].square().sum() for name in params if name in self._decayed()]
        decay = self.decay / 2 * torch.stack(squares).sum()
        return self._used_loss(params, batch, local) + guide + decay

    def _decayed(self) -> set[str]:
        return set(self._companion(1, 1, torch.Generator()))
