"""Owners keep their names: text, or whole numbers; samples without one are refused."""

import warnings

import numpy as np
import pandas as pd
import pytest

from fedhelix import Federation, UserError, from_arrays, from_clients, from_table, partition
from fedhelix.data import from_hub, from_npz
from fedhelix.data.owners import read_owners
from fedhelix.federation.predictions import number_of

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(120, 2)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
SITES = np.arange(120) % 12


def federation(data, split=None, **more):
    usual = {"engine": "serial", "model": "linear", "kernels": "onednn", "epochs": 1}
    return Federation(data, split, method="local", **usual | more)


def table(owners, rows=slice(None)):
    return pd.DataFrame(X, columns=["u", "v"]).assign(label=Y, site=owners)[rows]


@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_whole_number_means_the_owner_of_that_number(first):
    owners = SITES + first
    for data, split in [
        (table(owners), partition.natural("site")),
        (from_arrays(X, Y, owners=owners), None),
        (from_arrays(X, Y, X, Y), partition.natural(owners)),
        ({one: (X[owners == one], Y[owners == one]) for one in owners[11::-1]}, None),
    ]:
        fed = federation(data, split)
        names = fed.names or tuple(range(12))
        assert names == tuple(range(first, first + 12))
        mine = fed.data.x[fed.splits[2].train[0]].numpy()
        assert SITES[(mine == X).all(1)] == [2]
        for client in (first + 2, str(first + 2), np.int64(first + 2)):
            assert number_of(client, 12, fed.names) == 2
        for stranger in range(first):
            with pytest.raises(UserError, match=f"unknown client '{stranger}'"):
                number_of(stranger, 12, fed.names)
        with pytest.raises(UserError, match=f"client '?{first + 12}'?;"):
            number_of(first + 12, 12, fed.names)


def test_a_model_is_that_of_the_named_owner():
    flipped = from_arrays(X, np.where(SITES == 2, 1 - Y, Y), owners=SITES + 1)
    run = federation(flipped, lr=1.0).fit(5, quiet=True)
    right = [(run.predict(X, client) == Y).mean() for client in range(1, 13)]
    assert np.argmin(right) == 2 and right[2] < 0.3


@pytest.mark.parametrize("kind", [int, float, str, object, "Int64", "uint8", "category"], ids=str)
def test_whole_numbers_of_any_type_are_whole_numbers(kind):
    owners = read_owners(pd.Series(SITES).astype(kind), "ids")
    assert owners.dtype == np.int64 and owners.tolist() == SITES.tolist()


def test_names_of_text_stay_and_numbers_are_places():
    owners = np.array(["7", "ulm", "08"])[np.arange(120) % 3]
    run = federation(from_arrays(X, Y, owners=owners)).fit(1, quiet=True)
    assert run.federation.names == ("08", "7", "ulm")
    outputs = [run.predict(X, client, raw=True).tolist() for client in (0, "08", 7, "7", 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3] == outputs[4] != outputs[5]
    assert read_owners(["1" * 30, "2"], "ids").dtype.kind == "U"


def test_two_clients_cannot_have_one_name():
    with pytest.raises(UserError, match="two clients of 'data' have one name"):
        from_clients({1: (X, Y), "1": (X, Y)})


@pytest.mark.parametrize("least", [5, "natural:5"])
def test_small_owners_can_be_left_out(least):
    owners = np.repeat(["a", "b", "c", "d", "e"], [40, 4, 36, 1, 39])
    split = least if isinstance(least, str) else partition.natural(min_samples=least)
    said = "2 of the 5 owners of 'data' have fewer than 5 training samples and are left out."
    tested = from_arrays(X, Y, X, Y, owners=owners, owners_test=owners)
    for data in (tested, from_arrays(X, Y, X, Y, owners=owners)):
        with pytest.warns(UserWarning, match=said):
            fed = federation(data, split, newcomers=1, newcomers_after=1, newcomers_classes=0)
        assert fed.names == ("a", "c", "e") and fed.known == 2
        for name, one in zip(fed.names, fed.splits, strict=True):
            assert set(owners[[*one.train, *one.valid]]) == {name}
            assert data is not tested or set(owners[one.test]) == {name}
    with pytest.raises(UserError, match=r"no owner of 'data' has 50 .* the most are 40, so lower"):
        federation(tested, partition.natural(min_samples=50))


def test_owners_of_the_hub_have_names():
    table = pd.DataFrame({"image": list(X), "label": Y, "writer": ["anna", "karl"] * 60})
    assert federation(from_hub(table, "writer")).names == ("anna", "karl")
    with pytest.raises(UserError, match=r"column 'writer' of 'hub' .* row 1"):
        from_hub(table.assign(writer=["anna", None] * 60), "writer")


@pytest.mark.parametrize("missing", [np.nan, None, pd.NA, pd.NaT, "", "nan"], ids=repr)
@pytest.mark.parametrize("owners", [[1, 2, 3, 4] * 30, ["a", "b"] * 60], ids=["numbers", "texts"])
def test_a_sample_without_an_owner_is_refused(owners, missing, tmp_path):
    lacking = [*owners[:5], missing, *owners[6:]]
    forms = [lacking, pd.Series(lacking, dtype=object), np.array(lacking, dtype=object)]
    if missing is np.nan:
        np.savez(tmp_path / "own.npz", x=X, y=Y, owners=np.array(lacking))
        forms.append(np.array(lacking))
        with pytest.raises(UserError, match=r"^sample 5 of 'own' has no owner"):
            from_npz(tmp_path / "own.npz")
    for form in forms:
        with pytest.raises(UserError, match=r"^sample 5 of 'data' has no owner; remove samples"):
            from_arrays(X, Y, owners=form)
        with pytest.raises(UserError, match=r"^sample 5 of the test part of 'data' has no owner"):
            from_arrays(X, Y, X, Y, owners=owners, owners_test=form)
        with pytest.raises(UserError, match=r"^sample 5 of ids has no owner"):
            partition.natural(form)


def test_owners_of_another_shape_are_refused():
    with pytest.raises(UserError, match=r"must be one name for each sample, not of shape \(120, 1"):
        from_arrays(X, Y, owners=SITES[:, None])
    with pytest.raises(UserError, match="'data' has 5 owners for 120 samples"):
        from_arrays(X, Y, owners=SITES[:5])
    with pytest.raises(UserError, match="owners_test of 'data' needs owners, x_test and y_test"):
        from_arrays(X, Y, owners=SITES, owners_test=SITES)


def test_owners_are_tested_on_their_own_rows_of_the_test_table(tmp_path):
    whole = table(SITES % 2)
    whole["label"] = np.where(whole.site, 1 - Y, Y)
    train, test = whole[:80], whole[80:]
    for data in (
        from_table(train, owner="site", test=test),
        from_table({"train": train, "test": test}, owner="site"),
        from_arrays(X[:80], train.label, X[80:], test.label,
                    owners=train.site, owners_test=test.site),
    ):  # fmt: skip
        fed = federation(data)
        for site, split in enumerate(fed.splits):
            assert np.array_equal(np.sort(split.test), np.flatnonzero(test.site == site))
    np.savez(
        tmp_path / "own.npz", x=X[:80], y=Y[:80], owners=SITES[:80],
        x_test=X[80:], y_test=Y[80:], owners_test=SITES[80:],
    )  # fmt: skip
    assert from_npz(tmp_path / "own.npz").owners_test.tolist() == SITES[80:].tolist()


def test_a_test_table_without_owners_is_shared_and_strangers_are_refused():
    train, test = table(SITES % 2, slice(80)), table(SITES % 2, slice(80, None))
    shared = from_table(train, owner="site", test=test.drop(columns="site"))
    assert shared.owners_test is None
    with pytest.raises(UserError, match="'5' of 'table' has test samples but no training samples;"):
        federation(from_table(train, owner="site", test=test.assign(site=5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed = federation(
            from_table(train.assign(site=["1", "a"] * 40), owner="site", test=test.assign(site=1))
        )
    assert mixed.names == ("1", "a") and [len(split.test) for split in mixed.splits] == [40, 0]
