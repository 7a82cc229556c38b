"""The scale of the inputs: columns of a table that differ widely are noticed, and standardised."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.options import Checked, option
from fedhelix.data.datasets import Dataset

USUAL = 2.0  # a mean or standard deviation of targets up to it needs no scaling
LARGE = 20.0  # a mean or standard deviation above it makes steps of usual learning rates too long


@dataclass(frozen=True)
class Scaling(Checked):
    """Whether inputs are standardised."""

    standardize: bool = option(
        False,
        "give every column of a table (or channel of images) mean 0 and standard deviation 1, by "
        "all samples but those of the test pool",
    )


def scaled(data: Dataset, standardize: bool) -> Dataset:
    """The data with standardised inputs; without `standardize` as they are, with a warning where
    columns of a table or channels of images are large.
    """
    if not standardize:
        if large := large_inputs(data, data.name):
            how = "standardize=True, or --standardize, scales them"
            warnings.warn(f"{large}; {how}.", stacklevel=2)
        return data
    if data.fields is not None:
        raise UserError(
            f"standardize scales samples of one part, and those of '{data.name}' have several; "
            "scale these beforehand."
        )
    if data.x.dtype == torch.int64:
        raise UserError(f"standardize scales numbers, but the inputs of '{data.name}' are tokens.")
    if data.mean is not None:
        raise UserError(
            f"'{data.name}' has a mean and std of its own already; leave out standardize."
        )
    std, mean = _moments(data.x)
    std = torch.where(std > 0, std, torch.ones_like(std))  # a constant column becomes zero
    return replace(data, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def targets_advice(data: Dataset) -> str:
    """How to scale the targets of a regression, where they are far from standard scores."""
    if data.classes is not None or not data.y.is_floating_point():
        return ""
    std, mean = torch.std_mean(data.y.double(), correction=0)
    if max(float(std), abs(float(mean))) <= USUAL:
        return ""
    return f"scale the targets (mean {float(mean):.3g} and standard deviation {float(std):.3g})"


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean of each column or channel; pixels on the scale from 0 to 1."""
    values = x.double() / (255 if x.dtype == torch.uint8 else 1)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return torch.std_mean(values, dim=axes, correction=0)


def large_inputs(data: Dataset, name: str) -> str:
    """What is said of a table whose columns are large, or of such images; nothing of other data."""
    what = {2: "column", 4: "channel"}.get(data.x.dim())
    if what is None or not data.x.is_floating_point() or data.mean is not None:
        return ""
    std, mean = _moments(data.x)
    largest = int(torch.maximum(std, mean.abs()).argmax())
    if max(float(std[largest]), abs(float(mean[largest]))) <= LARGE:
        return ""
    return (
        f"the inputs of '{name}' are not scaled ({what} {largest} has mean "
        f"{float(mean[largest]):.3g} and standard deviation {float(std[largest]):.3g}), so "
        "training may diverge"
    )
