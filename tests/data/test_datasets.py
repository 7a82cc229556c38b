from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fedhelix.core.errors import UserError
from fedhelix.data import Dataset, load, rows_of


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def small(**changes: object) -> Dataset:
    values = {
        "name": "toy",
        "x": torch.zeros(4, 2),
        "y": torch.tensor([0, 1, 2, 0]),
        "x_test": torch.zeros(2, 2),
        "y_test": torch.tensor([0, 1]),
        "classes": 3,
    }
    return Dataset(**(values | changes))


class TestDataset:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"y": torch.tensor([0, 1, 3, 0])},
                "y of 'toy' has labels outside the classes: 3 at index 2",
            ),
            (
                {"y_test": torch.tensor([0, -1])},
                "y_test of 'toy' has labels outside the classes: -1 at index 1",
            ),
            ({"y": torch.tensor([0, 1])}, "x of 'toy' has 4 samples, but y has 2 labels"),
            (
                {"x": torch.tensor([[0.0, 0], [0, 1], [2, float("nan")], [0, 0]])},
                "x of 'toy' has nan in sample 2",
            ),
            (
                {"x_test": torch.tensor([[0.0, 0], [0, float("inf")]])},
                "x_test of 'toy' has inf in sample 1",
            ),
            ({"x": torch.zeros(0, 2), "y": torch.zeros(0).long()}, "x of 'toy' is empty"),
            ({"x": torch.zeros(4, 3)}, "x has 3 float32 and x_test 2 float32"),
            ({"x": torch.zeros(4)}, "must be N×D or N×C×H×W"),
            ({"x": torch.zeros(4, 2, dtype=torch.float64)}, "must be uint8, float32 or int64"),
            ({"x": np.zeros((4, 2))}, "must be a tensor"),
            ({"y": torch.zeros(4)}, "must be one int64 label per sample"),
            ({"classes": None}, "must be float32 for a regression"),
            ({"mean": (0.5,)}, "only one of mean and std"),
            ({"mean": (0.5,) * 3, "std": (1.0,) * 3}, "mean of 'toy' has 3 values for 2 channels"),
            ({"mean": (0.5,), "std": (0.0,)}, "std above zero"),
            ({"owners": np.zeros(3)}, "there are 3 owners"),
        ],
    )
    def test_bad_data_are_refused_with_their_place(self, changes, message):
        with pytest.raises(UserError, match=message):
            small(**changes)

    def test_prepare_scales_and_normalises_batches_of_any_depth(self):
        x = torch.from_numpy(pixels(4, 3, 5, 5))
        data = small(x=x, x_test=x[:2], mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))
        expected = torch.stack(
            [(x[:, c] / 255 - m) / s for c, m, s in ((0, 0.1, 1), (1, 0.2, 2), (2, 0.3, 4))], dim=1
        )
        torch.testing.assert_close(data.prepare(x), expected)
        torch.testing.assert_close(
            data.prepare(x.view(2, 2, 3, 5, 5)), expected.view(2, 2, 3, 5, 5)
        )

    def test_prepare_leaves_plain_floats_and_tokens_alone(self):
        assert torch.equal(small().prepare(torch.ones(3, 2)), torch.ones(3, 2))
        tokens = torch.arange(8).view(4, 2)
        assert torch.equal(small(x=tokens, x_test=tokens[:2]).prepare(tokens), tokens)

    def test_moving_keeps_everything(self):
        data = small(mean=(0.0,), std=(2.0,), owners=np.arange(4))
        moved = data.to("cpu")
        assert moved.shape == (2,)
        assert torch.equal(moved.prepare(moved.x + 1), torch.full((4, 2), 0.5))
        assert moved.owners is data.owners

    def test_repr_is_short(self):
        assert repr(small()) == "Dataset(toy: 4 train, 2 test, 2 float32, 3 classes)"

    def test_subsample_keeps_proportions(self):
        data = load("digits")
        smaller = data.subsample(train=700, test=100)
        share = torch.bincount(data.y) / len(data.y)
        assert len(smaller.x) == 700
        assert len(smaller.x_test) == 100
        assert ((torch.bincount(smaller.y) - 700 * share).abs() <= 1).all()
        with pytest.raises(UserError, match="cannot draw 2000 samples from the 1438"):
            data.subsample(2000)


def test_threads_that_move_one_data_set_share_the_copy(monkeypatch):
    data = load("digits")
    monkeypatch.setattr(
        Dataset, "__post_init__", lambda self: None
    )  # a device without values cannot be checked
    with ThreadPoolExecutor(8) as threads:
        copies = list(threads.map(lambda _: data.to("meta"), range(8)))
    assert all(copy is copies[0] for copy in copies)
    assert data.to("cpu") is data


def test_the_first_samples_of_each_pool():
    data = load("digits")
    some = data.first(100, 20)
    assert torch.equal(some.x, data.x[:100]) and torch.equal(some.y_test, data.y_test[:20])
    assert data.first(None, None) is data and len(data.first(10, None).x_test) == len(data.x_test)
    with pytest.raises(UserError, match="only 1438 samples in x, not 5000"):
        data.first(5000, None)


def test_samples_keep_the_axes_of_their_indices():
    pool = torch.arange(24, dtype=torch.uint8).view(4, 2, 3)
    for samples in (
        torch.tensor([2, 0, 2]),
        torch.tensor([[1, 3], [0, 0]]),
        torch.tensor([], dtype=torch.int64),
    ):
        assert torch.equal(rows_of(pool, samples), pool[samples])
