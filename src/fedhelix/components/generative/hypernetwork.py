"""A hypernetwork: a short embedding of each client becomes all weights of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhelix.components.generative.vectors import Layout
from fedhelix.core.cpu import all_threads
from fedhelix.core.fit import LENT
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import key, seeded
from fedhelix.core.tree import State, Tree, zeros

EMBEDDINGS = "embeddings"


class Hypernetwork(nn.Module):
    """Linear layers with ReLU between them, and one linear output for each tensor of the model."""

    def __init__(self, embedding: int, hidden: int, depth: int, sizes: Sequence[int]):
        super().__init__()
        body: list[nn.Module] = [nn.Linear(embedding, hidden)]
        for _ in range(depth):
            body += [nn.ReLU(), nn.Linear(hidden, hidden)]
        self.body = nn.Sequential(*body)
        self.heads = nn.ModuleList(nn.Linear(hidden, size) for size in sizes)

    def forward(self, embedding: Tensor) -> Tensor:
        """The model of an embedding, as one vector."""
        features = self.body(embedding)
        return torch.cat([head(features) for head in self.heads])


@dataclass(frozen=True)
class Hyper(Checked):
    """A hypernetwork's options, and functions of its state.

    The state holds weights, embeddings and velocities by name.
    """

    embedding: int | None = option(None, "length of an embedding (auto: 1 + clients / 4)", low=1)
    hidden: int = option(100, "width of the hypernetwork", low=1)
    depth: int = option(3, "its hidden layers", low=0)
    server_lr: float = option(0.03, "learning rate of hypernetwork and embeddings", above=0)
    server_momentum: float = option(0.9, "their momentum", low=0, below=1)
    server_decay: float = option(1e-3, "their weight decay", low=0)
    clip: float = option(50.0, "largest norm of a gradient", above=0)

    def network(self, length: int, layout: Layout) -> Hypernetwork:
        """The network for embeddings of this length."""
        return Hypernetwork(length, self.hidden, self.depth, layout.sizes)

    def first(self, clients: int, layout: Layout, seed: int, device: torch.device) -> Tree:
        """Random weights and embeddings."""
        length = 1 + clients // 4 if self.embedding is None else self.embedding
        with LENT, seeded(key(seed, "hypernetwork"), torch.device("cpu")):
            weights = {
                EMBEDDINGS: torch.randn(clients, length),
                **self.network(length, layout).state_dict(),
            }
        weights = {name: value.detach().to(device) for name, value in weights.items()}
        return {"weights": weights, "velocity": zeros(weights)}

    def model_of(self, weights: State, client: int, layout: Layout) -> Tensor:
        """A client's model as a vector; a client without an embedding uses the mean embedding."""
        table = weights[EMBEDDINGS]
        embedding = table[client] if client < len(table) else table.mean(0)
        with torch.device("meta"):  # only the structure is needed: the weights are in the state
            network = self.network(table.shape[1], layout)
        return functional_call(
            network, {name: weights[name] for name in weights if name != EMBEDDINGS}, (embedding,)
        )

    @all_threads()
    def step(
        self,
        state: Tree,
        client: int,
        moved: Tensor,
        layout: Layout,
        share: float = 1.0,
        frozen: bool = False,
    ) -> Tree:
        """One step of SGD that moves the client's generated model towards its trained one.

        `moved` is sent minus received: the gradient of the model, which the chain rule carries to
        the hypernetwork and the embeddings, or, if `frozen`, to this client's embedding alone. The
        hypernetwork takes only this `share` of the step: clients that trained at the same time
        mostly want the same of it, and one full step for each of them would be far too much.
        """
        names = [EMBEDDINGS] if frozen else list(state["weights"])
        leaves = {
            name: value.detach().requires_grad_(name in names)
            for name, value in state["weights"].items()
        }
        grads = torch.autograd.grad(
            self.model_of(leaves, client, layout), [leaves[name] for name in names], moved
        )
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        shrink = (self.clip / (norm + 1e-6)).clamp(max=1)
        weights, velocity = dict(state["weights"]), dict(state["velocity"])
        for name, grad in zip(names, grads, strict=True):
            pull = shrink * grad + self.server_decay * weights[name]
            velocity[name] = (
                self.server_momentum * velocity[name]
                + (1.0 if name == EMBEDDINGS else share) * pull
            )
            weights[name] = weights[name] - self.server_lr * velocity[name]
        if frozen:  # the other clients' embeddings stay as they are
            for part, old in ((weights, state["weights"]), (velocity, state["velocity"])):
                row, part[EMBEDDINGS] = part[EMBEDDINGS][client], old[EMBEDDINGS].clone()
                part[EMBEDDINGS][client] = row
        return {"weights": weights, "velocity": velocity}

    def join(self, state: Tree, clients: int) -> Tree:
        """The state with that many embeddings: new ones are the mean of all, with zero velocity."""
        table, speed = state["weights"][EMBEDDINGS], state["velocity"][EMBEDDINGS]
        mean = table.mean(0, keepdim=True).expand(clients - len(table), -1)
        return {
            "weights": {**state["weights"], EMBEDDINGS: torch.cat([table, mean])},
            "velocity": {
                **state["velocity"],
                EMBEDDINGS: torch.cat([speed, torch.zeros_like(mean)]),
            },
        }
