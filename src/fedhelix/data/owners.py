"""Whose each sample is: names that are text or whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.data.reading import first_missing, label_array

Names = tuple[str, ...] | tuple[int, ...]
LONGEST = 18  # digits of a whole number that fits into 64 bits


def read_owners(values: Any, where: str, samples: int | None = None) -> np.ndarray:
    """The owner of each sample: an array of whole numbers where all names are such, else of texts;
    refuses samples without one.
    """
    array = label_array(values)
    missing = first_missing(array)
    if array.dtype.kind == "f" and np.isnan(array).any():
        missing = int(np.isnan(array).argmax())
    if missing is not None:
        raise UserError(
            f"sample {missing} of {where} has no owner; remove samples without one, or say whose "
            "they are."
        )
    if array.dtype == object:
        array = np.array(array.tolist())
    if array.ndim != 1:
        raise UserError(
            f"the owners of {where} must be one name for each sample, not of shape {array.shape}."
        )
    if samples is not None and len(array) != samples:
        raise UserError(
            f"{where} has {len(array)} owners for {samples} samples; give one for each."
        )
    if array.dtype.kind == "f" and np.array_equal(array, np.rint(array)):
        array = array.astype(np.int64)  # whole numbers that were in a column with missing ones
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    texts = array.astype(str)
    different = np.unique(texts).tolist()
    if all(one.isdecimal() and len(one) <= LONGEST and str(int(one)) == one for one in different):
        return texts.astype(np.int64)
    return texts
