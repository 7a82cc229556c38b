"""Reads a user's samples: arrays, sequences of different lengths, several parts, data sets."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedhelix.core.errors import UserError
from fedhelix.core.metrics import IGNORED
from fedhelix.core.parts import MASK
from fedhelix.data.checks import check_finite
from fedhelix.data.fields import Parts, is_ragged, padded
from fedhelix.data.tensors import readable, without_tensors

Samples = Tensor | Parts
Pair = tuple[Samples, Tensor]
NO_TEXT = ("", "nan", "NaN")  # what empty cells and NaN among texts become in a text array
MOST_COLOURS = 4  # channels of an image whose last axis may have them
MOST = 0.9  # of all rows: those of another length are likely mistakes


def _is_pair(half: Any) -> bool:
    """Whether this is a tuple of samples and as many targets, more than two of them."""
    if not isinstance(half, tuple) or len(half) != 2:
        return False
    x, y = half
    return bool(getattr(x, "ndim", 0) and getattr(y, "ndim", 0)) and len(x) == len(y) > 2


def raw_pair(part: Any, where: str) -> tuple[Any, Any]:
    """Inputs and targets of a pair, or of all samples of a map-style data set."""
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if isinstance(part, tuple | list):
        if len(part) != 2:
            raise UserError(
                f"{where} has {len(part)} entries; a pair (x, y) or a torch Dataset is right."
            )
        if all(isinstance(half, Dataset | DataLoader) or _is_pair(half) for half in part):
            raise UserError(
                f"{where} is a pair of data sets; give the first ones of all clients as clients, "
                "and the second ones as test: from_clients(clients, test)."
            )
        return part[0], part[1]
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
        raise UserError(
            f"{where} is of type {type(part).__name__}; "
            "a pair (x, y) or a map-style torch Dataset is right."
        )
    if len(part) == 0:
        raise UserError(f"{where} is empty; at least one sample is needed.")
    samples = all_samples(part, where)
    try:
        inputs, targets = zip(*samples, strict=True)
    except (TypeError, ValueError) as problem:
        how = "with several inputs give from_arrays((a, b), y), or samples ((a, b), y)"
        raise UserError(f"{where} cannot be read as samples (x, y) ({problem}); {how}.") from None
    return collated(inputs), stacked(targets)


def all_samples(part: Any, where: str) -> list[Any]:
    """All samples of a map-style data set."""
    return [sample_of(part, index, where) for index in range(len(part))]


def sample_of(part: Any, index: int, where: str) -> Any:
    """One sample of a map-style data set, which may fail in any way."""
    try:
        return part[index]
    except Exception as problem:
        raise UserError(
            f"sample {index} of {where} cannot be read: {type(problem).__name__}: {problem}."
        ) from problem


def collated(samples: Sequence[Any]) -> Any:
    """Many samples of one form as one value of that form."""
    first = samples[0]
    if isinstance(first, Mapping):
        for number, sample in enumerate(samples):
            if sample.keys() != first.keys():
                raise UserError(
                    f"sample {number} has the parts {', '.join(sample)}, but the first "
                    f"{', '.join(first)}; give all samples the same ones."
                )
        return {name: stacked([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        return tuple(stacked(list(part)) for part in zip(*samples, strict=True))
    return stacked(samples)


def stacked(values: Sequence[Any]) -> Any:
    """One array of equal values; sequences of different lengths stay a list."""
    if lacks_text(values):
        return np.array(values, dtype=object)
    arrays = [as_array(value) for value in values]
    same = len({array.shape for array in arrays}) == 1
    return np.stack(arrays) if same else arrays or np.empty(0)


def read_pair(x: Any, y: Any, where: str) -> Pair:
    """Inputs and raw targets as tensors of equal length."""
    inputs, targets = read_inputs(x, f"x of {where}"), read_targets(y, f"y of {where}")
    single = targets.dim() == 0 or (isinstance(inputs, Tensor) and inputs.dim() == 0)
    if single or len(inputs) != len(targets):
        shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else f"{len(inputs)} samples"
        raise UserError(
            f"x and y of {where} must have one entry per sample, but their shapes are "
            f"{shape} and {tuple(targets.shape)}."
        )
    if len(targets) == 0:
        raise UserError(f"{where} is empty; at least one sample is needed.")
    if isinstance(inputs, Tensor):
        check_finite(where, "x", inputs)  # here, where samples have the user's numbers
    check_finite(where, "y", targets)
    return inputs, targets


def read_inputs(x: Any, where: str) -> Samples:
    """One tensor, or several parts; sequences of different lengths get a mask as a further part."""
    if isinstance(x, Parts):  # read already
        return x
    if isinstance(x, Mapping):
        return read_parts({str(name): part for name, part in x.items()}, True, where)
    if isinstance(x, tuple) and x and all(isinstance(part, np.ndarray | Tensor) for part in x):
        return read_parts({str(place): part for place, part in enumerate(x)}, False, where)
    if is_ragged(x):
        return read_parts({"0": x}, False, where)
    inputs = as_inputs(as_tensor(x, where))
    return inputs.float() if inputs.dtype == torch.bool else inputs


def read_parts(parts: Mapping[str, Any], named: bool, where: str) -> Parts:
    """The parts by name; with sequences to pad and without a mask, one is added."""
    tensors, mask, ragged = {}, None, set()
    for name, part in parts.items():
        inside = f"'{name}' of {where}" if named or len(parts) > 1 else where
        if is_ragged(part):
            check_shapes(part, inside, lengths_differ=True)
            _note_odd_length(part, inside)
            ragged.add(name)
            tensors[name], mask = padded([as_tensor(one, inside) for one in part], inside)
        else:
            tensors[name] = as_inputs(as_tensor(part, inside))
        values = tensors[name]
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise UserError(f"{inside} has values that are not finite.")
    _check_lengths(tensors, where)
    if mask is not None and not any("mask" in name for name in tensors):
        tensors[MASK if named else str(len(tensors))] = mask
    return Parts(tensors, named, frozenset(ragged))


def _check_lengths(parts: Mapping[str, Tensor], where: str) -> None:
    """Refuse parts that do not have one entry for each sample."""
    if not parts:
        raise UserError(f"{where} has no parts; give an array for each argument of the network.")
    sizes = {name: len(part) if part.dim() else None for name, part in parts.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        listed = ", ".join(f"'{name}' {size or 'none'}" for name, size in sizes.items())
        raise UserError(
            f"the parts of {where} have different numbers of samples ({listed}); give each of them "
            "one entry per sample."
        )


def _note_odd_length(rows: Sequence[Any], where: str) -> None:
    """Say which row of numbers is longer or shorter than most, as a mistake in a table would be."""
    lengths = [len(row) for row in rows]
    usual, count = Counter(lengths).most_common(1)[0]
    floats = np.ndim(rows[0]) == 1 and as_array(rows[0]).dtype.kind == "f"
    if floats and count > MOST * len(lengths):
        odd = next(number for number, length in enumerate(lengths) if length != usual)
        warnings.warn(
            f"sample {odd} of {where} has {lengths[odd]} values, and most have {usual}; sequences "
            "of different lengths are padded and come with a mask.",
            stacklevel=6,
        )


def read_targets(y: Any, where: str) -> Tensor:
    """Targets; those of sequences of different lengths are filled up with what does not count."""
    if not is_ragged(y):
        return as_tensor(y, where)
    sequences = [as_tensor(one, where) for one in y]
    if sequences[0].is_floating_point():
        raise UserError(f"{where} has different lengths; only classes of tokens may.")
    return padded([sequence.long() for sequence in sequences], where, IGNORED)[0]


def as_inputs(inputs: Tensor) -> Tensor:
    """Pixels with their channels first; up to four last ones are those of colours."""
    if inputs.dtype == torch.uint8 and inputs.dim() == 3:
        return inputs[:, None]
    if inputs.dtype != torch.uint8 or inputs.dim() != 4:
        return inputs
    _, first, _, last = inputs.shape
    are_last = 1 <= last <= MOST_COLOURS and first > max(3, last)
    return inputs.permute(0, 3, 1, 2).contiguous() if are_last else inputs


def label_array(y: Any) -> np.ndarray:
    """Labels as an array, in which missing ones among texts stay what they are."""
    return np.array(y, dtype=object) if lacks_text(y) else as_array(y)


def as_array(values: Any) -> np.ndarray:
    """What NumPy makes of values; masked ones are missing, and tensors, also in lists, lose their
    gradients.
    """
    values = without_tensors(values)
    if isinstance(values, np.ma.MaskedArray):
        masked = np.ma.getmaskarray(values)
        if not masked.any():
            return values.data
        array = values.data.astype(object)
        array[masked] = None
        return array
    if isinstance(values, list | tuple) and any(map(np.ma.is_masked, values)):
        return np.stack([as_array(value) for value in values])
    return np.asarray(values)


def lacks_text(values: Any) -> bool:
    """Whether this is a list of texts and missing values, which NumPy would turn into texts."""
    if not isinstance(values, list | tuple):
        return False
    return any(isinstance(value, str) for value in values) and any(map(is_missing, values))


def first_missing(array: np.ndarray) -> int | None:
    """The first sample without a value, of those that can lack one without being no number."""
    if array.dtype.kind not in ("O", "T", "U", "S") or not array.size or not array.ndim:
        return None
    if array.dtype.kind in "US":
        lacking = np.isin(array, np.array(NO_TEXT, dtype=array.dtype.kind))
    else:
        values = array.ravel()
        flat = [is_missing(one) or (isinstance(one, str) and one in NO_TEXT) for one in values]
        lacking = np.array(flat, dtype=bool).reshape(array.shape)
    return int(lacking.nonzero()[0][0]) if lacking.any() else None


def is_missing(value: Any) -> bool:
    """Whether a value stands for none: None, NaN, pandas' NA or NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def is_text(array: np.ndarray) -> bool:
    """Whether an array holds text."""
    if array.dtype.kind in "US":
        return True
    return array.dtype.kind in ("O", "T") and all(isinstance(value, str) for value in array.ravel())


def as_float32(values: Tensor, where: str) -> Tensor:
    """Values in single precision; refuses those that are too large for it."""
    single = values.float()
    if values.dtype == torch.float64 and (lost := single.isinf() & values.isfinite()).any():
        place = tuple(lost.nonzero()[0].tolist())
        raise UserError(
            f"{where} has {float(values[place]):g}{f' in sample {place[0]}' if place else ''}, "
            "which is too large for float32; scale the values."
        )
    return single


def check_shapes(samples: Any, where: str, lengths_differ: bool = False) -> None:
    """Refuse samples of different shapes, such as images of different sizes, and empty ones."""
    try:
        shapes = [np.shape(sample) for sample in samples]
    except ValueError:  # a sample that is no array itself
        return
    for number, shape in enumerate(shapes):
        if shape[:1] == (0,):
            raise UserError(f"sample {number} of {where} is empty; remove it with its target.")
        if shape[lengths_differ:] != shapes[0][lengths_differ:]:
            raise UserError(
                f"samples of {where} have different shapes, {shapes[0]} and in sample {number} "
                f"{shape}; give all of them one shape (resize images)."
            )


def _plain(objects: np.ndarray) -> np.ndarray:
    """Python objects that are all numbers as an array of numbers; others as they are."""
    numbers = all(isinstance(value, int | float | np.number | np.bool_) for value in objects.flat)
    return np.array(objects.tolist()) if numbers and first_missing(objects) is None else objects


def as_tensor(values: Any, where: str) -> Tensor:
    """Numbers as uint8, bool, int64 or float32; arrays of such a type are not copied."""
    if isinstance(values, Tensor) and values.layout is not torch.strided:
        raise UserError(f"{where} is a sparse tensor; its to_dense() makes one that can be read.")
    if isinstance(values, Dataset | DataLoader):
        raise UserError(
            f"{where} is a {type(values).__name__} of torch; give the inputs alone, as one array: "
            "torch.stack([x for x, _ in data])."
        )
    if not isinstance(values, Tensor):
        try:
            array = as_array(values)
        except ValueError as problem:
            check_shapes(values, where)
            raise UserError(f"{where} is no array: {str(problem).rstrip('.')}.") from None
        if array.dtype == object and array.ndim == 0:
            how = "; its toarray() makes one" if hasattr(values, "toarray") else ""
            raise UserError(f"{where} must be an array, not {type(values).__name__}{how}.")
        if array.dtype == object:  # numbers of several types, such as floats and bools
            array = _plain(array)
        if array.dtype.kind not in "biuf":
            if not is_text(array) and (missing := first_missing(array)) is not None:
                raise UserError(
                    f"{where} has a missing value in sample {missing}; fill missing values in, or "
                    "remove their samples."
                )
            kind = "text" if is_text(array) else array.dtype
            raise UserError(f"{where} must be numbers, not {kind}.")
        if array.dtype.kind == "u" and array.dtype != np.uint8:
            array = array.astype(np.int64)  # torch knows few unsigned types
        if array.dtype.kind == "f" and array.dtype.itemsize > 8:
            array = array.astype(np.float64)  # torch knows no longer ones
        values = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    if values.is_floating_point():
        return as_float32(readable(values), where)
    values = values.cpu()
    return values if values.dtype in (torch.uint8, torch.bool) else values.long()
