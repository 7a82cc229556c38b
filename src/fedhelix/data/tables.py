"""Tables with named columns: pandas data frames and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError, unknown
from fedhelix.data.arrays import Classes, assembled, from_arrays, hold_out_each, pool
from fedhelix.data.datasets import Dataset
from fedhelix.data.fields import is_ragged
from fedhelix.data.reading import coded, is_text, read_pair, stacked

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
    more: dict[str, Any] = {"classes": classes, "name": name, "seed": seed}
    if test is not None:
        rows = read_inputs_of(test, chosen, name), column_of(test, target)
        owners = None if owner is None else column_of(table, owner)
        return from_arrays(x, y, *rows, owners=owners, **more)
    if owner is None:
        return from_arrays(x, y, **more)
    return by_owner(x, y, column_of(table, owner), classes, name, seed)


def by_owner(x: Any, y: Any, owners: Any, classes: Classes, name: str, seed: int) -> Dataset:
    """Every owner's rows cut into training and test samples."""
    (y,), labels = coded([y])
    inputs, targets = read_pair(x, y, f"'{name}'")
    names, index = np.unique(np.asarray(owners).astype(str), return_inverse=True)
    rows = [np.flatnonzero(index == place) for place in range(len(names))]
    parts = [(inputs[place], targets[place]) for place in rows]
    train, test = hold_out_each(parts, classes, seed)
    if not any(len(part) for _, part in test):
        raise UserError(f"each owner of '{name}' has a single row, and none is left to test with.")
    x, y, whose = pool(train, f"an owner of '{name}'")
    x_test, y_test, whose_test = pool(test, f"an owner of '{name}'")
    return assembled(
        name, (x, y), (x_test, y_test), classes, None, None,
        owners=names[whose], owners_test=names[whose_test], labels=labels,
    )  # fmt: skip


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
