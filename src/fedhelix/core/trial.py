"""Tries what users write, such as loss, metric and optimiser, before the first round."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedhelix.core.copies import copied
from fedhelix.core.errors import UserError
from fedhelix.core.fit import probe
from fedhelix.core.layers import Layers
from fedhelix.core.metrics import auc, by_class, f1, neg_perplexity, perplexity
from fedhelix.core.objective import (
    Objective,
    accuracy,
    binary_cross_entropy,
    cross_entropy,
    failure,
    r2,
    shapes,
    token_accuracy,
    token_cross_entropy,
)
from fedhelix.core.optimizers import OptimizerRule, StepSettings
from fedhelix.core.options import check_frozen
from fedhelix.core.parts import Inputs, output_of

SEVERAL = 100  # samples that tell whether a metric compares all with all
FAR = -1000.0  # times its weights, a network's last layer gives quite other outputs


def check_loss(objective: Objective, output: Tensor, target: Tensor) -> None:
    """Refuse a loss that fails, has no gradient or the wrong shape, which broadcasting would
    hide.
    """
    given = shapes(output, target)
    leaf = output.detach().requires_grad_()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
            warnings.filterwarnings("ignore", "Using a target size")  # of what is refused below
            value = objective.loss(leaf, target)
    except UserError:
        raise
    except Exception as problem:  # a user's own loss may fail in any way
        raise failure("loss", given, problem, _advice(output, target, problem)) from problem
    right = ((), (len(target),), tuple(target.shape))
    if not isinstance(value, Tensor) or tuple(value.shape) not in right:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise UserError(
            f"loss must return one value per sample or one number; for {given} it returns "
            f"a {type(value).__name__}{shape}{_column_advice(output, target)}."
        )
    if not value.requires_grad:
        raise UserError(
            "loss has no gradient with respect to the outputs; compute it from them without "
            "argmax, .item() and .detach()."
        )
    if not value.dim():
        _refuse_broadcast("loss", objective.loss, output, target)


@torch.no_grad()
def check_loss_of_samples(objective: Objective, output: Tensor, target: Tensor, who: str) -> None:
    """Refuse a loss of a whole batch that is not the mean of its samples' losses: `who` takes each
    sample alone, and class weights, for example, would cancel.
    """
    whole = objective.loss(output, target)
    if whole.dim():
        return
    alone = [objective.loss(output[i : i + 1], target[i : i + 1]) for i in range(len(target))]
    if not torch.allclose(whole, torch.stack(alone).mean(), rtol=1e-3, atol=1e-6, equal_nan=True):
        raise UserError(
            f"{who} takes the loss of each sample alone, and the loss of a batch is not the mean "
            "of these (class weights do that); let it return one value per sample, as PyTorch's "
            "own with reduction='none' do."
        )


def check_metric(objective: Objective, output: Tensor, target: Tensor) -> None:
    """Refuse a metric that cannot be called, returns no number or compares all with all.

    An error about values is none: so few samples may lack what the metric needs.
    """
    if _is(objective.metric, accuracy, token_accuracy) and output.numel() == target.numel():
        raise UserError(
            "the model has one output where it needs one for every class, so the accuracy, the "
            "usual metric, cannot tell them apart; give metric=, such as fedhelix.metrics.f1, or "
            "give the model an output for every class."
        )
    usual = _usual_metric(objective, target)
    name = f"the usual metric, {usual}," if usual else "metric"
    advice = "; give metric= as well" if usual else ""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            objective.measure(output, target)
    except UserError as problem:
        if isinstance(problem.__cause__, ValueError):  # of so few samples, which have few classes
            return
        raise
    except Exception as problem:  # a user's own metric may fail in any way
        raise failure(name, shapes(output, target), problem, advice) from problem
    _refuse_broadcast(name, objective.metric, output, target)


def _usual_metric(objective: Objective, target: Tensor) -> str | None:
    """The name of a metric that the user has not given."""
    if _is(objective.metric, accuracy, token_accuracy):
        return "accuracy"
    if _is(objective.metric, f1) and target.dtype == torch.bool:
        return "F1"
    return "R²" if _is(objective.metric, r2) else None


def _is(rule: object, *known: object) -> bool:
    """Whether a loss or metric is one of these; some of others' compare as no function does."""
    return any(rule is one for one in known)


def note_probabilities(
    objective: Objective,
    module: nn.Module,
    layers: Layers,
    example: Inputs,
    output: Tensor,
    target: Tensor,
) -> None:
    """Say so where outputs are probabilities, and what takes them for logits."""
    if target.is_floating_point():
        return
    if target.dtype == torch.bool or output.numel() == target.numel():
        taken = _taken_above_zero(objective, target)
        wrong = taken and _is_bounded(module, layers, example, output)
    else:
        taken = _taken_by_softmax(objective, output, target)
        wrong = taken and _sums_to_one(by_class(output, target))
    if wrong:
        warnings.warn(f"the model's outputs are probabilities; {taken}.", stacklevel=5)


def _taken_above_zero(objective: Objective, target: Tensor) -> str | None:
    """What compares outputs with zero, and what to do where they are probabilities."""
    if _is(objective.loss, binary_cross_entropy):
        return "binary cross-entropy applies a sigmoid itself, so leave out the model's own"
    of_labels, by_f1 = target.dtype == torch.bool, _is(objective.metric, f1)
    if not of_labels and not by_f1:
        return None
    who = "F1 and predict take" if of_labels and by_f1 else "F1 takes" if by_f1 else "predict takes"
    return (
        f"{who} outputs above 0 as true, so leave out the model's sigmoid and let the loss apply "
        "it, as BCEWithLogitsLoss does"
    )


def _taken_by_softmax(objective: Objective, output: Tensor, target: Tensor) -> str | None:
    """What applies a softmax to outputs, and what to do where they are probabilities."""
    if _is(objective.loss, cross_entropy, token_cross_entropy):
        return "cross-entropy applies a softmax itself, so leave out the model's own"
    several = output.numel() > 2 * target.numel()  # of two classes the ranks stay the same
    if _is(objective.metric, perplexity, neg_perplexity, *([auc] if several else [])):
        name = getattr(objective.metric, "__name__", "the metric")
        return f"{name} applies a softmax itself, so let the model return their logarithms"
    return None


def _sums_to_one(scores: Tensor) -> bool:
    sums = scores.sum(1)
    return bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def _is_bounded(module: nn.Module, layers: Layers, example: Inputs, output: Tensor) -> bool:
    """Whether outputs lie between 0 and 1 whatever the weights of the last layer are, as those
    after a sigmoid do; a few logits may do so by chance.
    """
    if not layers.head or not bool(((output > 0) & (output <= 1)).all()):
        return False
    other = copied(module)
    state = other.state_dict()
    with torch.no_grad():
        for name in layers.head:
            state[name] *= FAR
    far = output_of(probe(other, example)).float()
    return bool(((far >= 0) & (far <= 1)).all())


def measured(name: str, objective: Objective, output: Tensor, target: Tensor) -> float:
    """The metric of some samples; one that fails, or that compares all with all, is named."""
    try:
        value = float(objective.measure(output, target))
    except UserError as problem:
        if isinstance(problem.__cause__, ValueError):
            raise failure(name, shapes(output, target), problem.__cause__) from problem
        raise
    except Exception as problem:  # a user's own metric may fail in any way
        raise failure(name, shapes(output, target), problem) from problem
    _refuse_broadcast(name, objective.metric, output[:SEVERAL], target[:SEVERAL])
    return value


def check_optimizer(rule: OptimizerRule, momentum: float) -> None:
    """Refuse an optimiser that cannot be called as the engines do, or that changes nothing."""
    name = type(rule).__name__
    check_frozen("optimizer", rule)
    params, grads = [torch.zeros(2, 3)], [torch.ones(2, 3)]
    try:
        count = rule.slots(momentum)
        slots = [[torch.zeros(2, 3)] for _ in range(count)]
        update: Callable[..., object] = rule.update
        returned = update(params, grads, slots, StepSettings(0.1, momentum, 0.0, 1))
    except UserError:
        raise
    except Exception as problem:  # a user's own optimiser may fail in any way
        advice = "; slots(momentum) returns a number, update(params, grads, slots, step) nothing"
        raise failure(f"optimizer {name}", "one parameter", problem, advice) from problem
    if returned is not None:
        raise UserError(
            f"{name}.update returns a {type(returned).__name__}; it must change the parameters in "
            "place (param -= ...) and return nothing."
        )


def _advice(output: Tensor, target: Tensor, problem: Exception) -> str:
    """What to change where classes of pixels or tokens go beyond the outputs, or where zeros and
    ones should be such classes.
    """
    if target.dtype == torch.bool and output.dim() == target.dim() + 1:
        return (
            "; zeros and ones are labels of which several may hold, and classes=2 in from_arrays, "
            "from_clients or from_table makes them the classes of tokens"
        )
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
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
                f"{shapes(output, target)}{advice}."
            )
