"""Minimisers for many small problems at once; each row is a separate problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # values and gradients, row by row
Move = tuple[Tensor, Tensor, Tensor]  # change of the points, change of the gradients, weight

MEMORY = 50  # steps that L-BFGS remembers


class Best:
    """The best point of each row so far, which it keeps even if the row diverges later."""

    def __init__(self, start: Tensor):
        self.points = start.clone()
        self.values = start.new_full((len(start),), torch.inf)

    def update(self, points: Tensor, values: Tensor) -> None:
        """Keep the points that are better."""
        better = values < self.values
        self.values = torch.where(better, values, self.values)
        self.points = torch.where(better[:, None], points, self.points)


def lbfgs(
    evaluate: Evaluate, start: Tensor, steps: int, lr: float = 1.0, enough: float = 1e-6
) -> Best:
    """L-BFGS without a line search, as in iDLG's reference code, for all rows side by side."""
    best, points, moves = Best(start), start, list[Move]()
    scale = start.new_ones(len(start), 1)
    before: tuple[Tensor, Tensor] | None = None
    for _ in range(steps):
        values, slopes = evaluate(points)
        best.update(points, values)
        if bool((best.values < enough).all()):
            break
        slopes = torch.where(slopes.isfinite(), slopes, 0)
        if before is not None:
            moved, turned = points - before[0], slopes - before[1]
            curve = (moved * turned).sum(1, keepdim=True)
            # A row whose curvature is not positive would break the approximation: weight zero.
            positive = curve > 1e-10
            squares = turned.square().sum(1, keepdim=True).clamp_min(1e-30)
            scale = torch.where(positive, curve / squares, scale)
            weight = torch.where(positive, 1 / curve.clamp_min(1e-10), 0)
            moves = [*moves[1 - MEMORY :], (moved, turned, weight)]
        length = slopes.abs().sum(1, keepdim=True).clamp_min(1e-30)
        rate = lr if before is not None else lr * (1 / length).clamp_max(1)
        before = (points, slopes)
        step = rate * newton_direction(slopes, moves, scale)
        points = points + torch.where(step.isfinite(), step, 0)
    return best


def newton_direction(slopes: Tensor, moves: Sequence[Move], scale: Tensor) -> Tensor:
    """The two-loop recursion of L-BFGS: minus the inverse Hessian times the gradient."""
    direction, shares = -slopes, []
    for moved, turned, weight in reversed(moves):
        shares.append(weight * (moved * direction).sum(1, keepdim=True))
        direction = direction - shares[-1] * turned
    direction = direction * scale
    for (moved, turned, weight), share in zip(moves, reversed(shares), strict=True):
        along = weight * (turned * direction).sum(1, keepdim=True)
        direction = direction + moved * (share - along)
    return direction


def adam(
    evaluate: Evaluate, start: Tensor, steps: int, lr: float = 0.1, enough: float = 1e-6
) -> Best:
    """Adam with a learning rate that falls to zero along a cosine."""
    best, points = Best(start), start.clone().requires_grad_()
    optimiser = torch.optim.Adam([points], lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        values, slopes = evaluate(points.detach())
        best.update(points.detach(), values)
        if bool((best.values < enough).all()):
            break
        points.grad = torch.where(slopes.isfinite(), slopes, 0)
        optimiser.step()
        schedule.step()
    return best
