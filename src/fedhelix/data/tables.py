"""Tables with named columns: pandas data frames and Hugging Face data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.options import checks_arguments
from fedhelix.data.arrays import from_arrays
from fedhelix.data.cells import check_cells
from fedhelix.data.class_names import class_names, named_classes
from fedhelix.data.columns import (
    check_rows,
    column_of,
    names_of,
    read_inputs_of,
    target_of,
)
from fedhelix.data.datasets import Dataset, with_class_names
from fedhelix.data.targets import Classes


@checks_arguments
def from_table(
    table: Any,
    target: str | int | Sequence[str | int] | None = None,
    owner: str | int | None = None,
    inputs: str | int | Sequence[str | int] | None = None,
    *,
    test: Any = None,
    classes: Classes = "auto",
    name: str = "table",
    seed: int = 0,
) -> Dataset:
    """A data set from a pandas data frame or a Hugging Face `Dataset` or `DatasetDict`.

    `target` is the column to predict (label, labels, target or y unless you name one), or several:
    labels each of which may hold, or numbers. `owner` is the column that says whose a row is, and
    `inputs` are the columns that the network gets: all others. Columns of single numbers are the
    features of one table; other ones are the network's keyword arguments, a single one its only
    argument. `test` is another table, by default the one called test of a `DatasetDict`; without it
    20 % of the rows, of every owner's where there are owners, are held out. Where `test` has the
    column of owners, each is tested on its own rows.
    """
    if isinstance(table, str | Path):
        raise UserError(
            f"from_table takes a table, not a file; read it first: pandas.read_csv({str(table)!r})."
        )
    if isinstance(table, Mapping):
        table, test = _splits(table, test, name)
    where = f"'{name}'"
    check_rows(table, where)
    columns = names_of(table)
    if target is None:
        target = target_of(columns, where)
    owner = None if owner is None else str(owner)
    targets = [str(name) for name in np.atleast_1d(np.asarray(target, dtype=object))]
    others = (column for column in columns if column not in (*targets, owner))
    inputs = [inputs] if isinstance(inputs, str | int) else inputs
    chosen = list(map(str, inputs or others))
    for column in set(chosen) & set(targets):
        raise UserError(
            f"column '{column}' of {where} is the target, so that it cannot be an input too; leave "
            "it out of inputs."
        )
    for column in (*chosen, *targets, *([owner] if owner else [])):
        if column not in columns:
            raise unknown(f"column of {where}", column, columns)
    for column in (*chosen, *targets) if test is not None else ():
        if column not in names_of(test):
            raise unknown(f"column of the test part of {where}", column, names_of(test))
    x = read_inputs_of(table, chosen, where, may_have_owner=owner is None)
    y = _targets(table, targets, where)
    owners = None if owner is None else _whole(table, owner, where)
    called = f"the test part of {where}"
    x_test = None if test is None else read_inputs_of(test, chosen, called)
    y_test = None if test is None else _targets(test, targets, called)
    owners_test = None
    if owner is not None and test is not None and owner in names_of(test):
        owners_test = _whole(test, owner, called)
    if len(targets) == 1:
        classes = named_classes(classes, table, targets[0])
    data = from_arrays(
        x, y, x_test, y_test, classes, name,
        owners=owners, owners_test=owners_test, seed=seed,
    )  # fmt: skip
    named = with_class_names(data, class_names(table, targets[0]))
    return dataclasses.replace(named, columns=tuple(chosen))


def _targets(table: Any, names: Sequence[str], where: str) -> Any:
    """One column, or several side by side."""
    columns = [_whole(table, name, where) for name in names]
    return columns[0] if len(columns) == 1 else np.stack(columns, 1)


def _whole(table: Any, name: str, where: str) -> Any:
    """One column, of which no value may be missing."""
    values = column_of(table, name)
    check_cells(name, values, where)
    return values


def _splits(tables: Mapping[str, Any], test: Any, name: str) -> tuple[Any, Any]:
    """The tables called train and test of several."""
    if "train" not in tables:
        raise UserError(
            f"'{name}' holds the tables {', '.join(map(str, tables))} and none called train; "
            "give from_table one of them."
        )
    return tables["train"], tables.get("test") if test is None else test
