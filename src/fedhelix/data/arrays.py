"""Your own arrays, tensors or torch data sets as a `Dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedhelix.core.errors import UserError
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.checks import check_finite, describe
from fedhelix.data.datasets import Dataset
from fedhelix.data.readers import NPZ_ERRORS
from fedhelix.data.sampling import stratified

Classes = int | Literal["auto"] | None
Pair = tuple[Tensor, Tensor]
HELD_OUT = 0.2
"""The share of samples that becomes the test pool when the user gives none."""


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    classes: Classes = "auto",
    name: str = "data",
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    owners: Any = None,
    seed: int = 0,
) -> Dataset:
    """A data set from tensors, NumPy arrays or anything that NumPy can read.

    * uint8 means pixels: N×H×W becomes N×1×H×W, and N×H×W×C (C is 1 or 3) becomes N×C×H×W. Floats
      become float32 and keep their shape. Other integers become int64 and reach the network as they
      are (tokens); give a table of whole numbers as floats.
    * `classes="auto"`: integer labels are a classification with as many classes as the largest
      label says, float labels a regression. A number or None (regression) decides otherwise.
    * `owners` says for each sample whose it is; a federation then takes its clients from there.
    * Without a test pool 20 % of the samples, class by class, are held out as one; with owners
      20 % of each owner's, who are tested on these. An owner with a single sample trains on it.
    """
    if (x_test is None) != (y_test is None):
        raise UserError(f"'{name}' has only one of x_test and y_test; give both or none.")
    inputs, targets = read_pair(x, y, f"'{name}'")
    whose = None if owners is None else np.asarray(owners)
    if whose is not None and len(whose) != len(inputs):
        raise UserError(
            f"'{name}' has {len(whose)} owners for {len(inputs)} samples; give one for each."
        )
    whose_test = None
    if x_test is not None:
        test_inputs, test_targets = read_pair(x_test, y_test, f"the test part of '{name}'")
    else:
        held = _held_out_pool(targets, classes, whose, seed)
        if not held.any():
            few = "of each class" if whose is None else "of each owner"
            raise UserError(
                f"'{name}' has too few samples {few} for a test pool; give x_test and y_test."
            )
        test_inputs, test_targets = inputs[held], targets[held]
        inputs, targets = inputs[~held], targets[~held]
        if whose is not None:
            whose, whose_test = whose[~held], whose[held]
    count = count_classes(classes, targets, test_targets)
    targets, test_targets = (as_targets(part, count, name) for part in (targets, test_targets))
    return Dataset(
        name, inputs, targets, test_inputs, test_targets, count, mean, std, whose, whose_test
    )


def from_npz(path: str | Path) -> Dataset:
    """A data set from one npz file with x and y, and optionally x_test, y_test and owners.

    The arrays mean what they mean in `from_arrays`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'.") from None
    except NPZ_ERRORS as problem:
        raise UserError(f"'{path}' cannot be read as an npz file: {problem}.") from None
    renamed = {key.removesuffix("_train"): value for key, value in arrays.items()}
    unknown_keys = sorted(set(renamed) - {"x", "y", "x_test", "y_test", "owners"})
    if unknown_keys or not {"x", "y"} <= set(renamed):
        raise UserError(
            f"'{path}' must hold x and y, and may hold x_test, y_test and owners; "
            f"it has {sorted(arrays)}."
        )
    return from_arrays(**renamed, name=Path(path).stem)


def from_clients(
    clients: Sequence[Any],
    test: Any = None,
    classes: Classes = "auto",
    name: str = "data",
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set from data that already belong to clients; the `natural` partition keeps them so.

    `clients` has for each client a pair (x, y) or a map-style torch Dataset of such samples; arrays
    are read as in `from_arrays`. `test` is one pair or Dataset for a common test pool, or a list
    with one for each client; None holds out 20 % of every client's samples as its test part (a
    client with a single sample keeps it for training).
    """
    parts = [read_part(part, f"client {index} of '{name}'") for index, part in enumerate(clients)]
    if not parts:
        raise UserError(f"'{name}' has no clients; give at least one pair (x, y).")
    if test is None:
        train, tests = hold_out_each(parts, classes, seed)
        if not any(len(y) for _, y in tests):
            raise UserError(
                f"each client of '{name}' has a single sample, and none is left to test with; "
                "give two."
            )
    else:
        train, tests = parts, read_tests(test, len(parts), name)
    x, y, owners = pool(train, f"client {{}} of '{name}'")
    x_test, y_test, owners_test = pool(tests, f"test part {{}} of '{name}'")
    has_common_test = test is not None and not isinstance(test, list)
    count = count_classes(classes, y, y_test)
    y, y_test = (as_targets(part, count, name) for part in (y, y_test))
    return Dataset(
        name, x, y, x_test, y_test, count, mean, std, owners,
        None if has_common_test else owners_test,
    )  # fmt: skip


def read_tests(test: Any, clients: int, name: str) -> list[Pair]:
    """The test parts that the user gave: a list with one per client, or one common part."""
    if not isinstance(test, list):
        return [read_part(test, f"the test part of '{name}'")]
    if len(test) != clients:
        raise UserError(
            f"'{name}' has {clients} clients, but test has {len(test)} parts; give one for each."
        )
    return [read_part(part, f"test part {index} of '{name}'") for index, part in enumerate(test)]


def read_part(part: Any, where: str) -> Pair:
    """One client's samples from a pair or a map-style data set."""
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if isinstance(part, tuple | list):
        if len(part) != 2:
            raise UserError(
                f"{where} has {len(part)} entries; a pair (x, y) or a torch Dataset is right."
            )
        return read_pair(part[0], part[1], where)
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
        raise UserError(
            f"{where} is a {type(part).__name__}; "
            "a pair (x, y) or a map-style torch Dataset is right."
        )
    if len(part) == 0:
        raise UserError(f"{where} is empty; at least one sample is needed.")
    try:
        inputs, targets = zip(*(part[index] for index in range(len(part))), strict=True)
        x, y = (np.stack([np.asarray(one) for one in values]) for values in (inputs, targets))
    except (TypeError, ValueError) as problem:
        raise UserError(
            f"{where} cannot be read as samples (x, y) of one shape: {problem}."
        ) from None
    return read_pair(x, y, where)


def read_pair(x: Any, y: Any, where: str) -> Pair:
    """Inputs and raw targets as tensors of equal length."""
    inputs, targets = as_tensor(x, f"x of {where}"), as_tensor(y, f"y of {where}")
    if inputs.dtype == torch.uint8 and inputs.dim() == 3:
        inputs = inputs[:, None]
    elif (
        inputs.dtype == torch.uint8
        and inputs.dim() == 4
        and inputs.shape[3] in (1, 3)
        and inputs.shape[1] > 3
    ):
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    if inputs.dtype == torch.bool:
        inputs = inputs.float()
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets):
        raise UserError(
            f"x and y of {where} must have one entry per sample, but their shapes are "
            f"{tuple(inputs.shape)} and {tuple(targets.shape)}."
        )
    if len(inputs) == 0:
        raise UserError(f"{where} is empty; at least one sample is needed.")
    for kind, values in (("x", inputs), ("y", targets)):
        check_finite(where, kind, values)  # here, where samples have the user's numbers
    return inputs, targets


def as_tensor(values: Any, where: str) -> Tensor:
    """Numbers as uint8, bool, int64 or float32; arrays of such a type are not copied."""
    if not isinstance(values, Tensor):
        try:
            array = np.asarray(values)
        except ValueError as problem:
            raise UserError(f"{where} is no array: {problem}.") from None
        if array.dtype.kind not in "biuf":
            raise UserError(f"{where} must be numbers, not {array.dtype}.")
        if array.dtype.kind == "u" and array.dtype != np.uint8:
            array = array.astype(np.int64)  # torch knows few unsigned types
        values = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    if values.is_floating_point():
        return values.detach().float()
    return values if values.dtype in (torch.uint8, torch.bool) else values.long()


def count_classes(classes: Classes, targets: Tensor, test_targets: Tensor) -> int | None:
    """The number of classes that the user gave or that the labels show; None for a regression."""
    if classes is None:
        return None
    if classes != "auto":
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
            raise UserError(
                f"classes must be 'auto', None or a whole number above 0, not {classes!r}."
            )
        return classes
    if targets.is_floating_point():
        return None
    largest = max(int(targets.max()), int(test_targets.max()), 0)
    samples = len(targets) + len(test_targets)
    if largest > 1000 + samples:
        raise UserError(
            f"labels go up to {largest}, but there are only {samples} samples; "
            "number classes from 0."
        )
    return 1 + largest


def as_targets(targets: Tensor, classes: int | None, name: str) -> Tensor:
    """Labels as one int64 vector, or targets as float32."""
    if classes is None:
        return targets.float()
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    whole = targets.long()
    if targets.is_floating_point() and not torch.equal(whole.float(), targets):
        raise UserError(
            f"labels of '{name}' must be whole numbers; classes=None would be a regression."
        )
    return whole


def held_out(targets: Tensor, classes: Classes, draw: np.random.Generator) -> np.ndarray:
    """A mask of the test samples: a share of each class, but never a whole class."""
    codes = np.zeros(len(targets), dtype=np.int64)
    if classes is not None and not targets.is_floating_point() and targets.numel() == len(targets):
        codes = np.unique(targets.cpu().numpy().ravel(), return_inverse=True)[1]
    mask = np.zeros(len(targets), dtype=bool)
    mask[stratified(codes, round(HELD_OUT * len(targets)), draw, leave_one=True)] = True
    return mask


def _held_out_pool(
    targets: Tensor, classes: Classes, owners: np.ndarray | None, seed: int
) -> np.ndarray:
    """A mask of the test samples: a share of all, or of each owner's."""
    if owners is None:
        return held_out(targets, classes, numpy_draw(seed, "hold-out"))
    mask = np.zeros(len(targets), dtype=bool)
    for number, owner in enumerate(np.unique(owners)):
        mine = np.flatnonzero(owners == owner)
        mask[mine] = _held_out_of_one(targets[mine], classes, seed, number)
    return mask


def _held_out_of_one(targets: Tensor, classes: Classes, seed: int, number: int) -> np.ndarray:
    """A mask of one owner's test samples: at least one, unless it has only one sample."""
    held = held_out(targets, classes, numpy_draw(seed, "hold-out", number))
    if not held.any() and len(targets) > 1:
        held[-1] = True
    return held


def hold_out_each(parts: list[Pair], classes: Classes, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Every client's samples cut into training and test samples."""
    train, test = [], []
    for index, (x, y) in enumerate(parts):
        held = _held_out_of_one(y, classes, seed, index)
        train.append((x[~held], y[~held]))
        test.append((x[held], y[held]))
    return train, test


def pool(parts: list[Pair], where: str) -> tuple[Tensor, Tensor, np.ndarray]:
    """All parts as one, with the number of the part that each sample came from."""
    first_x, first_y = parts[0]
    for index, (x, y) in enumerate(parts):
        if x.shape[1:] != first_x.shape[1:] or x.dtype != first_x.dtype:
            raise UserError(
                f"{where.format(index)} has samples of {describe(x)}, "
                f"the first of {describe(first_x)}."
            )
        if y.shape[1:] != first_y.shape[1:] or y.is_floating_point() != first_y.is_floating_point():
            raise UserError(
                f"{where.format(index)} has targets of {describe(y)}, "
                f"the first of {describe(first_y)}."
            )
    owners = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), owners
