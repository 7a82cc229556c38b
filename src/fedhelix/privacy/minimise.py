"""Minimisers for many small problems at once: each row is a problem of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # values and gradients, row by row

MEMORY = 50  # steps that L-BFGS remembers


class Best:
    """The best point of each row so far; a row that has run away does not spoil what it had found."""

    def __init__(self, start: Tensor):
        self.points = start.clone()
        self.values = start.new_full((len(start),), torch.inf)

    def see(self, points: Tensor, values: Tensor) -> None:
        """Take over what is better."""
        better = values < self.values
        self.values = torch.where(better, values, self.values)
        self.points = torch.where(better[:, None], points, self.points)


def lbfgs(
    evaluate: Evaluate, start: Tensor, steps: int, lr: float = 1.0, enough: float = 1e-6
) -> Best:
    """L-BFGS without a line search, as the reference of iDLG runs it, for all rows side by side."""
    best, points, moves = Best(start), start, list[tuple[Tensor, Tensor, Tensor]]()
    scale = start.new_ones(len(start), 1)
    before: tuple[Tensor, Tensor] | None = None
    for _ in range(steps):
        values, slopes = evaluate(points)
        best.see(points, values)
        if bool((best.values < enough).all()):
            break
        slopes = torch.where(slopes.isfinite(), slopes, 0)
        if before is not None:
            moved, turned = points - before[0], slopes - before[1]
            curve = (moved * turned).sum(1, keepdim=True)
            sound = curve > 1e-10
            scale = torch.where(
                sound, curve / turned.square().sum(1, keepdim=True).clamp_min(1e-30), scale
            )
            moves = [
                *moves[1 - MEMORY :],
                (moved, turned, torch.where(sound, 1 / curve.clamp_min(1e-10), 0)),
            ]
        direction, shares = -slopes, []
        for moved, turned, weight in reversed(moves):
            shares.append(weight * (moved * direction).sum(1, keepdim=True))
            direction = direction - shares[-1] * turned
        direction = direction * scale
        for (moved, turned, weight), share in zip(moves, reversed(shares), strict=True):
            direction = direction + moved * (
                share - weight * (turned * direction).sum(1, keepdim=True)
            )
        length = slopes.abs().sum(1, keepdim=True).clamp_min(1e-30)
        rate = lr if before is not None else lr * (1 / length).clamp_max(1)
        before = (points, slopes)
        step = rate * direction
        points = points + torch.where(step.isfinite(), step, 0)
    return best


def adam(
    evaluate: Evaluate, start: Tensor, steps: int, lr: float = 0.1, enough: float = 1e-6
) -> Best:
    """Adam with a rate that falls to zero along a cosine."""
    best, points = Best(start), start.clone().requires_grad_()
    optimiser = torch.optim.Adam([points], lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        values, slopes = evaluate(points.detach())
        best.see(points.detach(), values)
        if bool((best.values < enough).all()):
            break
        points.grad = torch.where(slopes.isfinite(), slopes, 0)
        optimiser.step()
        schedule.step()
    return best
