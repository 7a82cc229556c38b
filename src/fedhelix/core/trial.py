"""Tries loss and metric on a few samples, before the first round."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.objective import Objective


def check_loss(objective: Objective, output: Tensor, target: Tensor) -> None:
    """Refuse a loss that fails, has no gradient or the wrong shape, which broadcasting would
    hide.
    """
    shapes = _shapes(output, target)
    leaf = output.detach().requires_grad_()
    try:
        with torch.enable_grad():
            value = objective.loss(leaf, target)
    except UserError:
        raise
    except Exception as problem:  # a user's own loss may fail in any way
        raise _failure("loss", shapes, problem, _advice(target, problem)) from problem
    right = ((), (len(target),), tuple(target.shape))
    if not isinstance(value, Tensor) or tuple(value.shape) not in right:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise UserError(
            f"loss must return one value per sample or one number; for {shapes} it returns "
            f"a {type(value).__name__}{shape}{_column_advice(output, target)}."
        )
    if not value.requires_grad:
        raise UserError(
            "loss has no gradient with respect to the outputs; compute it from them without "
            "argmax, .item() and .detach()."
        )
    if not value.dim():
        _refuse_broadcast("loss", objective.loss, output, target)


def check_metric(objective: Objective, output: Tensor, target: Tensor) -> None:
    """Refuse a metric that cannot be called, returns no number or compares all with all.

    An error about values is none: so few samples may lack what the metric needs.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            objective.measure(output, target)
    except UserError:
        raise
    except ValueError:
        return
    except Exception as problem:  # a user's own metric may fail in any way
        raise _failure("metric", _shapes(output, target), problem) from problem
    _refuse_broadcast("metric", objective.metric, output, target)


def measured(name: str, objective: Objective, output: Tensor, target: Tensor) -> float:
    """The metric of some samples; one that fails is named."""
    try:
        return float(objective.measure(output, target))
    except UserError:
        raise
    except Exception as problem:  # a user's own metric may fail in any way
        raise _failure(name, _shapes(output, target), problem) from problem


def _failure(name: str, shapes: str, problem: Exception, advice: str = "") -> UserError:
    reason = str(problem).strip().partition("\n")[0].rstrip(".") or type(problem).__name__
    return UserError(f"{name} fails for {shapes} with '{reason}'{advice}.")


def _shapes(output: Tensor, target: Tensor) -> str:
    return f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)}"


def _advice(target: Tensor, problem: Exception) -> str:
    """What to change where classes of pixels or tokens go beyond the outputs."""
    if "out of bounds" not in str(problem) or target.dim() < 2:
        return ""
    return "; number the classes of pixels and tokens from 0, and mark what does not count by -100"


def _column_advice(output: Tensor, target: Tensor) -> str:
    column = output.dim() == target.dim() + 1 and output.shape[-1] == 1
    return "; compare o.squeeze(-1) with the targets" if column else ""


@torch.no_grad()
def _refuse_broadcast(
    name: str, rule: Callable[[Tensor, Tensor], Any], output: Tensor, target: Tensor
) -> None:
    """Refuse a rule that compares every output with every target: its value is another one for
    outputs without their last axis, and does not depend on their order.
    """
    if not (advice := _column_advice(output, target)) or len(target) < 2:
        return
    for tried in (output, target.to(output.dtype)[..., None]):
        try:
            values = [
                torch.as_tensor(rule(outputs, target)).double()
                for outputs in (tried, tried.squeeze(-1), tried.roll(1, 0))
            ]
        except Exception:  # it needs that axis, and so does not broadcast
            return
        value, flat, rolled = values
        same = torch.allclose(value, flat, rtol=1e-3, equal_nan=True)
        if not same and torch.allclose(value, rolled, rtol=1e-3):
            raise UserError(
                f"{name} compares every output with every target: it gets "
                f"{_shapes(output, target)}{advice}."
            )
