from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedhelix.core.errors import UserError
from fedhelix.data import from_arrays, from_clients, from_npz, load, partitions


class Squares(TorchDataset):
    """A map-style data set that gives (float vector, int)."""

    def __init__(self, n: int, offset: int = 0) -> None:
        self.n, self.offset = n, offset

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int):
        return torch.full((3,), float(index + self.offset)), index % 2


class Unlabelled(Squares):
    def __getitem__(self, index: int):
        return index


class TestFromArrays:
    def test_a_stratified_fifth_is_held_out(self):
        y = np.repeat([0, 1, 2], [50, 30, 20])
        data = from_arrays(np.arange(100.0)[:, None], y)
        assert data.classes == 3
        assert data.y_test.bincount().tolist() == [10, 6, 4]
        both = torch.cat([data.x, data.x_test]).flatten().sort().values
        assert torch.equal(both, torch.arange(100.0))
        assert torch.equal(data.x, from_arrays(np.arange(100.0)[:, None], y).x)
        assert not torch.equal(data.x, from_arrays(np.arange(100.0)[:, None], y, seed=1).x)

    def test_a_class_with_one_sample_stays_in_training(self):
        data = from_arrays(np.zeros((11, 2)), [0] * 10 + [1])
        assert data.y.tolist().count(1) == 1

    def test_given_test_pool(self):
        x = torch.rand(6, 4)
        with pytest.warns(UserWarning, match=r"1 of the classes of 'mine' \(4\) has test samples"):
            data = from_arrays(x, [0, 1, 2, 0, 1, 2], x[:2], [0, 4], name="mine")
        assert data.name == "mine"
        assert data.classes == 5
        assert data.x is x or torch.equal(data.x, x)

    @pytest.mark.parametrize(
        ("shape", "dtype", "expected"),
        [
            ((10, 8, 8), np.uint8, (1, 8, 8)),
            ((10, 8, 8, 3), np.uint8, (3, 8, 8)),
            ((10, 3, 8, 8), np.uint8, (3, 8, 8)),
            ((10, 8, 8, 4), np.uint8, (4, 8, 8)),
            ((10, 4, 4, 3), np.uint8, (3, 4, 4)),
            ((10, 4, 8, 4), np.uint8, (4, 8, 4)),
            ((10, 8, 8), np.float64, (8, 8)),
            ((10, 5), np.float64, (5,)),
            ((10, 5), np.int32, (5,)),
            ((10, 5), np.uint16, (5,)),
            ((10, 5), bool, (5,)),
        ],
    )
    def test_shapes(self, shape, dtype, expected):
        assert from_arrays(np.ones(shape, dtype), np.arange(10) % 2).shape == expected

    def test_regression(self):
        x = np.random.default_rng(0).random((20, 3))
        for data in (from_arrays(x, x.sum(1)), from_arrays(x, np.arange(20), classes=None)):
            assert data.classes is None
            assert data.y.dtype == torch.float32
            assert len(data.y_test) == 4

    def test_labels_may_be_whole_floats_or_a_column(self):
        data = from_arrays(np.zeros((10, 2)), np.arange(10)[:, None] % 2 * 1.0, classes=2)
        assert data.y.dtype == torch.int64

    def test_float_test_labels_do_not_make_a_regression(self):
        x, x_test = np.zeros((4, 2)), np.zeros((2, 2))
        assert from_arrays(x, [0, 1, 1, 2], x_test, [0.0, 2.0]).classes == 3

    def test_arrays_that_may_not_be_written_and_odd_byte_order(self):
        x = np.frombuffer(bytes(range(40)), dtype=np.uint8).reshape(10, 4)
        assert from_arrays(x, np.arange(10, dtype=">i4") % 2).shape == (4,)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"y": [0, 1, -2, 0]}, "labels outside the classes: -2"),
            ({"y": [0, 1, 2, 9], "classes": 3, "x_test": [[0.0]], "y_test": [0]}, "9 at index 3"),
            ({"y": [0, 1, 2.5, 0], "classes": 3}, "must be whole numbers"),
            ({"y": ["a", "b", 3, None]}, "y of 'data' has no label in sample 3"),
            ({"y": list("abcd"), "x_test": [[1.0]], "y_test": [0]}, "some labels are text"),
            ({"y": [0, 1]}, r"shapes are \(4, 1\) and \(2,\)"),
            (
                {"x": [[1.0], [2.0], [3.0], [float("nan")]], "x_test": [[0.0]], "y_test": [0]},
                "nan in sample 3",
            ),
            ({"x": [[1.0], [2.0, 3.0]]}, "must have one entry per sample"),
            ({"x": [[1.0], [[2.0], [3.0]]]}, r"different shapes, \(1,\) and in sample 1 \(2, 1\)"),
            ({"y": range(200), "x": [[1.0]] * 200}, "classes=None .*npz file, save y as floats"),
            ({"x": np.zeros((0, 1)), "y": []}, "'data' is empty"),
            ({"x": [[1.0]], "y": [0]}, "too few samples"),
            ({"x_test": [[1.0]]}, "only one of x_test and y_test"),
            ({"classes": 0}, "classes must be"),
        ],
    )
    def test_bad_input(self, arguments, message):
        with pytest.raises(UserError, match=message):
            from_arrays(**({"x": [[1.0], [2.0], [3.0], [4.0]], "y": [0, 1, 2, 0]} | arguments))


class TestFromClients:
    def test_pairs_and_data_sets_are_pooled(self):
        pair = np.zeros((10, 3)), np.arange(10) % 2
        tensors = TensorDataset(torch.ones(5, 3), torch.zeros(5, dtype=torch.int64))
        data = from_clients([pair, Squares(20), tensors])
        assert np.bincount(data.owners).tolist() == [8, 16, 4]
        assert np.bincount(data.owners_test).tolist() == [2, 4, 1]
        second = torch.cat([data.x[data.owners == 1], data.x_test[data.owners_test == 1]])
        assert sorted(second[:, 0].tolist()) == list(range(20))

    def test_small_clients_give_one_test_sample_if_they_can(self):
        data = from_clients([Squares(1), Squares(2), Squares(3)])
        assert np.bincount(data.owners).tolist() == [1, 1, 2]
        assert np.bincount(data.owners_test).tolist() == [0, 1, 1]

    def test_common_and_own_test_pools(self):
        clients = [Squares(4), Squares(6)]
        common = from_clients(clients, test=Squares(5))
        assert len(common.x) == 10
        assert len(common.x_test) == 5
        assert common.owners_test is None
        own = from_clients(clients, test=[Squares(2), (torch.zeros(1, 3), [1])])
        assert own.owners_test.tolist() == [0, 0, 1]

    @pytest.mark.parametrize(
        ("clients", "test", "message"),
        [
            ([], None, "has no clients"),
            (
                [Squares(3), (np.zeros((2, 4)), [0, 1])],
                None,
                "client 1 of 'data' has samples of 4 float32, .* the same columns or shape",
            ),
            ([Squares(3), (np.zeros((2, 3)), [0.5, 1])], None, "client 1 of 'data' has targets of"),
            ([Squares(3), Squares(0)], None, "client 1 of 'data' is empty"),
            (
                [Squares(1)],
                None,
                "each client of 'data' has a single sample, and none is left to test with",
            ),
            ([[(1, 2, 3)] * 3], None, "client 0 of 'data' has 3 entries"),
            ([Squares(3), Unlabelled(3)], None, "client 1 of 'data' cannot be read as samples"),
            ([iter([1])], None, "client 0 of 'data' is of type list_iterator"),
            ([(np.zeros((2, 4)),)], None, "client 0 of 'data' has 1 entries"),
            ([Squares(3)], [Squares(3), Squares(3)], "has 1 clients, but test has 2 parts"),
        ],
    )
    def test_bad_input(self, clients, test, message):
        with pytest.raises(UserError, match=message):
            from_clients(clients, test)


def test_an_npz_file_with_owners_becomes_a_federation(tmp_path):
    x, y = np.random.default_rng(0).random((40, 3), dtype=np.float32), np.arange(40) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y, owners=np.repeat(["a", "b"], 20))
    data = from_npz(tmp_path / "mine.npz")
    assert data.name == "mine" and data.classes == 2 and len(data.owners) == len(data.x) == 32
    assert len(partitions.natural().split(data, 0)) == 2


@pytest.mark.parametrize(
    "content",
    [{"x": np.zeros((4, 2))}, {"x": np.zeros((4, 2)), "y": np.zeros(4), "z": np.zeros(1)}],
)
def test_an_npz_file_must_hold_x_and_y_and_nothing_unknown(tmp_path, content):
    np.savez(tmp_path / "mine.npz", **content)
    with pytest.raises(UserError, match="must hold x and y"):
        from_npz(tmp_path / "mine.npz")


def test_an_npz_file_says_how_many_classes_there_are(tmp_path, cli):
    x, y, path = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2, "mine.npz"
    for classes in (3, np.array([3], "uint8")):
        np.savez(tmp_path / path, x=x, y=y, classes=classes)
        assert from_npz(tmp_path / path).classes == 3
    words = ("--data", path, "--clients", 2, "--rounds", 1, "--model", "linear", "--partition")
    done = cli("run", "fedavg", *words, "iid", "--engine", "serial", "--json")
    assert done.code == 0 and json.loads(done.out)["parameters"] == 3 * (3 + 1)
    np.savez(tmp_path / path, x=np.ones((40, 4), int), y=np.ones((40, 4), int), classes=2)
    assert from_npz(tmp_path / path).y.dtype == torch.int64, "zeros and ones are classes of tokens"
    for wrong in ([2, 3], 2.5, "two"):
        np.savez(tmp_path / path, x=x, y=y, classes=wrong)
        with pytest.raises(UserError, match=r"classes of '.*mine\.npz' must be one whole number"):
            from_npz(tmp_path / path)
    np.savez(tmp_path / path, x=x, y=y + 5, classes=3)
    assert "fedhelix: " in cli("run", "fedavg", "--data", path).err


def test_a_file_that_is_no_npz_is_named(tmp_path):
    (tmp_path / "mine.npz").write_text("no")
    with pytest.raises(UserError, match=r"mine\.npz.*cannot be read"):
        from_npz(tmp_path / "mine.npz")
    with pytest.raises(UserError, match="there is no file"):
        from_npz(tmp_path / "other.npz")


@pytest.mark.parametrize("harm", ["nothing", "npy", "middle"])
def test_a_damaged_npz_is_named(tmp_path, harm):
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(50, 4)), y=np.arange(50) % 2)
    content = path.read_bytes()
    if harm == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(b"" if harm == "nothing" else content[:200] + bytes(100) + content[300:])
    with pytest.raises(UserError, match=r"mine\.npz' cannot be read as an npz file"):
        from_npz(path)


def test_another_file_is_no_data_set(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match=r"npz file: it is none; np\.savez"):
        from_npz(tmp_path / "text.npz")
    with pytest.raises(
        UserError, match=r"'towns\.csv' is no data set; a file of your own is an npz"
    ):
        load("towns.csv")
    with pytest.raises(UserError, match=r"there is no file 'towns\.npz'"):
        load("towns.npz")
    with pytest.raises(
        UserError, match=r"by name; fedhelix\.data\.from_npz\('.*text\.npz'\) reads"
    ):
        load(str(tmp_path / "text.npz"))


@pytest.mark.parametrize(
    "wrapped",
    [lambda part: part, lambda part: DataLoader(part, 4), lambda part: part.tensors],
)
def test_a_client_with_a_training_and_a_test_set_is_told_how_to_give_them(wrapped):
    part = wrapped(TensorDataset(torch.randn(8, 3), torch.arange(8) % 2))
    with pytest.raises(
        UserError, match=r"client 0 .*pair of data sets; .*from_clients\(clients, te"
    ):
        from_clients([(part, part)])


def test_labels_that_count_something_else_are_no_classes():
    with pytest.raises(
        UserError, match="labels go up to 1000000000, but there are only 40 samples"
    ):
        from_arrays(
            np.zeros((40, 2), np.float32), np.r_[np.zeros(20), np.full(20, 10**9)].astype(int)
        )


def test_labels_that_begin_at_one_are_noted_and_kept():
    x, y = np.random.default_rng(0).random((40, 3)), 1 + np.arange(40) % 3
    said = r"labels of 'data' begin at 1, so 1 of the 4 classes has no samples; .*classes=4"
    for make in (lambda: from_arrays(x, y), lambda: from_clients([(x, y), (x, y)])):
        with pytest.warns(UserWarning, match=said):
            data = make()
        assert data.classes == 4 and data.y.unique().tolist() == [1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert from_arrays(x, y, classes=4).classes == 4
        assert from_arrays(x, y - 1).classes == 3
        assert from_arrays(x, y.astype(str)).labels == ("1", "2", "3")


def test_owners_follow_the_hold_out_and_must_be_complete():
    x, y = np.random.default_rng(0).random((40, 3), dtype=np.float32), np.arange(40) % 2
    data = from_arrays(x, y, owners=np.arange(40) // 10)
    assert len(data.owners) == len(data.x)
    with pytest.raises(UserError, match="3 owners for 40 samples"):
        from_arrays(x, y, owners=[1, 2, 3])


def test_every_owner_is_a_client_and_is_tested_on_its_own_samples():
    """One in five samples of each owner is held out; a single sample is trained on."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(40), [1] * 30 + [10] * 10)
    x, y = np.stack([owners, draw.normal(size=130)], axis=1), draw.integers(0, 2, 130)
    fed_data = from_arrays(x, y, owners=owners, name="owned")
    with pytest.warns(UserWarning, match="30 of the 40 clients of 'owned' have no test samples"):
        splits = partitions.natural().split(fed_data, seed=0)
    assert len(splits) == 40
    assert [len(split.test) for split in splits] == [0] * 30 + [2] * 10
    for owner, split in enumerate(splits):
        assert (fed_data.x_test[split.test, 0] == owner).all()
    with pytest.raises(UserError, match="too few samples of each owner for a test pool"):
        from_arrays(x[:30], y[:30], owners=owners[:30])


@pytest.mark.parametrize("given", ["x", "y"])
def test_a_value_that_is_no_number_is_named_by_its_own_row(given):
    arrays = {"x": np.ones((50, 2)), "y": np.linspace(0, 1, 50)}
    arrays[given][37] = np.nan
    with pytest.raises(UserError, match=f"{given} of 'table' has nan in sample 37;"):
        from_arrays(**arrays, name="table")


class Learned(Squares):
    """Inputs with a gradient, as a network makes them, and targets in bfloat16."""

    def __getitem__(self, index: int):
        x = torch.full((3,), float(index), requires_grad=True)
        return x, torch.tensor(float(index % 3), dtype=torch.bfloat16, requires_grad=True)


def test_tensors_with_gradients_and_in_bfloat16_are_read():
    x, y = torch.rand(20, 3, requires_grad=True), torch.arange(20.0, requires_grad=True)
    plain = from_arrays(x.detach().numpy(), y.detach().numpy())
    for given in ((x, y), (list(x), list(y)), ([list(row) for row in x], y.bfloat16())):
        data = from_arrays(*given)
        assert torch.equal(data.x, plain.x) and torch.equal(data.y, plain.y)
        assert not data.x.requires_grad and data.y.dtype == torch.float32
    half = from_arrays(list(x.bfloat16()), [0, 1] * 10)
    assert half.x.dtype == torch.float32 and half.classes == 2
    ragged = from_arrays([row[: 1 + place % 3] for place, row in enumerate(x)], [0, 1] * 10)
    assert ragged.fields.shapes == ((3,), (3,))
    clients = from_clients([Learned(10), TensorDataset(x, y.bfloat16())])
    assert clients.y.dtype == torch.float32 and len(clients.x) == 24
    with pytest.raises(UserError, match="a sparse tensor is no array; its to_dense"):
        from_arrays(x, y.to_sparse())


@pytest.mark.parametrize(("row", "wrong", "classes"), [(70, -1, "auto"), (10, 9, 2), (99, -3, 2)])
def test_a_wrong_label_has_the_users_row(row, wrong, classes):
    x, y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
    y[row] = wrong
    named = f"y of 'data' has labels outside the classes: {wrong} at index {row},"
    with pytest.raises(UserError, match=named):
        from_arrays(x, y, classes=classes)
    with pytest.raises(UserError, match=named):
        from_arrays(x, y, classes=classes, owners=np.arange(100) % 5)
    right = (x, np.arange(100) % 2)
    for clients, whose in (([right, (x, y)], "1"), ({"ulm": right, "bern": (x, y)}, "bern")):
        named = f"y of client {whose} of 'data' has labels outside .*: {wrong} at index {row},"
        with pytest.raises(UserError, match=named):
            from_clients(clients, classes=classes)
    with pytest.raises(UserError, match=f"y of test part 1 of 'data' has .* at index {row},"):
        from_clients([right, right], [right, (x, y)], classes=classes)
