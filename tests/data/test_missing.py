"""Missing values, samples of different shapes and values that are too large are named."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset

from fedhelix import UserError, from_arrays, from_clients, from_table
from fedhelix.data.arrays import from_npz

X = np.zeros((6, 2), np.float32)
TEXT = ["a", "b", "a", "b", "a", "b"]
NUMBERS = [0, 1, 0, 1, 0, 1]


class Pictures(TorchDataset):
    """A map-style data set with these labels."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.zeros(2), self.labels[index]


@pytest.mark.parametrize(
    ("whole", "missing"),
    [
        *((TEXT, missing) for missing in (np.nan, np.float32("nan"), None, pd.NA, pd.NaT, "")),
        *((NUMBERS, missing) for missing in (None, pd.NA, pd.NaT)),
    ],
    ids=repr,
)
def test_a_missing_label_is_no_class(whole, missing):
    labels = [*whole[:3], missing, *whole[4:]]
    column = pd.Series(labels, dtype=object)
    table = pd.DataFrame(X, columns=["u", "v"]).assign(label=column)
    for make in (
        lambda: from_arrays(X, labels),
        lambda: from_arrays(X, column),
        lambda: from_clients([(X, whole), (X, labels)]),
        lambda: from_clients([Pictures(labels)]),
    ):
        with pytest.raises(UserError, match=r"^y of .* has no label in sample 3; remove"):
            make()
    with pytest.raises(UserError, match=r"^column 'label' of 'table' has a missing value in row 3"):
        from_table(table)


@pytest.mark.parametrize("kind", [str, bytes, object], ids=repr)
@pytest.mark.parametrize("missing", ["", "nan", "NaN"])
def test_a_text_array_has_no_class_of_missing_labels(kind, missing):
    labels = np.array([*TEXT[:3], missing, *TEXT[4:]]).astype(kind)
    for make in (lambda: from_arrays(X, labels), lambda: from_arrays(X, TEXT, X, labels)):
        with pytest.raises(UserError, match=r"^y of .* has no label in sample 3; remove"):
            make()
    assert from_arrays(X, np.array(["naa", "nan1"] * 3).astype(kind)).labels == ("naa", "nan1")


def test_an_empty_cell_of_a_csv_file_is_no_class():
    table = pd.read_csv(io.StringIO("u,v,label\n1,2,sick\n1,3,\n2,2,well\n"))
    words = "column 'label' of 'table' has a missing value in row 1 "
    with pytest.raises(UserError, match=words):
        from_table(table)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.nan, r"a missing value in row 2 \(counted from 0\); fill it in, or remove the row"),
        (-np.inf, r"-inf in row 2 \(counted from 0\); every value must be finite"),
        (1e300, r"1e\+300 in row 2 \(counted from 0\); every value must be .* fit into float32"),
    ],
)
@pytest.mark.parametrize("column", ["v", "target"])
def test_a_value_that_is_no_number_is_named_by_its_column_and_row(column, value, words):
    cells = {"u": range(8), "v": np.arange(8.0), "target": np.arange(8.0), "owner": [1.0, 2] * 4}
    whole = pd.DataFrame(cells, index=range(100, 108))
    table = whole.copy()
    table.iloc[2, table.columns.get_loc(column)] = value
    with pytest.raises(UserError, match=f"^column '{column}' of 'table' has {words}"):
        from_table(table, owner="owner")
    with pytest.raises(UserError, match=f"^column '{column}' of the test part of 'table' has "):
        from_table(whole, owner="owner", test=table)
    with pytest.raises(UserError, match=f"^column '{column}' of client ulm of 'data' has {words}"):
        from_clients({"bern": whole, "ulm": table})
    frame = table.drop(columns="target")
    if column != "target":
        with pytest.raises(UserError, match=f"^column '{column}' of 'data' has {words}"):
            from_arrays(frame, [0, 1] * 4)


def test_a_missing_number_is_not_taken_for_another_type():
    table = pd.DataFrame({"u": pd.array([1, 2, pd.NA], dtype="Int64"), "label": ["a", "b", "a"]})
    with pytest.raises(UserError, match="column 'u' of 'table' has a missing value in row 2"):
        from_table(table)
    with pytest.raises(UserError, match="x of 'data' has a missing value in sample 2"):
        from_arrays([[1], [2], [None]], TEXT[:3])
    with pytest.raises(UserError, match="column 'u' of 'table' holds text"):
        from_table(table.assign(u=["some", None, "words"]))


def test_objects_in_a_file_are_refused_with_a_way_out(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=X, y=np.array([*TEXT[:5], None], dtype=object))
    with pytest.raises(
        UserError,
        match=r"^y of .* Python objects; remove samples with missing .* from_arrays in Python",
    ):
        from_npz(path)
    names = pd.Series(list("abcabc")).astype(str)
    np.savez(path, x=X, y=np.array(list(names), dtype=str), owners=names.to_numpy(dtype=object))
    with pytest.raises(UserError, match=r"^owners of .* text as np\.array\(list\(values\), dtype="):
        from_npz(path)
    np.savez(path, x=X, y=np.array(list(names), dtype=str))
    assert from_npz(path).labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([np.zeros((8, 8)), np.zeros((8, 9))], r"x of 'data' have different shapes, \(8, 8\) and "),
        ([np.zeros((8, 8)), np.zeros((9, 9))], r"in sample 1 \(9, 9\); .*\(resize images\)"),
        ([[1, 2], []], "sample 1 of x of 'data' is empty"),
        (np.array([[1.0], [1e300]]), r"x of 'data' has 1e\+300 in sample 1, which is too large"),
    ],
)
def test_what_is_wrong_with_samples_is_said(x, words):
    with pytest.raises(UserError, match=words):
        from_arrays(x, [0, 1])


def test_masked_values_are_missing():
    x = np.ma.masked_equal([[1.0, 2], [3, -999], [5, 6], [7, 8]], -999)
    y = np.ma.masked_equal([0, 1, 9, 1], 9)
    texts = np.ma.masked_equal(["a", "b", "a", "?"], "?")
    for make, words in [
        (lambda: from_arrays(x, [0, 1, 0, 1]), "x of .* has a missing value in sample 1; fill"),
        (lambda: from_arrays(list(x), [0, 1, 0, 1]), "x of .* has a missing value in sample 1"),
        (lambda: from_arrays({"u": x}, [0, 1, 0, 1]), "'u' of x of .* missing value in sample 1"),
        (lambda: from_arrays(X[:4], y), "y of .* has no label in sample 2"),
        (lambda: from_arrays(X[:4], list(y)), "y of .* has no label in sample 2"),
        (lambda: from_arrays(X[:4], texts), "y of .* has no label in sample 3"),
        (lambda: from_arrays(X[:4], y * 1.5), "y of .* has no label in sample 2"),
        (lambda: from_arrays(X[:4], [0, 1, 0, 1], owners=y), "sample 2 of 'data' has no owner"),
        (lambda: from_clients([(x, [0, 1, 0, 1])]), "x of client 0 .* missing value in sample 1"),
    ]:
        with pytest.raises(UserError, match=words):
            make()
    whole = from_arrays(np.ma.masked_equal(X, -999), np.ma.masked_equal(NUMBERS, 9))
    assert len(whole.x) + len(whole.x_test) == len(X) and whole.classes == 2
