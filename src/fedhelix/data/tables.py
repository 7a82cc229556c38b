"""Tables with named columns: pandas data frames and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError, unknown
from fedhelix.data.arrays import Classes, from_arrays
from fedhelix.data.datasets import Dataset
from fedhelix.data.fields import is_ragged
from fedhelix.data.reading import is_text, stacked

TARGETS = ("label", "labels", "target", "y")  # columns that are the target unless one is named


def is_table(data: Any) -> bool:
    """Whether data have named columns."""
    return hasattr(data, "columns") or hasattr(data, "column_names")


def from_table(
    table: Any,
    target: str | None = None,
    owner: str | None = None,
    inputs: Sequence[str] | None = None,
    *,
    test: Any = None,
    classes: Classes = "auto",
    name: str = "table",
    seed: int = 0,
) -> Dataset:
    """A data set from a pandas data frame or a Hugging Face `Dataset`.

    `target` is the column to predict (label, labels, target or y unless you name one), `owner` the
    column that says whose a row is, and `inputs` the columns that the network gets: all others.
    Columns of single numbers are the features of one table; other ones are the network's keyword
    arguments, a single one its only argument. `test` is another table; without it 20 % of the rows,
    of every owner's where there are owners, are held out.
    """
    columns = names_of(table)
    target = target or next((known for known in TARGETS if known in columns), None)
    if target is None:
        raise UserError(
            f"which column of '{name}' is to be predicted? Give from_table a target, one of "
            f"{', '.join(columns)}."
        )
    chosen = list(inputs or (column for column in columns if column not in (target, owner)))
    for column in (*chosen, target, *([owner] if owner else [])):
        if column not in columns:
            raise unknown(f"column of '{name}'", column, columns)
    x, y = read_inputs_of(table, chosen, name), column_of(table, target)
    owners = None if owner is None else np.asarray(column_of(table, owner)).astype(str)
    x_test = None if test is None else read_inputs_of(test, chosen, name)
    y_test = None if test is None else column_of(test, target)
    return from_arrays(x, y, x_test, y_test, classes, name, owners=owners, seed=seed)


def names_of(table: Any) -> list[str]:
    """The names of the columns."""
    return [str(name) for name in getattr(table, "column_names", None) or table.columns]


def column_of(table: Any, name: str) -> Any:
    """One column as an array, or as a list of sequences of different lengths."""
    values = list(table[name])
    return values if is_ragged(values) else stacked(values)


def read_inputs_of(table: Any, names: Sequence[str], name: str) -> Any:
    """What the network gets: one matrix, one column, or several columns by name."""
    columns = {column: column_of(table, column) for column in names}
    for column, values in columns.items():
        if isinstance(values, np.ndarray) and is_text(values):
            raise UserError(
                f"column '{column}' of '{name}' holds text; turn it into numbers first (a "
                "tokenizer, pandas.get_dummies), or leave it out of inputs."
            )
    if not columns:
        raise UserError(f"'{name}' has no column besides target and owner for the network.")
    single = [isinstance(values, np.ndarray) and values.ndim == 1 for values in columns.values()]
    if all(single):
        matrix = np.stack(list(columns.values()), 1)
        return matrix.astype(np.float32) if matrix.dtype.kind in "biuf" else matrix
    return next(iter(columns.values())) if len(columns) == 1 else columns
