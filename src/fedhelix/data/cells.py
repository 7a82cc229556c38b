"""Checks of tables: the same columns everywhere, and a finite value in every cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.data.reading import first_missing

LARGEST = float(np.finfo(np.float32).max)


def check_columns(frames: Mapping[str, Any]) -> None:
    """Refuse data frames of one data set whose columns differ in name or order, and empty cells."""
    named = {what: list(x.columns) for what, x in frames.items() if hasattr(x, "columns")}
    whose, first = next(iter(named.items()), ("", []))
    for what, columns in named.items():
        if columns != first:
            raise UserError(
                f"{what} has the columns {', '.join(map(str, columns))}, but {whose} "
                f"{', '.join(map(str, first))}; give all of them the same ones in the same order."
            )
        for column, values in zip(columns, np.asarray(frames[what]).T, strict=True):
            check_cells(column, values, what)


def check_cells(column: str, values: Any, where: str) -> None:
    """Refuse a column of a table with a missing value or one that is not finite, and name the
    first row with one.
    """
    if not isinstance(values, np.ndarray):  # sequences of different lengths
        return
    row, said, how = first_missing(values), "a missing value", "fill it in, or remove the row"
    if row is None and values.dtype.kind == "f":
        wrong = np.argwhere(~(np.abs(values) <= LARGEST))
        if len(wrong) and not np.isnan(value := values[tuple(wrong[0])]):
            said, how = f"{value:g}", "every value must be finite and fit into float32"
        row = int(wrong[0][0]) if len(wrong) else None
    if row is not None:
        raise UserError(
            f"column '{column}' of {where} has {said} in row {row} (counted from 0); {how}."
        )
