"""A run goes on, or is loaded, with the data that it had."""

import json

import numpy as np
import pytest

from fedhelix import Federation, UserError, from_arrays, load_run

X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)


def federation(x=X, **more):
    usual = {"engine": "serial", "model": "linear", "kernels": "onednn", "epochs": 1}
    owners = np.arange(60) % 2
    return Federation(from_arrays(x, Y, X, Y, owners=owners), **usual | more)


@pytest.mark.parametrize(
    "other", [3 * X + 1, X[::-1], X + 0.1], ids=["scaled", "other order", "moved"]
)
def test_other_data_are_refused(tmp_path, other):
    federation().fit(1, out=tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"x is not that of .*; give the data of the run"):
        load_run(tmp_path, federation(other))
    with pytest.raises(UserError, match=r"x is not that of .*; give the data of the run"):
        federation(other).fit(2, out=tmp_path, resume=True, quiet=True)
    assert federation(X * (1 + 1e-6)).fit(2, out=tmp_path, resume=True, quiet=True).records


def test_a_run_that_says_nothing_about_its_data_is_loaded(tmp_path):
    run = federation().fit(1, out=tmp_path, quiet=True)
    known = json.loads((tmp_path / "clients.json").read_text(encoding="utf-8"))
    del known["moments"]
    with run.folder:
        run.folder.write_clients(known)
    assert load_run(tmp_path, federation()).records


def test_another_partition_of_a_run_of_python_is_no_changed_file(tmp_path):
    federation(partition="iid", clients=2).fit(1, out=tmp_path, quiet=True)
    with pytest.raises(UserError, match="than they have now; give the same data, partition and"):
        load_run(tmp_path, federation(partition="shard:1", clients=2))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (3 * X + 1, ": its mean and standard deviation were .* and .*, and are .* and .*; give"),
        (X[::-1], ": single values, or the order of its samples or columns, differ; give"),
    ],
)
def test_what_differs_is_said(other, sentence, tmp_path):
    federation().fit(1, out=tmp_path, quiet=True)
    with pytest.raises(UserError, match=sentence):
        load_run(tmp_path, federation(other))


@pytest.mark.parametrize("change", ["columns", "value", "labels"])
def test_data_that_differ_in_a_detail_are_refused(change, tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 4)).astype("float32")
    y, owners = (x[:, 0] > 0).astype(int), np.arange(300) % 3

    def made(x, y):
        return Federation(from_arrays(x, y, owners=owners), model="linear", seed=0)

    made(x, y).fit(1, quiet=True, out=tmp_path / "run")
    load_run(tmp_path / "run", made(x, y))
    other, labels = x.copy(), y.copy()
    if change == "columns":
        other = x[:, [0, 1, 3, 2]]
    elif change == "value":
        other[:, 2] += (np.arange(300) == 7) * 5
        other[0, 2] += 1
    else:
        labels[[0, 3, 6, 9]] = 1 - labels[[0, 3, 6, 9]]
    with pytest.raises(UserError, match=r"is not that of .*; give the data of the run"):
        load_run(tmp_path / "run", made(other, labels))
