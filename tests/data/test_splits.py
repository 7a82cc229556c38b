"""Clients that come with a train and a test table, as `train_test_split` makes them."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from fedhelix import Federation, UserError, from_clients
from fedhelix.data import from_hub

DRAW = np.random.default_rng(0)
TABLE = pd.DataFrame(DRAW.normal(size=(40, 2)), columns=["u", "v"]).assign(label=[0, 1] * 20)


def client(at):
    return {"train": TABLE[at : at + 12], "test": TABLE[at + 12 : at + 20]}


def test_the_splits_of_a_client_are_its_training_and_test_part():
    for data in ([client(0), client(20)], {"bern": client(0), "ulm": client(20)}):
        fed = Federation(data, model="linear", engine="serial")
        assert [len(split.test) for split in fed.splits] == [8, 8]
        assert len(fed.data.x) == 24
        own = TABLE[["u", "v"]].to_numpy("float32")[32:]
        assert np.array_equal(fed.data.x_test[np.sort(fed.splits[1].test)], own)


def test_data_sets_of_hugging_face_are_split_too():
    datasets = pytest.importorskip("datasets")
    both = datasets.Dataset.from_pandas(TABLE).train_test_split(0.2, seed=0)
    assert len(from_clients([both, both]).x_test) == 16
    rows = {"image": DRAW.normal(size=(8, 3)).tolist(), "label": [0, 1] * 4, "w": list("ab") * 4}
    part = datasets.Dataset.from_dict(rows)
    owned = datasets.DatasetDict({"train": part, "test": part})
    hub = from_hub(owned, "w")
    assert sorted(set(hub.owners)) == ["a", "b"] and len(hub.x) == 8
    assert torch.equal(hub.x_test, torch.tensor(rows["image"]))
    assert "".join(hub.owners_test) == "ab" * 4
    assert len(from_hub(owned, "w", split="test").x) == 6  # a fifth of each owner's is held out
    with pytest.raises(UserError, match="unknown split 'valid'; there are: test, train"):
        from_hub(owned, "w", split="valid")


def test_a_split_of_a_name_may_be_a_part_of_it(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in (("train", 40), ("test", 8)):
        TABLE.head(rows).assign(who=["a", "b"] * (rows // 2)).to_csv(data / f"{name}.csv")
    read = partial(from_hub, str(data), "who", "u", "label")
    assert (len(read().x), len(read().x_test)) == (40, 8)
    half = read(split="train[:50%]")  # has no test part, so a fifth is held out
    assert (len(half.x), len(half.x_test)) == (16, 4)


def test_other_splits_are_named():
    three = {"train": TABLE, "validation": TABLE, "test": TABLE}
    with pytest.raises(UserError, match="'data' are train, validation, test; give train and test "):
        from_clients([three, three])
    lone = {"train": TABLE, "valid": TABLE}
    with pytest.raises(UserError, match="the splits of client 1 of 'data' are train, valid, but"):
        from_clients([client(0), lone])
    with pytest.raises(UserError, match="the splits of client 1 of 'data' are none, but some"):
        from_clients([client(0), TABLE])
    with pytest.raises(UserError, match="test part of 'data' has the splits train, valid, each a"):
        from_clients([TABLE, TABLE], test=lone)
    with pytest.raises(UserError, match="client 0 of 'data' has the splits train, test, each"):
        from_clients([client(0)], test=TABLE)
