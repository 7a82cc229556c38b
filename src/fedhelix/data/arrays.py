"""Your own arrays, tensors or torch data sets as a `Dataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.metrics import IGNORED
from fedhelix.core.options import checks_arguments
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.cells import check_columns
from fedhelix.data.checks import describe, describe_targets
from fedhelix.data.class_names import common_class_names
from fedhelix.data.columns import (
    feature_names,
    has_splits,
    in_order_of,
    input_names,
    pair_of,
    train_and_test,
)
from fedhelix.data.datasets import Dataset, channel_values, with_class_names
from fedhelix.data.fields import Fields, Parts, as_parts, cat_padded, joined, width
from fedhelix.data.labels import coded
from fedhelix.data.owners import read_owners
from fedhelix.data.readers import NPZ_ERRORS
from fedhelix.data.reading import Pair, Samples, read_pair
from fedhelix.data.sampling import stratified
from fedhelix.data.targets import (
    Classes,
    as_targets,
    check_classes,
    count_classes,
    note_only_tested,
    note_unused,
)

HELD_OUT = 0.2
"""The share of samples that becomes the test pool when the user gives none."""


@checks_arguments
def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    classes: Classes = "auto",
    name: str = "data",
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    owners: Any = None,
    owners_test: Any = None,
    seed: int = 0,
) -> Dataset:
    """A data set from tensors, NumPy arrays or anything that NumPy can read.

    * uint8 means pixels: N×H×W becomes N×1×H×W, and N×H×W×C (C up to 4) becomes N×C×H×W. Floats
      become float32 and keep their shape, so give float images as N×C×H×W. Other integers become
      int64 and reach the network as they are (tokens); give a table of whole numbers as floats.
    * A dict or tuple of arrays is several parts of each sample: the network's keyword or positional
      arguments. A list of sequences of different lengths is padded, and the network also gets a
      mask.
    * `classes="auto"`: one integer or text label per sample is a classification, float targets a
      regression; several labels of 0 and 1 (N×L) are labels of which several may hold, other
      integers (N×T, N×H×W) the classes of tokens or pixels. A number of classes (then zeros and
      ones are classes of tokens, too) or None (regression) decides otherwise. Integer labels are
      kept as they are, so number them from 0.
    * `owners` says for each sample whose it is; a federation then takes its clients from there.
      With `owners_test`, clients are tested on their own samples of the test pool; else each is on
      a part of it that has the class proportions of its training samples.
    * Without a test pool 20 % of the samples, class by class, are held out as one; with owners
      20 % of each owner's, who are tested on these. An owner with a single sample trains on it.
    """
    if (x_test is None) != (y_test is None):
        raise UserError(f"'{name}' has only one of x_test and y_test; give both or none.")
    pairs, called = [(x, y), (x_test, y_test)], [f"'{name}'", f"the test part of '{name}'"]
    check_columns(dict(zip(called, (x, x_test), strict=True)))
    (y, y_test), labels = coded(pairs, called)
    inputs, targets = read_pair(x, y, f"'{name}'")
    whose, whose_test = None, None
    if owners is not None:
        whose = read_owners(owners, f"'{name}'", len(inputs))
    if owners_test is not None and (owners is None or x_test is None):
        raise UserError(f"owners_test of '{name}' needs owners, x_test and y_test.")
    if x_test is not None:
        test_inputs, test_targets = read_pair(x_test, y_test, f"the test part of '{name}'")
        if owners_test is not None:
            whose_test = read_owners(owners_test, f"the test part of '{name}'", len(test_inputs))
            if whose is not None and whose.dtype.kind != whose_test.dtype.kind:
                whose, whose_test = whose.astype(str), whose_test.astype(str)
    else:
        check_classes([targets], classes, [f"y of '{name}'"], name)
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
    return assembled(
        name, (inputs, targets), (test_inputs, test_targets), classes, mean, std,
        owners=whose, owners_test=whose_test, labels=labels, columns=feature_names(x),
    )  # fmt: skip


def assembled(
    name: str,
    train: Pair,
    test: Pair,
    classes: Classes,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
    **more: Any,
) -> Dataset:
    """A data set of samples that were read: parts are packed, targets get their type."""
    (x, y), (x_test, y_test) = train, test
    called = [f"the training part of '{name}'", f"the test part of '{name}'"]
    if y.dim() == y_test.dim() and y.shape[1:] != y_test.shape[1:]:
        y, y_test = pool_targets([train, test], called).split([len(y), len(y_test)])
    count = count_classes(classes, y, y_test)
    y, y_test = as_targets([y, y_test], classes, count, name, more["labels"] is not None)
    if classes == "auto" and y.dtype == torch.int64 and not _are_tokens(y, x):
        note_unused([y, y_test], name)
        note_only_tested(y, y_test, more["labels"], name)
    fields = None
    if isinstance(x, Parts) or isinstance(x_test, Parts):
        both = joined([x, x_test], called)
        fields, size = Fields.of(both), len(x)
        x, x_test = fields.pack(both[:size]), fields.pack(both[size:])
    scale = channel_values("mean", mean), channel_values("std", std)
    more["token_classes"] = classes if isinstance(classes, int) and count is None else None
    return Dataset(name, x, y, x_test, y_test, count, *scale, fields=fields, **more)


def _are_tokens(targets: Tensor, x: Samples) -> bool:
    """Whether targets are tokens of a vocabulary, as those of a language model, and no tags."""
    ids = [part for part in as_parts(x).tensors.values() if part.dtype == torch.int64]
    return targets.dim() == 2 and any(bool(part.max() <= targets.max()) for part in ids)


@checks_arguments
def from_npz(path: str | Path) -> Dataset:
    """A data set from one npz file with x and y, and optionally x_test, y_test, owners, owners_test
    and classes, their number.

    The arrays mean what they mean in `from_arrays`.
    """
    arrays: dict[str, Any] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                arrays[key] = file[key]
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'.") from None
    except NPZ_ERRORS as problem:
        if "Object arrays" in str(problem):
            raise UserError(
                f"{key} of '{path}' is an array of Python objects; remove samples with missing "
                "values, and save numbers as floats and text as np.array(list(values), dtype=str); "
                "sequences of different lengths go through from_arrays in Python."
            ) from None
        if "pickled" in str(problem):  # NumPy's guess about any other file
            problem = UserError("it is none; np.savez('FILE.npz', x=x, y=y) writes one")
        raise UserError(f"'{path}' cannot be read as an npz file: {problem}.") from None
    renamed = {key.removesuffix("_train"): value for key, value in arrays.items()}
    possible = {"x", "y", "x_test", "y_test", "owners", "owners_test", "classes"}
    unknown_keys = sorted(set(renamed) - possible)
    if unknown_keys or not {"x", "y"} <= set(renamed):
        raise UserError(
            f"'{path}' must hold x and y, and may hold x_test, y_test, owners, owners_test and "
            f"classes; it has {sorted(arrays)}."
        )
    if (classes := renamed.get("classes")) is not None:
        if classes.size != 1 or classes.dtype.kind not in "iu":
            raise UserError(f"classes of '{path}' must be one whole number, how many there are.")
        renamed["classes"] = classes.item()
    return from_arrays(**renamed, name=Path(path).stem)


@checks_arguments
def from_clients(
    clients: Sequence[Any] | Mapping[Any, Any],
    test: Any = None,
    classes: Classes = "auto",
    name: str = "data",
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set from data that already belong to clients; the `natural` partition keeps them so.

    `clients` has for each client a pair (x, y), a table, or a map-style torch Dataset of samples
    (x, y); they are read as in `from_arrays`. A dictionary also gives the clients names. `test` is
    one such part for a common test pool, or a list or dictionary with one for each client (None for
    one that is not evaluated). Without any, 20 % of every client's samples are held out as its test
    part (a client with a single sample keeps it for training). The server's model is tested on a
    whole common pool, each client on a part of it that has the class proportions of its training
    samples.
    A `DatasetDict` with train and test, as `train_test_split` makes it, is a client with its own
    test part, and so is what `from_table` or `from_arrays` returns.
    """
    names = list(clients) if isinstance(clients, Mapping) else range(len(clients))
    called = [f"client {one} of '{name}'" for one in names]
    parts = list(clients.values() if isinstance(clients, Mapping) else clients)
    first = next(iter(parts), None)
    if test is None and any(has_splits(part) or isinstance(part, Dataset) for part in parts):
        parts, test = train_and_test(parts, called)
    raw = [pair_of(part, whose) for part, whose in zip(parts, called, strict=True)]
    if not raw:
        raise UserError(f"'{name}' has no clients; give at least one pair (x, y).")
    test = in_order_of(names, test, name)
    raw_tests = raw_test_parts(test, len(raw), name)
    whose_test = list(raw_tests or range(len(raw)))
    tested = [f"test part {index} of '{name}'" for index in whose_test]
    everybody = [*zip(called, raw, strict=True), *zip(tested, raw_tests.values(), strict=False)]
    check_columns({whose: x for whose, (x, _) in everybody})
    kinds, classes = common_class_names(parts, classes, name)
    targets, labels = coded([pair for _, pair in everybody], [whose for whose, _ in everybody])
    read = [read_pair(x, y, whose) for (whose, (x, _)), y in zip(everybody, targets, strict=True)]
    check_classes([y for _, y in read], classes, [f"y of {whose}" for whose, _ in everybody], name)
    train, tests = read[: len(raw)], read[len(raw) :]
    if test is None:
        train, tests = hold_out_each(train, classes, seed)
        if not any(len(y) for _, y in tests):
            raise UserError(
                f"each client of '{name}' has a single sample, and none is left to test with; "
                "give two."
            )
    x, y, owners = pool(train, called)
    x_test, y_test, parts_test = pool(tests, tested)
    owners_test = np.array(whose_test)[parts_test]
    if isinstance(clients, Mapping):
        named = read_owners(list(names), f"the clients of '{name}'")
        if len(np.unique(named)) < len(named):
            raise UserError(f"two clients of '{name}' have one name; give each its own.")
        owners, owners_test = named[owners], named[owners_test]
    has_common_test = test is not None and not isinstance(test, list)
    data = assembled(
        name, (x, y), (x_test, y_test), classes, mean, std, owners=owners,
        owners_test=None if has_common_test else owners_test, labels=labels,
        columns=input_names(first if isinstance(first, Dataset) else parts[0], called[0])
        or feature_names(raw[0][0]),
    )  # fmt: skip
    return with_class_names(data, kinds)


def raw_test_parts(test: Any, clients: int, name: str) -> dict[int, tuple[Any, Any]]:
    """The test parts that the user gave, by their places: a list with one per client, which is None
    for a client without one, or one common part.
    """
    if test is None:
        return {}
    if not isinstance(test, list):
        return {0: pair_of(test, f"the test part of '{name}'")}
    if len(test) != clients:
        raise UserError(
            f"'{name}' has {clients} clients, but test has {len(test)} parts; give one for each."
        )
    parts = {index: part for index, part in enumerate(test) if part is not None}
    if not parts:
        raise UserError(
            f"no client of '{name}' has a test part; give one to some, or leave test out."
        )
    return {index: pair_of(part, f"test part {index} of '{name}'") for index, part in parts.items()}


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


def pool(parts: list[Pair], called: Sequence[str]) -> tuple[Samples, Tensor, np.ndarray]:
    """All parts as one, with the number of the part that each sample came from."""
    first_x = parts[0][0]
    owners = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    if any(isinstance(x, Parts) for x, _ in parts):
        return joined([x for x, _ in parts], called), pool_targets(parts, called), owners
    for index, (x, _) in enumerate(parts):
        assert isinstance(x, Tensor) and isinstance(first_x, Tensor)
        if x.shape[1:] != first_x.shape[1:] or x.dtype != first_x.dtype:
            raise UserError(
                f"{called[index]} has samples of {describe(x)}, the first of {describe(first_x)}; "
                "give all of them the same columns or shape, and one type."
            )
    inputs = torch.cat([x for x, _ in parts if isinstance(x, Tensor)])
    return inputs, pool_targets(parts, called), owners


def pool_targets(parts: Sequence[Pair], called: Sequence[str]) -> Tensor:
    """All targets as one; classes of tokens are filled up with what does not count."""
    first = parts[0][1]
    are_classes = all(y.dim() == 2 and not y.is_floating_point() for _, y in parts)
    of_tokens = are_classes and len({y.shape[1] - (width(x) or 0) for x, y in parts}) == 1
    for (_, y), whose in zip(parts, called, strict=True):
        same = y.shape[1:] == first.shape[1:] or of_tokens
        if not same or y.is_floating_point() != first.is_floating_point():
            raise UserError(
                f"{whose} has targets of shape {describe_targets(y)}, the first of "
                f"{describe_targets(first)}; give all of them one shape and one type."
            )
    return cat_padded([y for _, y in parts], IGNORED)
