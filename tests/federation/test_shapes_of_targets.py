"""Targets and inputs in forms that are easily mistaken: what is said about them."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_clients

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)


def halves(x, y):
    return [(x[:30], y[:30]), (x[30:], y[30:])]


def fit(data, **options):
    usual = {"engine": "serial", "model": "linear", "epochs": 1}
    return Federation(data, **usual | options).fit(1, quiet=True)


def test_a_column_of_targets_beside_a_row_is_named_by_its_shape():
    parts = [(X[:30], X[:30, 0]), (X[30:], X[30:, :1])]
    said = r"client 1 .* shape N×1 \(float32\), the first of N \(float32\); give all of them one"
    with pytest.raises(UserError, match=said):
        from_clients(parts)
    run = fit(halves(X, X[:, 0]))
    with pytest.raises(UserError, match=r"newcomer has targets of shape N×1 .* 'data' has N "):
        run.onboard((X, X[:, :1]))


def test_one_label_is_no_row_of_labels():
    run = fit(halves(X, (X[:, :3] > 0).astype(int)))
    with pytest.raises(UserError, match=r"newcomer has targets of shape N .* 'data' has N×3 "):
        run.onboard((X, Y))


def test_numbers_of_a_newcomer_are_places_of_named_classes_with_a_warning():
    run = fit(halves(X, np.where(Y, "well", "sick")))
    with pytest.warns(UserWarning, match=r"taken as places .*\(0 is 'sick', 1 is 'well'\)"):
        run.onboard((X, Y))


def test_names_of_a_newcomers_classes_decide_not_their_numbers():
    class Table:
        """As much of a data set of Hugging Face as is needed."""

        def __init__(self, names, y):
            self.rows, self.column_names = {"x": list(X), "label": list(y)}, ["x", "label"]
            self.features = {"label": SimpleNamespace(names=names)}

        def __getitem__(self, column):
            return self.rows[column]

        def __len__(self):
            return len(X)

    table = Table(["sick", "well", "dead"], Y)
    run = fit(from_clients([table, table]))
    number = run.onboard(Table(["well", "sick"], 1 - Y))
    split, data = run.federation.splits[number], run.federation.data
    assert data.classes == 3 and data.labels == ("sick", "well", "dead")
    assert torch.equal(data.y[split.train], (data.x[split.train][:, 0] > 0).long())


def test_sparse_tensors_and_long_doubles():
    with pytest.raises(
        UserError, match=r"x of client 0 of 'data' is a sparse tensor; its to_dense"
    ):
        from_clients([(torch.from_numpy(X).to_sparse(), Y)])
    data = from_arrays(X.astype(np.longdouble), Y)
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x, from_arrays(X, Y).x)


def test_bytes_are_no_tokens():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.EmbeddingBag(256, 2)

        def forward(self, x, mask):
            return self.embed(x)

    rows = [np.arange(1, 2 + number % 4, dtype=np.uint8) for number in range(60)]
    with pytest.raises(UserError, match=r"any type but uint8, which is pixels: give them as int64"):
        fit([(rows[:30], Y[:30]), (rows[30:], Y[30:])], model=Bag)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ((3, 4, 5), r"begin at 3, so 3 of the 6 classes have no samples; .*\(y - 3\), or give"),
        (
            (3, 7, 90),
            "begin at 3, so 88 of the 91 classes have no samples; .*without gaps, or give",
        ),
        ((0, 87), r"go up to 87, so 86 of the 88 .* as text \(y.astype\(str\)\), or give"),
    ],
)
def test_unused_classes_are_counted(labels, said):
    with pytest.warns(UserWarning, match=said):
        from_arrays(X, np.resize(labels, 60))


VOID = np.resize((0, 1, 1, 255), (60, 2, 2))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (1 + VOID % 2, r"begin at 1, so 1 of the 3 classes has no samples; .* \(y - 1\), or give"),
        (
            np.where(VOID > 1, -100, 1 + VOID),
            "begin at 1, so 1 of the 3 .*; number classes from 0, or give classes=3 if",
        ),
        (VOID, "go up to 255, so 253 .* gaps, mark pixels .* by -100 instead of 255, or give"),
        (np.where(VOID > 0, 255, 0).astype(np.uint8), "go up to 255, so 254 of .* by -100"),
        (VOID[:, 0] * 2 + 1, r"begin at 1, .* as text"),
        ([[3, 4], [5, 3, 4]] * 30, r"begin at 3, so 3 of the 6 classes have no samples"),
    ],
)
def test_unused_classes_of_pixels_and_tokens_are_counted(labels, said):
    x = np.zeros((60, 1, 2, 2), np.float32)
    if isinstance(labels, list):
        x = [[1, 2], [1, 2, 9]] * 30
    with pytest.warns(UserWarning, match=said):
        from_arrays(x, labels)


@pytest.mark.filterwarnings("error")
def test_used_classes_of_pixels_and_next_tokens_are_nothing_to_talk_about():
    from_arrays(np.resize([1, 2, 9, 4], (60, 4)), np.resize([2, 9, 4, 1], (60, 4)))
    from_arrays(np.zeros((60, 1, 2, 2), np.float32), np.where(VOID > 1, -100, VOID))
    from_arrays(np.zeros((60, 1, 2, 2), np.float32), VOID, classes=256)


@pytest.mark.filterwarnings("error")
def test_a_gap_between_classes_is_nothing_to_talk_about():
    assert from_arrays(X, np.resize((0, 1, 3), 60)).classes == 4


@pytest.mark.parametrize("kind", [float, int, bool])
def test_classes_in_columns_of_zeros_and_ones_are_noted(kind):
    rows = np.eye(3)[np.arange(60) % 3].astype(kind)
    with pytest.warns(UserWarning, match=r"every row .* has a single 1, .* give y\.argmax\(1\)"):
        assert from_arrays(X, rows).y.dtype == torch.bool
    rows[0] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_arrays(X, rows)


def test_masks_of_floats_are_to_be_whole_numbers():
    x, mask = torch.rand(60, 1, 4, 4), (torch.rand(60, 4, 4) > 0.5).float()
    net = nn.Conv2d(1, 2, 3, padding=1)
    with pytest.raises(UserError, match=r"give masks of pixels as integers, y\.long\(\)"):
        fit(from_arrays(x, mask), model=net, partition="iid")
    fit(from_arrays(x, mask.long()), model=net, partition="iid")
