"""What targets mean: labels of zeros and ones, one class alone, values that are no labels."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_clients

X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
LABELS = (X[:, :3] > 0).astype(int)


def federation(data, split="iid", **more):
    clients = 2 if split == "iid" else None
    usual = {"engine": "serial", "model": "linear", "kernels": "onednn", "epochs": 1}
    return Federation(data, split, clients=clients, **usual | more)


@pytest.mark.parametrize("kind", [int, bool, "float32", "float64"], ids=str)
def test_zeros_and_ones_are_labels_whatever_their_type(kind):
    y = LABELS.astype(kind)
    for data in (from_arrays(X, y), from_clients([(X, y), (X, torch.from_numpy(y))])):
        assert data.y.dtype == data.y_test.dtype == torch.bool and "labels" in repr(data)
    numbers = from_arrays(X, y, classes=None)
    assert numbers.y.dtype == torch.float32 and "regression" in repr(numbers)
    assert from_arrays(X, y + 0.5 * (np.arange(60) == 7)[:, None]).y.dtype == torch.float32


def test_losses_of_pytorch_take_labels():
    usual = federation(from_arrays(X, LABELS.astype("float32"))).fit(2, quiet=True)
    loss = nn.BCEWithLogitsLoss(reduction="none")
    own = federation(from_arrays(X, LABELS), loss=loss).fit(2, quiet=True)
    new = [run.predict(X, raw=True) for run in (usual, own)]
    np.testing.assert_allclose(*new, atol=1e-6)
    assert usual.metrics["score"].tolist() == own.metrics["score"].tolist()


def test_one_class_alone_is_refused():
    y = np.zeros(60, int)
    owned = from_arrays(X, y, owners=np.arange(60) % 3)
    for data, split in [
        (from_arrays(X, y), "iid"), (owned, None), ([(X, y), (X, y)], None),
        (from_arrays(X, ["well"] * 60), "iid"), (from_arrays(X, y, classes=1), "iid"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match="have one class, so there is nothing to learn; if"):
            federation(data, split)
    assert federation(from_arrays(X, y, classes=2)).data.outputs == 2


@pytest.mark.parametrize("value", [2, -1, 3])
def test_a_value_that_is_no_label_is_named(value):
    y = LABELS.copy()
    y[40, 1] = value
    with pytest.raises(UserError, match=f"y of 'data' has the value {value}, so its 3 whole num"):
        federation(from_arrays(X, y))


def test_many_whole_numbers_below_zero_are_no_classes():
    y = (300 * X[:, 0]).astype(int)
    with pytest.raises(UserError, match=r"also such below 0; .* classes=None makes it a") as caught:
        from_arrays(X, y)
    assert "classification" not in str(caught.value)
    assert from_arrays(X, y, classes=None).y.dtype == torch.float32


def test_floats_that_are_zeros_and_ones_may_be_classes():
    y = LABELS[:, 0].astype("float32")
    for given in (y, y[:, None]):
        with pytest.warns(UserWarning, match=r"only the numbers 0.0 and 1.0, .* or classes=2"):
            assert from_arrays(X, given).classes is None
    assert from_arrays(X, y, classes=2).classes == 2  # no warning
    with pytest.warns(UserWarning, match=r"only the numbers 0.0 to 3.0, .* or classes=4"):
        assert from_arrays(X, (np.arange(len(X)) % 4).astype("float32")).classes is None
    assert from_arrays(X, y, classes=None).classes is None


def test_classes_that_are_only_tested_are_named():
    y, tested = LABELS[:, 0], np.arange(20) % 4
    said = r"2 of the classes of 'data' \({}\) have test samples, but none to train on"
    with pytest.warns(UserWarning, match=said.format("2, 3")):
        assert from_arrays(X, y, X[:20], tested).classes == 4
    names = np.array(["a", "b", "c", "d"])
    with pytest.warns(UserWarning, match=said.format("'c', 'd'")):
        from_arrays(X, names[y], X[:20], names[tested])
    assert from_arrays(X, y, X[:20], tested, classes=4).classes == 4  # no warning


def test_a_dictionary_of_two_arrays_is_no_client():
    with pytest.raises(UserError, match=r"dictionary of two arrays; give from_arrays\(x, y\)"):
        Federation({"x": X, "y": LABELS[:, 0]})
    with pytest.raises(UserError, match=r"of x, y; give .* in two arrays, give from_arrays\(x, y"):
        Federation([{"x": X, "y": LABELS[:, 0]}])
