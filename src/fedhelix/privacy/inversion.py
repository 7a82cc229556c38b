"""DLG and iDLG: a picture whose gradient is the one that was seen is, often, the picture that was
trained on.
"""

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
    """What somebody who wants the picture knows: a model, and which entries' gradients it sees."""

    module: nn.Module
    model: State
    seen: Sequence[str]

    def gradients(self, x: Tensor, labels: Tensor) -> State:
        """The gradient of the loss of one picture under this model; labels are probabilities."""
        free = {name: self.model[name] for name in self.seen}
        return grad(self._loss)(free, x, labels)

    def _loss(self, free: State, x: Tensor, labels: Tensor) -> Tensor:
        outputs = functional_call(self.module, {**self.model, **free}, (x[None],))
        return F.cross_entropy(outputs, labels[None])


def label_of(head_gradient: Tensor) -> int:
    """iDLG: of the head's gradient only the true class's row is negative, as long as the features
    are positive.
    """
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
    """Pictures whose gradients come closest to those seen (stacked along the first axis), and how
    close.

    Without labels a soft one is sought together with each picture, as in DLG. Every picture gets
    `restarts` attempts; all are returned (pictures x restarts), for only the owner of the pictures
    can tell which is best.
    """
    count, pixels = len(next(iter(seen.values()))), torch.Size(shape).numel()
    target = {name: value.repeat_interleave(restarts, 0) for name, value in seen.items()}
    known = (
        None
        if labels is None
        else F.one_hot(labels, classes).to(next(iter(seen.values()))).repeat_interleave(restarts, 0)
    )
    width = pixels + (classes if known is None else 0)
    start = torch.randn(count * restarts, width, generator=generator).to(next(iter(seen.values())))

    def apart(row: Tensor, wanted: State, label: Tensor | None) -> Tensor:
        soft = row[pixels:].softmax(0) if label is None else label
        found = attacker.gradients(row[:pixels].view(*shape), soft)
        return sum(
            ((found[name] - wanted[name]).square().sum() for name in found), row.new_zeros(())
        )

    def evaluate(rows: Tensor) -> tuple[Tensor, Tensor]:
        slopes, values = vmap(grad_and_value(apart), (0, 0, None if known is None else 0))(
            rows, target, known
        )
        return values, slopes

    best = {"lbfgs": lbfgs, "adam": adam}[optimiser](evaluate, start, steps)
    return best.points[:, :pixels].view(count, restarts, *shape), best.values.view(count, restarts)
