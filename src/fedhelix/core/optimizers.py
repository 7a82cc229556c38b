"""One step of an optimiser, written once for all engines.

A rule changes tensors in place. They may be a model's entries, or the flat parameters of many
clients at once with a leading axis of clients; then the settings are tensors with that axis, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedhelix.core.cuda import with_triton
from fedhelix.core.errors import UserError

Tensors = list[Tensor]


class StepSettings(NamedTuple):
    """What a step depends on besides gradients: numbers, or columns with a number per client."""

    lr: float | Tensor
    momentum: float | Tensor
    weight_decay: float | Tensor
    number: int | Tensor  # of this step, from 1; every round and phase starts anew


@dataclass(frozen=True)
class OptimizerRule:
    """Subclass it for an optimiser of your own and pass it as `Federation(optimizer=Mine())`.

    It must be a frozen dataclass of numbers, and `update` must not look at values (no `if` on
    tensors), since it may be recorded as a CUDA graph.
    """

    label: ClassVar[str] = ""

    def slots(self, momentum: float) -> int:
        """How many tensors it keeps for each parameter; they start at zero."""
        return 0

    def update(
        self, params: Tensors, grads: Tensors, slots: Sequence[Tensors], step: StepSettings
    ) -> None:
        """Change the parameters, and the slots, in place."""
        raise UserError(f"{type(self).__name__} must define update(params, grads, slots, step).")


@dataclass(frozen=True)
class SGD(OptimizerRule):
    """As torch.optim.SGD: weight decay is part of the gradient, momentum without dampening."""

    label: ClassVar[str] = "sgd"

    def slots(self, momentum: float) -> int:
        """The velocity."""
        return 1 if momentum else 0

    def update(
        self, params: Tensors, grads: Tensors, slots: Sequence[Tensors], step: StepSettings
    ) -> None:
        """v = momentum * v + gradient; parameter -= lr * v."""
        fused = with_triton("fedhelix.core.fused_sgd") if params[0].is_cuda else None
        if fused is not None and fused.can_fuse(params, *step[:3]):
            fused.step(params[0], grads[0], slots[0][0] if slots else None, *step[:3])
            return
        grads = _with_decay(params, grads, step)
        if slots:
            (velocity,) = slots
            _scale_and_add_(velocity, step.momentum, grads)
            grads = velocity
        _add_scaled_(params, grads, -step.lr)


@dataclass(frozen=True)
class Adam(OptimizerRule):
    """As torch.optim.Adam: weight decay is part of the gradient; `momentum` is not used."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    label: ClassVar[str] = "adam"

    def slots(self, momentum: float) -> int:
        """Running means of the gradient and of its square."""
        return 2

    def update(
        self, params: Tensors, grads: Tensors, slots: Sequence[Tensors], step: StepSettings
    ) -> None:
        """parameter -= lr * m / (sqrt(v) + eps), with m and v corrected for their start at zero."""
        self._move(params, _with_decay(params, grads, step), slots, step)

    def _move(
        self, params: Tensors, grads: Tensors, slots: Sequence[Tensors], step: StepSettings
    ) -> None:
        mean, square = slots
        torch._foreach_lerp_(mean, grads, 1 - self.beta1)
        torch._foreach_mul_(square, self.beta2)
        torch._foreach_addcmul_(square, grads, grads, value=1 - self.beta2)
        # Both means start at zero, so that after `number` steps they are too small by these
        # factors.
        first, second = (_weight_so_far(beta, step.number) for beta in (self.beta1, self.beta2))
        updates = [
            (m / first) / ((v / second).sqrt() + self.eps)
            for m, v in zip(mean, square, strict=True)
        ]
        _add_scaled_(params, updates, -step.lr)


@dataclass(frozen=True)
class AdamW(Adam):
    """As torch.optim.AdamW: weight decay shrinks the parameters and leaves the gradients alone."""

    label: ClassVar[str] = "adamw"

    def update(
        self, params: Tensors, grads: Tensors, slots: Sequence[Tensors], step: StepSettings
    ) -> None:
        """parameter *= 1 - lr * weight_decay, then as Adam."""
        _scale_(params, 1 - step.lr * step.weight_decay)
        self._move(params, grads, slots, step)


OPTIMIZERS: dict[str, OptimizerRule] = {rule.label: rule for rule in (SGD(), Adam(), AdamW())}


def _with_decay(params: Tensors, grads: Tensors, step: StepSettings) -> Tensors:
    """The gradients of the loss plus weight_decay / 2 times the squared parameters."""
    decay = step.weight_decay
    if isinstance(decay, Tensor):
        pairs = zip(grads, params, strict=True)
        return [torch.addcmul(grad, param, decay) for grad, param in pairs]
    return list(torch._foreach_add(grads, params, alpha=decay)) if decay else grads


def _weight_so_far(beta: float, number: int | Tensor) -> float | Tensor:
    """1 - beta^number; written like this, float32 does not lose its digits where beta is near 1."""
    exponent = number * math.log(beta)
    return -exponent.expm1() if isinstance(exponent, Tensor) else -math.expm1(exponent)


def _scale_(tensors: Tensors, factor: float | Tensor) -> None:
    if isinstance(factor, Tensor):
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def _scale_and_add_(tensors: Tensors, factor: float | Tensor, others: Tensors) -> None:
    if isinstance(factor, Tensor):  # in one pass
        for tensor, other in zip(tensors, others, strict=True):
            torch.addcmul(other, tensor, factor, out=tensor)
    else:
        torch._foreach_mul_(tensors, factor)
        torch._foreach_add_(tensors, others)


def _add_scaled_(tensors: Tensors, others: Tensors, factor: float | Tensor) -> None:
    if isinstance(factor, Tensor):
        for tensor, other in zip(tensors, others, strict=True):
            tensor.addcmul_(other, factor)
    else:
        torch._foreach_add_(tensors, others, alpha=factor)
