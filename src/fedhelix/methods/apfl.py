"""APFL: every client uses a mixture of the global model and a local one, and learns the mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhelix.core.method import Batch, Client, Local, LocalRound, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.fedavg import FedAvg


@register("apfl", paper="Deng et al., 2020, arXiv:2003.13461")
@dataclass(frozen=True)
class APFL(FedAvg):
    """Each client mixes the global model with one of its own.

    FedAvg for the global model w; each client trains a local model v so that the mixture alpha v +
    (1 - alpha) w fits its samples.

    The paper steps with w and v at the same time. Here v is trained after w, mixed with the w that
    was received; with one local step per round both are the same. Alpha takes one step along its
    gradient per round.
    """

    alpha: float = option(0.5, "weight of the local model in the mixture, at first", low=0, high=1)
    adaptive: bool = option(True, "whether each client's alpha follows its gradient")

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the global model, the local one, which starts as a copy of it, and both mixed."""
        model = super().start(payload, {}, client)["model"]
        v, w = client_state.get("local", model), take(model, client.layers.parameters)
        return {"model": model, "local": v, "mixture": self._mix(v, w, self._alpha(client_state))}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: what the local model is mixed with, and the weights of both."""
        w = take(payload["model"], client.layers.parameters)
        return {"w": w, "alpha": self._alpha(client_state)}

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: first the global model, then the local one."""
        return Phase(), Phase(model="local")

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the local model is trained inside the mixture."""
        if local.phase.model == "local":
            params = self._mix(params, local.context["w"], local.context["alpha"])
        return local.base_loss(params, batch)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the global model leaves; the local one stays, with the next alpha."""
        v, w, alpha = local.models["local"], local.context["w"], local.context["alpha"]
        if self.adaptive:
            # The gradient of one batch, at the mixture in which v was trained.
            gradient = next(local.client.gradients(self._mix(v, w, alpha)))
            slope = torch.stack([((v[name] - w[name]) * gradient[name]).sum() for name in w]).sum()
            alpha = (alpha - local.client.lr * slope).clamp(0, 1)
        return super().upload(local)[0], {"local": v, "alpha": alpha}

    def personal(self, models: dict[str, State]) -> str:
        """Client: the mixture."""
        return "mixture"

    def _alpha(self, client_state: Tree) -> Tensor:
        """Client: the weight of its local model."""
        return client_state.get("alpha", torch.tensor(self.alpha))

    def _mix(self, v: Mapping[str, Tensor], w: State, alpha: Tensor) -> State:
        """Client: the mixed parameters, with the buffers of v; two equal models mix exactly."""
        return {**v, **{name: value + alpha * (v[name] - value) for name, value in w.items()}}
