"""What targets are: classes, labels of which several may hold, classes of tokens, or numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.metrics import IGNORED
from fedhelix.data.checks import check_labels

Classes = int | Literal["auto"] | None
VOID = 255  # what masks often call pixels without a class
FEW = 5  # classes in a sentence
FEW_CLASSES = 10  # so many different whole floats may be classes
MOST_CLASSES = 50  # that whole numbers are taken for without a word, in few samples


def count_classes(classes: Classes, targets: Tensor, test_targets: Tensor) -> int | None:
    """The number of classes that the user gave or that the labels show; None where samples do not
    have one label each.
    """
    if classes is None:
        return None
    if classes != "auto":
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
            raise UserError(
                f"classes must be 'auto', None or a whole number above 0, not {classes!r}."
            )
        return None if has_several(targets) else classes
    if targets.is_floating_point() or has_several(targets):
        return None
    both = torch.cat([targets.flatten(), test_targets.flatten()])
    largest = max(int(both.max()), 0)
    samples = len(targets) + len(test_targets)
    if largest > 1000 + samples:
        raise UserError(
            f"labels go up to {largest}, but there are only {samples} samples; number classes from "
            "0, or give classes=None if these are numbers to predict."
        )
    different = len(both.unique())
    if different > max(MOST_CLASSES, samples // 4) and int(both.min()) < 0:
        raise UserError(
            f"y has {different} different whole numbers in {samples} samples, also such below 0; "
            "in from_arrays, from_clients or from_table, classes=None makes it a regression; in an "
            "npz file, save y as floats."
        )
    if different > max(MOST_CLASSES, samples // 4):
        raise UserError(
            f"y has {different} different whole numbers in {samples} samples; in from_arrays, "
            f"from_clients or from_table, classes=None makes it a regression, "
            f"classes={1 + largest} a classification; in an npz file, save y as floats for the "
            f"one, or classes={1 + largest} for the other."
        )
    return 1 + largest


def check_classes(
    parts: Sequence[Tensor], classes: Classes, where: Sequence[str], name: str
) -> None:
    """Refuse labels that are no classes while samples have the user's numbers, which they lose when
    some are held out or clients are joined; `where` says whose the labels of each part are.
    """
    are_numbers = classes == "auto" and any(part.is_floating_point() for part in parts)
    if are_numbers or any(has_several(part) for part in parts):
        return
    labels = torch.cat([part.flatten() for part in parts])
    count = count_classes(classes, labels, labels[:0])
    for part, whose in zip(parts, where, strict=True) if count is not None else ():
        check_labels(as_labels(part, name).flatten(), count or 0, whose)


def note_unused(parts: Sequence[Tensor], name: str) -> None:
    """Say that labels of samples, tokens or pixels do not begin at 0, or are the fewest of so many
    classes; they are kept as they are.
    """
    present = torch.cat([_different(part) for part in parts]).unique()
    labels = present[present != IGNORED]
    if not len(labels):
        return
    first, count = int(labels[0]), 1 + int(labels[-1])
    unused = count - len(labels)
    if first <= 0 and unused <= len(labels):
        return
    what = f"begin at {first}" if first > 0 else f"go up to {count - 1}"
    shifted = f" (y - {first})" if len(labels) == len(present) else ""
    how = "number classes from 0" + (shifted if unused == first else " without gaps")
    if count == VOID + 1 and parts[0].dim() > 2:
        how += f", mark pixels that do not count by {IGNORED} instead of {VOID}"
    elif unused != first:
        how += ", or give them as text (y.astype(str))"
    warnings.warn(
        f"the labels of '{name}' {what}, so {unused} of the {count} classes "
        f"{'has' if unused == 1 else 'have'} no samples; {how}, or give classes={count} if they "
        "are right.",
        stacklevel=5,
    )


def _different(labels: Tensor) -> Tensor:
    """The labels that there are, sorted; those of many pixels take no sort."""
    low, high = (int(end) for end in labels.aminmax()) if labels.numel() else (0, 0)
    if labels.numel() < high - low:
        return labels.unique()
    return torch.bincount((labels - low).flatten()).nonzero().flatten() + low


def as_targets(
    parts: list[Tensor], classes: Classes, count: int | None, name: str, named: bool
) -> tuple[Tensor, ...]:
    """Targets in the type that says what they are; see `Dataset.y`. Those that were `named` by
    texts are classes, however many names there are.
    """
    whole = not any(part.is_floating_point() for part in parts)
    several = all(has_several(part) for part in parts)
    labels_hold = not named and all(is_multi_label(part) for part in parts)
    if several and classes == "auto" and labels_hold:
        _note_one_hot(parts, name)
        return tuple(part.bool() for part in parts)
    are_numbers = classes == "auto" and count is None and not whole
    if are_numbers and not several:
        _note_few_whole(parts, name)
    if classes is None or are_numbers:
        return tuple(part.float() for part in parts)
    labels = tuple(as_labels(part, name) for part in parts)
    if several and isinstance(classes, int):
        _check_tokens(torch.cat(labels), classes, name)
    return labels


def _note_one_hot(parts: Sequence[Tensor], name: str) -> None:
    """Say that labels of which just one holds in every sample may be classes."""
    if all(bool((part.sum(1) == 1).all()) for part in parts):
        warnings.warn(
            f"every row of y of '{name}' has a single 1, and is taken as labels of which several "
            "may hold; if they are classes, one for each sample, give y.argmax(1).",
            stacklevel=6,
        )


def _note_few_whole(parts: Sequence[Tensor], name: str) -> None:
    """Say that numbers to predict that are 0.0, 1.0 and so on, a few of them, may be classes."""
    values = torch.cat([part.unique() for part in parts]).unique().tolist()
    count = len(values)
    if 2 <= count <= FEW_CLASSES and values == list(range(count)):
        warnings.warn(
            f"y of '{name}' has only the numbers 0.0 {'to' if count > 2 else 'and'} "
            f"{values[-1]}, and floats are numbers to predict (a regression); if they are classes, "
            f"give integers (y.astype(int)) or classes={count}, and if not, classes=None.",
            stacklevel=6,
        )


def note_only_tested(train: Tensor, test: Tensor, names: Sequence[str] | None, data: str) -> None:
    """Say that samples of some classes are in the test data alone, where nothing can learn them."""
    trained = set(_different(train).tolist()) | {IGNORED}
    tested = [label for label in _different(test).tolist() if label not in trained]
    if tested:
        listed = [f"'{names[label]}'" if names else str(label) for label in tested]
        more = ", ..." if len(listed) > FEW else ""
        warnings.warn(
            f"{len(tested)} of the classes of '{data}' ({', '.join(listed[:FEW])}{more}) "
            f"{'has' if len(tested) == 1 else 'have'} test samples, but none to train on; the "
            "network gets outputs for them that it cannot learn. Remove these test samples, or "
            "give classes=, the number of classes, if they are right.",
            stacklevel=5,
        )


def has_several(targets: Tensor) -> bool:
    """Whether a sample has more than one target."""
    return targets.dim() > 1 and targets[0].numel() > 1


def _check_tokens(targets: Tensor, classes: int, name: str) -> None:
    """Refuse classes of tokens or pixels that are none of so many."""
    outside = (targets != IGNORED) & ((targets < 0) | (targets >= classes))
    if outside.any():
        raise UserError(
            f"y of '{name}' has {int(targets[outside][0])}, but classes={classes} of tokens or "
            f"pixels are numbered from 0 to {classes - 1}; mark what does not count by {IGNORED}."
        )


def is_multi_label(targets: Tensor) -> bool:
    """Whether targets are N×L and say of each label whether it holds."""
    return targets.dim() == 2 and bool(((targets == 0) | (targets == 1)).all())


def as_labels(targets: Tensor, name: str) -> Tensor:
    """Labels as int64, one per sample, token or pixel."""
    if targets.dim() in (2, 4) and targets.shape[1] == 1:  # masks of pixels may have one channel
        targets = targets.squeeze(1)
    whole = targets.long()
    if targets.is_floating_point() and not torch.equal(whole.float(), targets):
        raise UserError(
            f"labels of '{name}' must be whole numbers; classes=None would be a regression."
        )
    return whole
