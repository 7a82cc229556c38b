"""Checks of a pool of samples: types, shapes, labels and finite values, each with a clear error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.errors import UserError


class Pool(NamedTuple):
    """Samples and their targets, with the names that error messages call them by."""

    data_name: str
    x_name: str
    x: Tensor
    y_name: str
    y: Tensor
    owners: np.ndarray | None


def check_pool(pool: Pool, classes: int | None) -> None:
    """Refuse a pool that cannot be trained or tested on."""
    _check_inputs(pool)
    if classes is None:
        _check_regression(pool)
    else:
        _check_labels(pool, classes)


def describe(x: Tensor) -> str:
    """Shape and type of one sample, for people."""
    return describe_kind(x.shape[1:], x.dtype)


def describe_kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A shape and a type, for people; a plain number and a vector of one are not the same."""
    return f"{'×'.join(map(str, shape)) or 'number'} {str(dtype).removeprefix('torch.')}"


def describe_targets(y: Tensor) -> str:
    """Shape and type of all targets, for people; N and N×1 are not the same."""
    return f"{'×'.join(['N', *map(str, y.shape[1:])])} ({str(y.dtype).removeprefix('torch.')})"


def _check_inputs(pool: Pool) -> None:
    data_name, x_name, x, y_name, y, owners = pool
    for name, value in ((x_name, x), (y_name, y)):
        if not isinstance(value, Tensor):
            raise UserError(
                f"{name} of '{data_name}' must be a tensor, not {type(value).__name__}."
            )
    if x.dtype not in (torch.uint8, torch.float32, torch.int64):
        raise UserError(
            f"{x_name} of '{data_name}' must be uint8, float32 or int64, not {x.dtype}."
        )
    if x.dim() < 2:
        raise UserError(
            f"{x_name} of '{data_name}' must be N×D or N×C×H×W, not of shape {tuple(x.shape)}."
        )
    if len(x) == 0:
        raise UserError(f"{x_name} of '{data_name}' is empty; at least one sample is needed.")
    if y.dim() == 0 or len(x) != len(y):
        raise UserError(
            f"{x_name} of '{data_name}' has {len(x)} samples, but {y_name} has {y.numel()} labels."
        )
    if owners is not None and len(owners) != len(x):
        raise UserError(
            f"{x_name} of '{data_name}' has {len(x)} samples, but there are {len(owners)} owners."
        )
    check_finite(f"'{data_name}'", x_name, x)


def _check_regression(pool: Pool) -> None:
    if pool.y.dtype not in (torch.float32, torch.bool, torch.int64) or (
        pool.y.dtype != torch.float32 and pool.y.dim() < 2
    ):
        raise UserError(
            f"{pool.y_name} of '{pool.data_name}' must be float32 for a regression, "
            f"not {pool.y.dtype}."
        )
    check_finite(f"'{pool.data_name}'", pool.y_name, pool.y)


def _check_labels(pool: Pool, classes: int) -> None:
    y = pool.y
    if y.dtype != torch.int64 or y.dim() != 1:
        raise UserError(
            f"{pool.y_name} of '{pool.data_name}' must be one int64 label per sample, "
            f"not {y.dtype} of {tuple(y.shape)}."
        )
    check_labels(y, classes, f"{pool.y_name} of '{pool.data_name}'")


def check_labels(y: Tensor, classes: int, where: str) -> None:
    """Refuse labels that are none of so many classes, and name the first sample with one."""
    outside = ((y < 0) | (y >= classes)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise UserError(
            f"{where} has labels outside the classes: "
            f"{int(y[first])} at index {first}, where 0 to {classes - 1} would be right."
            + (
                " Number classes from 0, give their names as text, or give classes=None if these "
                "are numbers to predict."
                if y[first] < 0
                else ""
            )
        )


def check_finite(where: str, name: str, values: Tensor) -> None:
    """Refuse values that are no numbers, and name the first sample with one."""
    if not values.is_floating_point():
        return
    finite = values.isfinite()
    if not bool(finite.all()):
        place = (~finite).nonzero()[0].tolist()
        raise UserError(
            f"{name} of {where} has {float(values[tuple(place)])} in sample {place[0]}; "
            "every value must be finite."
        )
