"""What is learned: the loss of one sample, the metric of many, and their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.errors import UserError

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], Tensor | float]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """One value per sample."""
    return F.cross_entropy(output, target, reduction="none")


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """One value per sample; a single output column is compared with a flat target."""
    return (output.reshape(target.shape) - target).square().reshape(len(target), -1).mean(1)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples whose largest output is the right class."""
    return correct(output, target).mean()


def correct(output: Tensor, target: Tensor) -> Tensor:
    """One for each sample whose largest output is the right class, otherwise zero; its mean is the
    accuracy.
    """
    return (output.argmax(-1) == target).float()


def r2(output: Tensor, target: Tensor) -> Tensor:
    """The coefficient of determination: 1 is perfect, 0 is as good as predicting the mean.

    Targets that are all the same, such as a single one, have none: not a number.
    """
    residual = (output.reshape(target.shape) - target).square().sum()
    spread = (target - target.mean(0)).square().sum()
    return torch.where(spread > 0, 1 - residual / spread, torch.nan)


@dataclass(frozen=True)
class Objective:
    """A loss to train with and a metric to judge by, of which more is better.

    `loss(output, target)` returns one value per sample (their mean is minimised) or a scalar;
    `metric(outputs, targets)` sees all samples of a test part at once. `name` is the metric's name
    in records. `by_sample` is the metric of each sample alone, where the metric is just their mean:
    that saves time.
    """

    loss: Loss
    metric: Metric
    name: str = "score"
    by_sample: Metric | None = None

    def mean_loss(self, output: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; samples that only pad it (`mask` = 0) do not count."""
        values = self.loss(output, target)
        if mask is None or values.dim() == 0:
            return values.mean()
        return (values * mask).sum() / mask.sum().clamp_min(1)

    def measure(self, output: Tensor, target: Tensor) -> Tensor:
        """The metric of some samples, which is one number."""
        returned = self.metric(output, target)
        value = torch.as_tensor(returned) if isinstance(returned, SupportsFloat) else None
        if value is None or value.dim():
            shape = "" if value is None else f" of shape {tuple(value.shape)}"
            raise UserError(
                "metric must return one number for all samples, not "
                f"{type(returned).__name__}{shape}."
            )
        return value


def objective_for(
    classes: int | None, loss: Loss | None = None, metric: Metric | None = None
) -> Objective:
    """Classification when there are classes, regression when there are none; both parts can be
    replaced.
    """
    for name, given in (("loss", loss), ("metric", metric)):
        if given is not None and not callable(given):
            raise UserError(f"{name} is a function of outputs and targets, not {given!r}.")
    if classes is None:
        return Objective(loss or squared_error, metric or r2, "score")
    if metric is not None:
        return Objective(loss or cross_entropy, metric, "score")
    return Objective(loss or cross_entropy, accuracy, "accuracy", None if loss else correct)


def evaluate_outputs(objective: Objective, output: Tensor, target: Tensor) -> tuple[float, float]:
    """The metric and the mean loss on a set of samples; not-a-number when there are none."""
    return evaluate_all(objective, [output], [target])[0]


@torch.no_grad()
def evaluate_all(
    objective: Objective, outputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[tuple[float, float]]:
    """The same for several sets of samples, with a single wait for the device."""
    empty = (float("nan"), float("nan"))
    pairs = [
        (objective.measure(output, target), objective.mean_loss(output, target))
        for output, target in zip(outputs, targets, strict=True)
        if len(target)
    ]
    flat = [value.double().to(pair[1].device) for pair in pairs for value in pair]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [(next(values), next(values)) if len(target) else empty for target in targets]
