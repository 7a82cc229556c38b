"""Ready metrics for `Federation(metric=...)`: each sees all outputs and targets of a test part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the target of what does not count, such as padding


def perplexity(output: Tensor, target: Tensor) -> Tensor:
    """The exponential of the mean cross-entropy of a token (outputs N×T×C or N×C): less is
    better.
    """
    flat = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(flat.float(), target.reshape(-1), ignore_index=IGNORED).exp()


def neg_perplexity(output: Tensor, target: Tensor) -> Tensor:
    """Minus the perplexity, since of a metric more is better."""
    return -perplexity(output, target)


def f1(output: Tensor, target: Tensor) -> Tensor:
    """The mean F1 of all labels (macro); a label holds where its output is above zero.

    A label that neither holds nor is predicted does not count; without any there is no score.
    """
    held, found = target.reshape(len(target), -1) > 0, output.reshape(len(target), -1) > 0
    both = (held & found).sum(0)
    total = held.sum(0) + found.sum(0)
    return (2 * both / total)[total > 0].mean()


def iou(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the classes of intersection over union: of pixels, outputs N×C×H×W and targets
    N×H×W. A class that is nowhere does not count.
    """
    counted = target != IGNORED
    found, held = output.argmax(1)[counted], target[counted]
    classes = torch.arange(output.shape[1], device=output.device)[:, None]
    is_found, is_held = found == classes, held == classes
    union = (is_found | is_held).sum(1)
    return ((is_found & is_held).sum(1) / union)[union > 0].mean()


def auc(output: Tensor, target: Tensor) -> Tensor:
    """The area under the ROC curve: how likely a positive sample ranks above a negative one.

    Of several outputs for two classes the last minus the first counts. Not a number where all
    targets are alike.
    """
    score = output.reshape(len(target), -1)
    score = score[:, -1] - score[:, 0] if score.shape[1] > 1 else score[:, 0]
    positive = target.reshape(-1) > 0
    order, place = score.double().unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(order))
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]  # those of equal scores are their mean
    n = positive.sum()
    above = ranks[positive].sum() - n * (n + 1) / 2
    return above / (n * (len(target) - n))
