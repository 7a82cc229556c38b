"""kNN-Per: what the global model says of a sample is mixed with the labels of similar samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Client, Local, LocalRound
from fedhelix.core.options import option
from fedhelix.core.parts import Inputs
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree
from fedhelix.methods.fedavg import FedAvg

# The entries that a model gets: features of the client's samples, their classes, and the weight of
# neighbours.
KEYS, CLASSES, WEIGHT = "(keys)", "(classes)", "(weight)"
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # among which a client chooses
USUAL = "0.5"
MODE = "use_mm_for_euclid_dist"  # the usual one differs for few samples, which a program cannot
TINY = 1e-6  # a class that no neighbour has is unlikely, not impossible


@register("knn-per", paper="Marfoq et al., ICML 2022, arXiv:2111.09360")
@dataclass(frozen=True)
class KNNPer(FedAvg):
    """FedAvg, mixed with each client's nearest training samples.

    FedAvg; a client uses a mixture of the global model's probabilities and those of the nearest of
    its own training samples, by the model's features.

    The weight of the neighbours is the one with the lowest loss on the client's validation samples.
    """

    neighbours: int = option(10, "how many samples are asked", low=1)
    scale: float = option(1.0, "the distance at which a neighbour counts 1/e as much", above=0)

    @property
    def capabilities(self) -> Capabilities:
        """Neighbours vote for classes."""
        return replace(super().capabilities, classification=True)

    def check(self, layers: Layers) -> None:
        """Features are what the head gets."""
        super().check(layers)
        if len(layers.weighted) < 2:
            raise UserError(f"{self.name} needs a model with a layer below its head.")

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the received model, and the same with its samples, for every weight."""
        model = super().start(payload, client_state, client)["model"]
        keys = client.features(model)
        store = {KEYS: keys, CLASSES: client.targets()}
        return {"model": model} | {
            str(weight): {**model, **store, WEIGHT: keys.new_tensor(weight)} for weight in WEIGHTS
        }

    def predict(self, params: Mapping[str, Tensor], x: Inputs, local: Local) -> Tensor:
        """Client: the logarithm of the mixture."""
        outputs = local.outputs(params, x)
        distances = torch.cdist(local.features(params, x), params[KEYS], compute_mode=MODE)
        nearest = distances.topk(min(self.neighbours, len(params[KEYS])), largest=False)
        shares = (-nearest.values / self.scale).softmax(1)
        votes = one_hot(params[CLASSES][nearest.indices], outputs.shape[1])
        near = (shares[:, :, None] * votes).sum(1)
        mixture = torch.lerp(outputs.softmax(1), near, params[WEIGHT])
        return (mixture + TINY).log()

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the trained model; its samples stay."""
        return super().upload(replace(local, models={"model": local.models["model"]}))

    def personal(self, models: dict[str, State]) -> str:
        """Client: half and half, before it has chosen."""
        return USUAL

    def choose(self, models: dict[str, State], client: Client) -> str:
        """Client: the weight that is best on its validation samples."""
        names = [str(weight) for weight in WEIGHTS]
        losses = [client.valid_losses(models[name]).mean() for name in names]
        best = torch.stack(losses).nan_to_num(torch.inf).argmin()
        return names[int(best)] if torch.isfinite(losses[int(best)]) else USUAL
