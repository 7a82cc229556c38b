"""Data sets with a given number of samples of each class, and what clients hold of them."""

from __future__ import annotations

import numpy as np
import torch

from fedhelix.data import Dataset, Split


def labelled(
    sizes: list[int], test_sizes: list[int] | None = None, shape: tuple[int, ...] = (1,)
) -> Dataset:
    """Data with so many samples of each class."""
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y_test = torch.arange(len(sizes)).repeat_interleave(torch.tensor(test_sizes or sizes))
    empty = torch.zeros(1, dtype=torch.uint8)
    return Dataset(
        "toy",
        empty.expand(len(y), *shape),
        y,
        empty.expand(len(y_test), *shape),
        y_test,
        classes=len(sizes),
    )


def held(split: Split) -> np.ndarray:
    return np.concatenate([split.train, split.valid])


def table(data: Dataset, splits: list[Split]) -> np.ndarray:
    """Clients × classes: how many training and validation samples."""
    return np.stack([np.bincount(data.y[held(split)], minlength=data.classes) for split in splits])


def in_tests(data: Dataset, splits: list[Split]) -> np.ndarray:
    return np.stack(
        [np.bincount(data.y_test[split.test], minlength=data.classes) for split in splits]
    )
