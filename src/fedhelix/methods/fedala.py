"""FedALA: each client learns, weight by weight, how much of the global model it takes over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedhelix.core.layers import Layers
from fedhelix.core.method import Client, LocalRound
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.fedavg import FedAvg

LEARNT = "aggregation"  # the name under which a client holds its aggregation weights


@register("fedala", paper="Zhang et al., AAAI 2023, arXiv:2212.01197")
@dataclass(frozen=True)
class FedALA(FedAvg):
    """Clients learn how much of the received model to take over.

    FedAvg whose clients start from their own last model plus a learnt share of the way to the
    received one.

    Every weight of the last layers has a share between 0 and 1, trained on the client's samples
    before the round; the layers below are the received ones.
    """

    adaptive_layers: int = option(1, "how many of the last layers are aggregated adaptively", low=1)
    share_lr: float = option(1.0, "learning rate of the shares", above=0)
    first_epochs: int = option(10, "epochs in which the shares are learnt at first", low=1)

    def check(self, layers: Layers) -> None:
        """The network must have so many layers."""
        super().check(layers)
        layers.tail(self.adaptive_layers)

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the adaptive aggregate; whoever has trained nothing yet takes what it got."""
        received = super().start(payload, {}, client)["model"]
        if "trained" not in client_state:
            return {"model": received}
        upper = take(received, client.layers.tail(self.adaptive_layers))
        upper = take(upper, client.layers.parameters)
        last = client_state["trained"]
        way = {name: value - last[name] for name, value in upper.items()}
        shares = {name: torch.ones_like(value) for name, value in way.items()}
        epochs = 1 if LEARNT in client_state else self.first_epochs
        shares |= client_state.get(LEARNT, {})
        model = {**received, **_mix(last, way, shares)}
        for _ in range(epochs):
            for gradient in client.gradients(model, list(way)):
                for name, value in way.items():
                    step = self.share_lr * gradient[name] * value
                    shares[name] = (shares[name] - step).clamp(0, 1)
                model |= _mix(last, way, shares)  # the next batch sees the new shares
        return {"model": model, LEARNT: shares}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model leaves; a copy of it stays, with the shares."""
        model, shares = local.models["model"], local.models.get(LEARNT)
        return super().upload(local)[0], {"trained": model} | ({LEARNT: shares} if shares else {})


def _mix(last: State, way: State, shares: State) -> State:
    """The last model plus the shares of the way to the received one."""
    return {name: last[name] + shares[name] * value for name, value in way.items()}
