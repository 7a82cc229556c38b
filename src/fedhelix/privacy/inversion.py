"""DLG and iDLG: search for an image with the observed gradient, often the true training image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from fedhelix.core.tree import State
from fedhelix.privacy.minimise import adam, lbfgs

Label = Literal["seen", "granted", "sought"]


@dataclass(frozen=True, eq=False)
class Attacker:
    """What the attacker knows: a model, and which entries' gradients it sees."""

    module: nn.Module
    model: State
    seen: Sequence[str]

    def gradients(self, x: Tensor, labels: Tensor) -> State:
        """The gradient of one image's loss under this model; labels are probabilities."""
        free = {name: self.model[name] for name in self.seen}
        return grad(self._loss)(free, x, labels)

    def _loss(self, free: State, x: Tensor, labels: Tensor) -> Tensor:
        outputs = functional_call(self.module, {**self.model, **free}, (x[None],))
        return F.cross_entropy(outputs, labels[None])


def label_of(head_gradient: Tensor) -> int:
    """iDLG: with positive features, only the true class has a negative row of the gradient."""
    return int(head_gradient.sum(1).argmin())


def invert(
    attacker: Attacker,
    seen: State,
    shape: Sequence[int],
    classes: int,
    labels: Tensor | None,
    *,
    restarts: int = 1,
    steps: int = 300,
    optimiser: Literal["lbfgs", "adam"] = "lbfgs",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Images whose gradients are closest to those seen, and how close they are.

    `seen` is stacked along the first axis. Without labels a soft one is optimised together with
    each image, as in DLG. Each image gets `restarts` attempts; all are returned (images x
    restarts), because only the owner of the images can tell which is best.
    """
    like = next(iter(seen.values()))
    count, pixels = len(like), torch.Size(shape).numel()
    target = {name: value.repeat_interleave(restarts, 0) for name, value in seen.items()}
    known = None
    if labels is not None:
        known = F.one_hot(labels, classes).to(like).repeat_interleave(restarts, 0)
    width = pixels + (classes if known is None else 0)
    start = torch.randn(count * restarts, width, generator=generator).to(like)

    def distance(row: Tensor, wanted: State, label: Tensor | None) -> Tensor:
        soft = row[pixels:].softmax(0) if label is None else label
        gradients = attacker.gradients(row[:pixels].view(*shape), soft)
        squares = ((gradients[name] - wanted[name]).square().sum() for name in gradients)
        return sum(squares, row.new_zeros(()))

    def evaluate(rows: Tensor) -> tuple[Tensor, Tensor]:
        slopes, values = vmap(grad_and_value(distance), (0, 0, None if known is None else 0))(
            rows, target, known
        )
        return values, slopes

    best = {"lbfgs": lbfgs, "adam": adam}[optimiser](evaluate, start, steps)
    return best.points[:, :pixels].view(count, restarts, *shape), best.values.view(count, restarts)
