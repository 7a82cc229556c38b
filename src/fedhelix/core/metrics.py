"""Ready metrics for `Federation(metric=...)`: each sees all outputs and targets of a test part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.errors import UserError

IGNORED = -100  # the target of what does not count, such as padding

__all__ = ["auc", "f1", "iou", "neg_perplexity", "perplexity"]


def by_class(output: Tensor, target: Tensor) -> Tensor:
    """Outputs of tokens (N×T×C) or pixels (N×C×H×W) with the classes as second axis."""
    return output.movedim(class_axis(output, target), 1)


def class_axis(output: Tensor, target: Tensor) -> int:
    """Which axis of outputs has the classes, the last or the second; where both fit, it is the last
    one of tokens and the second one of pixels.
    """
    last, second = fitting_axes(output, target)
    if not last and not second:
        raise UserError(
            f"outputs of shape {tuple(output.shape)} do not fit targets of shape "
            f"{tuple(target.shape)}; one score for every class is needed, on the last axis or on "
            "the second."
        )
    return -1 if last and (target.dim() < 3 or not second) else 1


def fitting_axes(output: Tensor, target: Tensor) -> tuple[bool, bool]:
    """Whether the last axis of outputs can be that of the classes, and whether the second can."""
    second = (output.shape[0], *output.shape[2:]) == tuple(target.shape)
    return output.shape[:-1] == target.shape, second


def perplexity(output: Tensor, target: Tensor) -> Tensor:
    """The exponential of the mean cross-entropy of a sample, token or pixel: less is better."""
    _check_classes("perplexity", target)
    scores = by_class(output, target).float()
    return F.cross_entropy(scores, target, ignore_index=IGNORED).exp()


def neg_perplexity(output: Tensor, target: Tensor) -> Tensor:
    """Minus the perplexity, since of a metric more is better."""
    return -perplexity(output, target)


def f1(output: Tensor, target: Tensor) -> Tensor:
    """The mean F1 of all classes or labels (macro, as in scikit-learn).

    The class is the largest output; a label holds where its output is above zero. What neither
    holds nor is predicted does not count; without any there is no score.
    """
    if _are_labels("f1", output, target):
        held, found = target.reshape(len(target), -1) > 0, output.reshape(len(target), -1) > 0
    else:
        scores, classes = _classified(output, target)
        held = F.one_hot(classes, scores.shape[1]) > 0
        found = F.one_hot(scores.argmax(1), scores.shape[1]) > 0
    both = (held & found).sum(0)
    total = held.sum(0) + found.sum(0)
    return torch.where(output.isnan().any(), torch.nan, (2 * both / total)[total > 0].mean())


def iou(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the classes of intersection over union: of pixels, outputs N×C×H×W and targets
    N×H×W. A class that is nowhere does not count.
    """
    _check_classes("iou", target)
    scores, held = _classified(output, target)
    found, classes = scores.argmax(1), torch.arange(scores.shape[1], device=scores.device)[:, None]
    is_found, is_held = found == classes, held == classes
    union = (is_found | is_held).sum(1)
    return ((is_found & is_held).sum(1) / union)[union > 0].mean()


def auc(output: Tensor, target: Tensor) -> Tensor:
    """The area under the ROC curve: how likely a positive sample ranks above a negative one.

    Of more than two classes each is ranked against all others by its probability (softmax), and of
    several labels each alone; the mean counts (macro, as in scikit-learn). Classes and labels of
    which all targets are alike do not count; without any there is no score, nor with outputs that
    are not numbers.
    """
    if _are_labels("auc", output, target):
        scores, positive = output.reshape(len(target), -1), target.reshape(len(target), -1) > 0
    else:
        scores, classes = _classified(output, target)
        positive = F.one_hot(classes, scores.shape[1]) > 0
        if scores.shape[1] == 2:
            scores, positive = (scores[:, 1] - scores[:, 0])[:, None], positive[:, 1:]
        else:
            scores = scores.double().softmax(1)
    pairs = zip(scores.double().unbind(1), positive.unbind(1), strict=True)
    areas = torch.stack([_area(score, held) for score, held in pairs])
    return torch.where(output.isnan().any(), torch.nan, areas.nanmean())


def _area(score: Tensor, positive: Tensor) -> Tensor:
    """The area under the ROC curve of one score; not a number where all targets are alike."""
    order, place = score.unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(order))
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]  # those of equal scores are their mean
    n = positive.sum()
    above = ranks[positive].sum() - n * (n + 1) / 2
    return above / (n * (len(positive) - n))


def _are_labels(name: str, output: Tensor, target: Tensor) -> bool:
    """Whether targets say what holds, rather than which class it is; refuses other numbers.

    Whole numbers do so where data read them as labels, too: several of 0 and 1 (N×L), with as many
    outputs.
    """
    holds = bool(((target == 0) | (target == 1)).all())
    if not target.is_floating_point() and target.dtype != torch.bool:
        several = target.dim() == 2 and target.shape[1] > 1
        return several and output.shape == target.shape and holds
    if not holds:
        raise UserError(f"{name} needs classes or labels, but the targets are numbers.")
    return True


def _check_classes(name: str, target: Tensor) -> None:
    """Refuse targets that are no classes."""
    if target.dtype != torch.int64:
        raise UserError(f"{name} needs classes, but the targets are of type {target.dtype}.")


def _classified(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of each sample, token or pixel that counts, one row each, and its class; a single
    score is that of class 1, and zero that of class 0.
    """
    target = target.long()
    if output.shape == target.shape:
        output = output[..., None]
    scores = by_class(output, target).movedim(1, -1)[target != IGNORED]
    if scores.shape[1] == 1:
        scores = torch.cat([torch.zeros_like(scores), scores], 1)
    return scores, target[target != IGNORED]
