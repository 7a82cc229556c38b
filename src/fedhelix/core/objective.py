"""What is learned: the loss of one sample, the metric of many, and their names."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.core import metrics
from fedhelix.core.errors import UserError
from fedhelix.core.metrics import IGNORED, by_class, f1

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], Tensor | float]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """One value per sample."""
    if output.dim() != 2 or target.dim() != 1 or not torch._C._are_functorch_transforms_active():
        return F.cross_entropy(output, target, reduction="none")
    # The same for stacked models; PyTorch's rule for them imports its symbolic algebra first.
    return -output.log_softmax(1).gather(1, target.long()[:, None])[:, 0]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """One value per sample; a single output column is compared with a flat target."""
    return (output.reshape(target.shape) - target).square().reshape(len(target), -1).mean(1)


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over a sample's tokens or pixels, one value per sample; -100 marks padding."""
    values = F.cross_entropy(
        by_class(output, target), target, reduction="none", ignore_index=IGNORED
    )
    counted = (target != IGNORED).flatten(1)
    return values.flatten(1).sum(1) / counted.sum(1).clamp_min(1)


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over a sample's labels, each of which may hold or not; one value per sample."""
    values = F.binary_cross_entropy_with_logits(
        output.reshape(target.shape), target.to(output.dtype), reduction="none"
    )
    return values.reshape(len(target), -1).mean(1)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples whose largest output is the right class."""
    return correct(output, target).mean()


def token_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of tokens or pixels whose largest output is the right class."""
    counted = target != IGNORED
    right = (by_class(output, target).argmax(1) == target) & counted
    return right.sum() / counted.sum()


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
class LossOfLabels:
    """A loss of the user's for labels of which several may hold: it gets them as floats, as
    PyTorch's BCEWithLogitsLoss wants them.
    """

    loss: Loss

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """What the user's loss says."""
        return self.loss(output, target.to(output.dtype))


@dataclass(frozen=True)
class Objective:
    """A loss to train with and a metric to judge by, of which more is better.

    `loss(output, target)` returns one value per sample (their mean is minimised), one for each
    entry of the target, or a scalar;
    `metric(outputs, targets)` sees all samples of a test part at once. `name` is the metric's name
    in records. `by_sample` is the metric of each sample alone, where the metric is just their mean:
    that saves time.
    """

    loss: Loss
    metric: Metric
    name: str = "score"
    by_sample: Metric | None = None

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of every sample, or one number where the loss gives no more."""
        values = self.loss(output, target)
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    def mean_loss(self, output: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; samples that only pad it (`mask` = 0) do not count."""
        values = self.losses(output, target)
        if mask is None or values.dim() == 0:
            return values.mean()
        return (values * mask).sum() / mask.sum().clamp_min(1)

    def measure(self, output: Tensor, target: Tensor) -> Tensor:
        """The metric of some samples, which is one number."""
        try:
            returned = self.metric(output, target)
        except UserError:
            raise
        except ValueError as problem:  # what metrics raise for values that they cannot judge
            raise failure("metric", shapes(output, target), problem) from problem
        value = torch.as_tensor(returned) if isinstance(returned, SupportsFloat) else None
        if value is None or value.dim():
            shape = "" if value is None else f" of shape {tuple(value.shape)}"
            raise UserError(
                "metric must return one number for all samples, not "
                f"{type(returned).__name__}{shape}."
            )
        return value


def failure(name: str, inputs: str, problem: Exception, advice: str = "") -> UserError:
    """What to say of a user's function that fails."""
    reason = str(problem).strip().partition("\n")[0].rstrip(".") or type(problem).__name__
    return UserError(f"{name} fails for {inputs} with '{reason}'{advice}.")


def shapes(output: Tensor, target: Tensor) -> str:
    """What a loss or a metric is given, in words."""
    return f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)}"


def objective_for(
    classes: int | None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    targets: Tensor | None = None,
) -> Objective:
    """Classification when there are classes; otherwise the type of the targets decides: true or
    false are labels of which several may hold, whole numbers the classes of tokens or pixels, other
    numbers a regression. Loss and metric can be replaced.
    """
    if loss is not None and not callable(loss):
        raise UserError(f"loss is a function of outputs and targets, not {loss!r}.")
    if loss is not None:
        _check_takes_both("loss", loss, "one value per sample")
        _note_parameters(loss)
    if metric is not None:
        check_metric("metric", metric)
    if classes is None and targets is not None and targets.dtype == torch.bool:
        own = None if loss is None else LossOfLabels(loss)
        return Objective(own or binary_cross_entropy, metric or f1, "score")
    if classes is None and targets is not None and targets.dtype == torch.int64:
        name = "score" if metric else "accuracy"
        return Objective(loss or token_cross_entropy, metric or token_accuracy, name)
    if classes is None:
        return Objective(loss or squared_error, metric or r2, "score")
    if metric is not None:
        return Objective(loss or cross_entropy, metric, "score")
    return Objective(loss or cross_entropy, accuracy, "accuracy", None if loss else correct)


def check_metric(name: str, given: object) -> None:
    """Refuse what is no function of two arguments, and say which metrics there are."""
    if callable(given):
        _check_takes_both(name, given, "one number")
        return
    if isinstance(given, str):
        ready = metrics.__all__
        close = difflib.get_close_matches(given.lower(), ready, n=1)
        hint = (
            f"did you mean fedhelix.metrics.{close[0]}?"
            if close
            else (f"fedhelix.metrics has {', '.join(ready)}.")
        )
        raise UserError(
            f"{name} is a function of outputs and targets, not the text '{given}'; {hint}"
        )
    several = isinstance(given, Mapping | list | tuple)
    how = "; run.evaluate({'NAME': FUNCTION, ...}) measures several" if several else ""
    what = type(given).__name__ if several else repr(given)
    raise UserError(f"{name} is a function of outputs and targets, not {what}{how}.")


def _note_parameters(loss: Loss) -> None:
    """Say that nothing trains the parameters of a loss."""
    if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
        warnings.warn(
            "the loss has parameters, and only those of the model are trained; make them part of "
            "the model, or freeze them with loss.requires_grad_(False).",
            stacklevel=4,
        )


def _check_takes_both(name: str, function: Callable[..., object], result: str) -> None:
    """Refuse a function that cannot be called with outputs and targets, and the class of one."""
    if isinstance(function, type):
        raise UserError(f"{name} is the class {function.__name__}; give {function.__name__}().")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell theirs
        return
    try:
        signature.bind(None, None)
    except TypeError as problem:
        raise UserError(
            f"{name} must take outputs and targets, in this order, and return {result}: {problem}."
        ) from None


def evaluate_outputs(objective: Objective, output: Tensor, target: Tensor) -> tuple[float, float]:
    """The metric and the mean loss on a set of samples; not-a-number when there are none."""
    return evaluate_all(objective, [output], [target])[0]


@torch.no_grad()
def evaluate_all(
    objective: Objective, outputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[tuple[float, float]]:
    """The same for several sets of samples, with a single wait for the device."""
    empty = (float("nan"), float("nan"))
    same = len(targets) > 1 and len(targets[0]) > 0 and all(one is targets[0] for one in targets)
    if same and objective.by_sample is not None:
        stacked = torch.stack(list(outputs))
        right = torch.as_tensor(objective.by_sample(stacked, targets[0]))
        losses = objective.losses(stacked.flatten(0, 1), targets[0].repeat(len(outputs)))
        means = torch.stack([right.mean(1), losses.view(len(outputs), -1).mean(1)]).double()
        return list(zip(*means.tolist(), strict=True))
    pairs = [
        (objective.measure(output, target), objective.mean_loss(output, target))
        for output, target in zip(outputs, targets, strict=True)
        if len(target)
    ]
    flat = [value.double().to(pair[1].device) for pair in pairs for value in pair]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [(next(values), next(values)) if len(target) else empty for target in targets]
