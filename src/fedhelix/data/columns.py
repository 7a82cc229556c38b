"""Samples by named columns: data frames, Hugging Face data sets, samples that are dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from fedhelix.core.errors import UserError
from fedhelix.core.imports import may_need
from fedhelix.data.cells import check_cells
from fedhelix.data.datasets import Dataset
from fedhelix.data.fields import Parts, is_ragged, joined
from fedhelix.data.reading import (
    all_samples,
    collated,
    is_missing,
    is_text,
    raw_pair,
    sample_of,
    stacked,
)

FEW = 8  # names in a sentence
TARGETS = ("label", "labels", "target", "y")  # columns that are the target unless one is named


def is_table(data: Any) -> bool:
    """Whether data have named columns, of which one can be the target."""
    return not isinstance(data, Dataset) and (
        hasattr(data, "columns") or hasattr(data, "column_names")
    )


def is_pair(data: Any) -> bool:
    """Whether this is a dictionary of samples and targets."""
    return isinstance(data, Mapping) and set(data) == {"x", "y"}


def check_rows(data: Any, where: str) -> None:
    """Refuse a table that is read as a stream, without a number of rows."""
    if is_table(data) and hasattr(data, "__iter__") and not hasattr(data, "__len__"):
        raise UserError(
            f"{where} is a stream without a length ({type(data).__name__}); load it without "
            "streaming=True, or give Dataset.from_list(list(data)) of Hugging Face."
        )


def pair_of(
    part: Any, where: str, columns: Sequence[str] | None = None, named: bool = False
) -> tuple[Any, Any]:
    """Inputs and targets of what one client has: a pair, a table or a map-style data set.

    Of a table that has them, only the given columns are inputs, in their order; where samples have
    `named` parts, each column is one.
    """
    if isinstance(part, Dataset):
        (x, y), (x_test, y_test) = train_and_test_pairs(part, where)
        y = np.concatenate([y, y_test])
        if isinstance(x, Parts):
            return joined([x, x_test], [where, where]), y
        both = np.concatenate([np.asarray(x), np.asarray(x_test)])
        return _with_columns(both, part.columns), y
    if isinstance(part, DataLoader):
        raise UserError(
            f"{where} is a DataLoader; give its data set, loader.dataset: batch_size, sampler and "
            "augment are settings of the federation."
        )
    if isinstance(part, Mapping) and part and not has_splits(part):
        hint = "; for all samples in two arrays, give from_arrays(x, y)" if is_pair(part) else ""
        raise UserError(
            f"{where} is a dictionary of {', '.join(map(str, part))}; give what one client has: a "
            f"pair (x, y), a table or a torch Dataset{hint}."
        )
    if has_splits(part):
        raise UserError(
            f"{where} has the splits {', '.join(part)}, each a table of its own; give one of them."
        )
    check_rows(part, where)
    given = input_names(part, where)
    if given is None:
        return raw_pair(part, where)
    if not is_table(part):
        part = collated(all_samples(part, where))
    target = target_of(names_of(part), where)
    inputs = list(columns if columns is not None and set(columns) <= set(given) else given)
    x = read_inputs_of(part, inputs, where, named=named)
    y = column_of(part, target)
    check_cells(target, y, where)
    return _with_columns(x, inputs), y


def _with_columns(x: Any, names: Sequence[str] | None) -> Any:
    """A matrix with the names of its columns; anything else as it is."""
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != len(names or ()):
        return x
    from pandas import DataFrame  # slow to import, and workers need none of it

    return DataFrame(x, columns=list(names or ()))


def train_and_test_pairs(data: Dataset, where: str) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Inputs and targets of a data set that was read already, such as with from_table."""
    for what, given in (
        ("owners", data.owners is not None),
        ("mean and std", data.mean is not None),
        ("texts as classes of tokens or pixels", data.labels is not None and data.y.dim() > 1),
    ):
        if given:
            raise UserError(
                f"{where} is a data set with {what}, which one client cannot have; give it as a "
                "pair (x, y), or as a table whose target is called label."
            )
    x, x_test = (
        _with_columns(part.numpy(), data.columns)
        if data.fields is None
        else data.fields.parts(part)
        for part in (data.x, data.x_test)
    )
    y, y_test = data.y.numpy(), data.y_test.numpy()
    if data.labels is not None:
        y, y_test = np.array(data.labels)[y], np.array(data.labels)[y_test]
    return (x, y), (x_test, y_test)


def input_names(part: Any, where: str) -> tuple[str, ...] | None:
    """The columns of what one client has that the network gets; None where none have names."""
    if isinstance(part, Dataset):
        return part.columns
    if not is_table(part) and not _has_dictionaries(part, where):
        return None
    names = names_of(part if is_table(part) else sample_of(part, 0, where))
    return tuple(column for column in names if column != target_of(names, where))


def in_order_of(clients: Iterable[Any], test: Any, name: str) -> Any:
    """A dictionary with the test part of each client as a list; anything else as it is."""
    names = list(clients)
    if not isinstance(test, Mapping) or (has_splits(test) and not set(test) & set(names)):
        return test
    if set(test) != set(names):
        raise UserError(
            f"test of '{name}' has parts for {', '.join(map(str, test))}, but the clients are "
            f"{', '.join(map(str, names))}; give one for each."
        )
    return [test[client] for client in names]


def has_splits(part: Any) -> bool:
    """Whether these are several tables, as in a `DatasetDict`, rather than one."""
    return isinstance(part, Mapping) and bool(part) and all(map(is_table, part.values()))


def train_and_test(parts: Sequence[Any], called: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """The tables called train and test of every client, or those parts of its data set."""
    train, test = [], []
    for part, whose in zip(parts, called, strict=True):
        if isinstance(part, Dataset):
            pairs = train_and_test_pairs(part, whose)
            train.append(pairs[0])
            test.append(pairs[1])
            continue
        if has_splits(part) and {"train", "test"} < set(part):
            raise UserError(
                f"the splits of {whose} are {', '.join(part)}; give train and test alone, and join "
                "other samples to train (datasets.concatenate_datasets): a client's validation "
                "samples are taken from train, a tenth of it or as partition.natural(valid=0.2) "
                "says."
            )
        if not has_splits(part) or set(part) != {"train", "test"}:
            found = ", ".join(part) if has_splits(part) else "none"
            raise UserError(
                f"the splits of {whose} are {found}, but some client has several; give all of them "
                "train and test."
            )
        train.append(part["train"])
        test.append(part["test"])
    return train, test


def feature_names(x: Any) -> tuple[str, ...] | None:
    """The names of the columns of a data frame."""
    return tuple(map(str, x.columns)) if hasattr(x, "columns") else None


def features_of(x: Any, columns: Sequence[str] | None, parts: Sequence[str] | None) -> Any:
    """The features of a table, or of a dictionary where samples have no parts with names, in the
    order in which a network was trained on them; what has none of these names is taken as it is.
    """
    named = parts is not None
    if len(columns or ()) > 1 and hasattr(x, "to_frame"):  # a pandas Series
        raise UserError(
            f"x is a Series and no data frame; {_wanted(columns or ())}, also for one row: "
            "df.iloc[[0]]."
        )
    if isinstance(x, list) and x and not named and isinstance(x[0], Mapping):
        raise UserError("x is a list of dictionaries; give pandas.DataFrame(x).")
    if not is_table(x) and (named or not isinstance(x, Mapping)):
        return x
    names = names_of(x)
    if parts is not None and not set(columns or ()) & set(names):
        columns = [name for name in parts if name in names] or names
    if columns is None or not set(columns) & set(names):
        return _all_columns(x)
    for column in columns:
        if column not in names:
            raise UserError(
                f"x lacks the column '{column}', which the network was trained on; "
                f"{_wanted(columns)}."
            )
    return read_inputs_of(x, columns, "x", named=named)


def _wanted(columns: Sequence[str]) -> str:
    more = ", ..." if len(columns) > FEW else ""
    return f"give a data frame with the columns {', '.join(columns[:FEW])}{more}"


def _all_columns(x: Any) -> Any:
    """All columns of a table, which may hold sequences of different lengths."""
    if not is_table(x):
        return x
    array = np.asarray(x)
    return read_inputs_of(x, names_of(x), "x") if array.dtype == object else array


def _has_dictionaries(part: Any, where: str) -> bool:
    """Whether the samples of a data set are dictionaries."""
    if isinstance(part, tuple | list) or not hasattr(part, "__getitem__"):
        return False
    if not hasattr(part, "__len__") or not len(part):
        return False
    return isinstance(sample_of(part, 0, where), Mapping)


def target_of(columns: Sequence[str], where: str) -> str:
    """The column with the usual name of a target; a second one would give the answer away."""
    known = [name for name in TARGETS if name in columns]
    if len(known) > 1:
        raise UserError(
            f"{' and '.join(known)} of {where} could all be what is to be predicted; give "
            "from_table a target, or drop or rename the others."
        )
    if known:
        return known[0]
    raise UserError(
        f"which column of {where} is to be predicted? Call it label, or give from_table a target, "
        f"one of {', '.join(columns)}."
    )


def names_of(table: Any) -> list[str]:
    """The names of the columns, as rows have them: Hugging Face's may have a transform, or a format
    with some of the columns.
    """
    if isinstance(table, Mapping):
        return [str(name) for name in table]
    if _has_transform(table) and len(table):
        return [str(name) for name in sample_of(table, 0, "the table")]
    given = _format(table).get("columns") or getattr(table, "column_names", None) or table.columns
    return [str(name) for name in given]


def _format(table: Any) -> Mapping[str, Any]:
    """In which form a data set of Hugging Face gives its rows; empty for other tables."""
    found = getattr(table, "format", None)
    return found if isinstance(found, Mapping) else {}


def _has_transform(table: Any) -> bool:
    return _format(table).get("type") == "custom"


def column_of(table: Any, name: str) -> Any:
    """One column as an array, or as a list of sequences of different lengths."""
    if _has_transform(table) and len(table):
        table = table[:]  # whose columns need not be those that are stored
    if hasattr(table, "columns"):  # a data frame may number its columns
        name = next((own for own in table.columns if str(own) == name), name)
    column = table[name]
    if hasattr(column, "columns"):
        raise UserError(f"two columns are called '{name}'; give every column a name of its own.")
    is_one = isinstance(column, str) or not hasattr(column, "__len__")  # such as a picture
    if is_one or getattr(column, "ndim", 1) == 0:
        raise UserError(
            f"column '{name}' is a single value; give a list of values, also for one sample: "
            f'{{"{name}": [...]}}.'
        )
    with may_need("PIL", "data"):  # as pictures of Hugging Face data sets do
        values = list(column)
    return values if is_ragged(values) else stacked(values)


def present(values: np.ndarray) -> np.ndarray:
    """A column without its missing values."""
    if values.dtype.kind not in ("O", "T"):
        return values
    return np.array([value for value in values.ravel() if not is_missing(value)], values.dtype)


def read_inputs_of(
    table: Any, names: Sequence[str], where: str, may_have_owner: bool = False, named: bool = False
) -> Any:
    """What the network gets: one matrix, one column, or several columns by name, as `named` parts
    always are. A table of all clients `may_have_owner`, a column that says whose a row is.
    """
    columns = {column: column_of(table, column) for column in names}
    for column, values in columns.items():
        if isinstance(values, np.ndarray) and (given := present(values)).size and is_text(given):
            owner = (
                "remove it once that is done, or, if it says whose a row is, name it: "
                f"partition.natural('{column}')"
            )
            raise UserError(
                f"column '{column}' of {where} holds text; turn it into numbers first (a "
                f"tokenizer, pandas.get_dummies), {owner if may_have_owner else 'or remove it'}."
            )
        check_cells(column, values, where)
        if isinstance(values, np.ndarray) and values.dtype.kind not in "biuf":
            kind = type(values.flat[0]).__name__ if values.size else values.dtype
            raise UserError(
                f"column '{column}' of {where} holds values of type {kind}; turn them into numbers "
                "first, or remove the column."
            )
    if not columns:
        raise UserError(f"{where} has no column besides target and owner for the network.")
    if named:
        return columns
    single = [isinstance(values, np.ndarray) and values.ndim == 1 for values in columns.values()]
    if all(single):
        matrix = np.stack(list(columns.values()), 1)
        return matrix.astype(np.float32) if matrix.dtype.kind in "biuf" else matrix
    return next(iter(columns.values())) if len(columns) == 1 else columns
