"""Mistakes with data of one's own: each has its sentence, or is none."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_clients, from_table, partition

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(label=Y)
PARTS = {"a": X[:, :3], "b": X[:, 3:]}
ROWS = X.tolist()
IMAGES = X.reshape(40, 1, 2, 2)
MASKS = np.where(IMAGES[:, 0] > 0, 1, 0)
SHORT = [*ROWS[:5], ROWS[5][:3], *ROWS[6:]]


class Both(nn.Module):
    """A sample of two parts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, a, b):
        return self.head(torch.cat([a, b], 1))


class Pixelwise(nn.Conv2d):
    """A number for each pixel."""

    def __init__(self):
        super().__init__(1, 1, 1)

    def forward(self, x):
        return super().forward(x).flatten(1)


def federation(data, **more):
    return Federation(data, more.pop("split", "iid"), clients=2, kernels="onednn", **more)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: from_table(FRAME, test=FRAME[["b", "c", "d", "label"]]),
            "unknown column of the test part of 'table' 'a'; there are: b, c, d, label",
        ),
        (
            lambda: from_table(FRAME, test=FRAME[list("abcd")]),
            "unknown column of the test part of 'table' 'label'",
        ),
        (
            lambda: from_arrays(FRAME[["a", "b"]], Y, FRAME[["b", "a"]], Y),
            "the test part of 'data' has the columns b, a, but 'data' a, b; give all of them the",
        ),
        (
            lambda: from_arrays(FRAME[["a", "b"]], Y, FRAME[["a", "c"]], Y),
            "the test part of 'data' has the columns a, c, but 'data' a, b",
        ),
        (
            lambda: federation(pd.concat([FRAME, FRAME[["a"]]], axis=1)),
            "two columns are called 'a'; give every column a name of its own",
        ),
        (
            lambda: from_arrays(PARTS["a"], Y, mean="wide", std=1),
            "mean must be a number, or one for each channel, not 'wide'",
        ),
        (
            lambda: federation(from_arrays(X, (X > 0).astype(int)), method="fedproto"),
            "fedproto needs classes, and 'data' is no classification; use another method.",
        ),
        (
            lambda: federation(from_arrays(X, X[:, 0]), method="fedproto"),
            "fedproto needs classes",
        ),
        (
            lambda: federation(from_arrays(PARTS, Y), model=Both, standardize=True),
            "standardize scales samples of one part, and those of 'data' have several; scale",
        ),
        (
            lambda: from_clients({"ulm": (X, Y)}, test={"bern": (X, Y)}),
            "test of 'data' has parts for bern, but the clients are ulm; give one for each",
        ),
        (
            lambda: federation(from_arrays(IMAGES, MASKS), model=nn.Conv2d(1, 2, 1), augment=True),
            "crops and flips images, but not their targets, and 'data' has a target for every",
        ),
        (
            lambda: federation(from_arrays(IMAGES, IMAGES), model=Pixelwise, augment=True),
            "crops and flips images, but not their targets",
        ),
        (
            lambda: federation(from_arrays(X, Y), split=partition.natural(["a", "b"] * 20)),
            r"32 training samples, but ids .* \(40,\); from_arrays\(\.\.\., owners=ids\) takes one",
        ),
        (
            lambda: federation(from_arrays(X, Y), method="gene-fl").fit(1, quiet=True),
            r"of 4 features have no 5 singular vectors; set vectors to 4 or less\.$",
        ),
    ],
)
def test_a_mistake_has_its_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


def test_a_row_that_is_too_short_is_named():
    with pytest.warns(UserWarning, match="sample 5 of x of 'data' has 3 values, and most have 4"):
        data = from_arrays(SHORT, Y)
    with pytest.raises(UserError, match="rows of different lengths are padded, and a mask says"):
        federation(data)


@pytest.mark.filterwarnings("error::UserWarning")
def test_sequences_of_many_lengths_are_taken_quietly():
    from_arrays([row[: 1 + place % 4] for place, row in enumerate(ROWS)], Y)


def test_one_number_scales_all_channels():
    pixels = np.arange(40 * 3 * 16, dtype=np.uint8).reshape(40, 3, 4, 4)
    one = from_arrays(pixels, Y, mean=0.5, std=0.2)
    same = [from_arrays(pixels, Y, mean=(0.5,), std=[0.2] * 3)]
    same += [from_clients([(pixels, Y)] * 2, mean=np.full(3, 0.5), std=torch.tensor(0.2))]
    for other in same:
        assert torch.allclose(other.prepare(one.x), one.prepare(one.x))


def test_test_parts_may_have_the_names_of_the_clients():
    clients = {"ulm": (X[:10], Y[:10]), "bern": (X[10:30], Y[10:30])}
    test = {"bern": (X[30:34], Y[30:34]), "ulm": (X[34:], Y[34:])}
    data = from_clients(clients, test=test)
    assert np.array_equal(data.x_test[data.owners_test == "bern"], X[30:34])
    assert np.array_equal(data.x_test[data.owners_test == "ulm"], X[34:])
