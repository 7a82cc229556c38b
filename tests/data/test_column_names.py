"""Columns that are numbered, and rows of Hugging Face that are not as they are stored."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_clients, from_table, partition

ROWS = 60


@pytest.fixture
def stored():
    """A data set of Hugging Face with two features, a label and an owner."""
    datasets = pytest.importorskip("datasets")
    draw = np.random.default_rng(0)
    return datasets.Dataset.from_dict(
        {
            "a": draw.normal(size=ROWS).tolist(),
            "b": draw.normal(size=ROWS).tolist(),
            "label": draw.integers(0, 2, ROWS).tolist(),
            "who": [f"site {place % 3}" for place in range(ROWS)],
        }
    )


def pairs(batch):
    """A transform that renames and joins columns."""
    return {"values": [list(one) for one in zip(batch["a"], batch["b"], strict=True)],
            "labels": batch["label"], "who": batch["who"]}  # fmt: skip


def with_sum(batch):
    """A transform that adds a column."""
    return {**batch, "sum": [a + b for a, b in zip(batch["a"], batch["b"], strict=True)]}


def test_a_transform_decides_about_the_columns(stored):
    table = from_table(stored.with_transform(pairs), owner="who")
    assert table.columns == ("values",) and table.x.shape == (48, 2)
    both = np.stack([stored["a"], stored["b"]], 1)
    assert all(np.isclose(both, row, atol=1e-6).all(1).any() for row in table.x.numpy())
    added = from_table(stored.remove_columns("who").with_transform(with_sum))
    assert added.columns == ("a", "b", "sum")
    assert torch.allclose(added.x[:, 2], added.x[:, 0] + added.x[:, 1], atol=1e-6)


def test_clients_and_predictions_with_a_transform(stored):
    def shown(batch):
        return {name: values for name, values in pairs(batch).items() if name != "who"}

    parts = [stored.shard(3, place).with_transform(shown) for place in range(3)]
    run = Federation(parts, model="linear").fit(rounds=1, quiet=True)
    values = pairs(stored[:4])["values"]
    assert (run.predict(parts[0].select(range(2))) == run.predict(parts[0][:2]["values"])).all()
    assert len(run.predict(values)) == 4
    whole = Federation(stored.with_transform(pairs), partition.natural("who"), model="linear")
    assert whole.names == ("site 0", "site 1", "site 2")


def test_a_format_with_some_columns(stored):
    table = from_table(stored.with_format("torch", columns=["b", "label"]))
    assert table.columns == ("b",)


def test_a_frame_with_numbered_columns():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 3)), draw.integers(0, 2, ROWS)
    frame = pd.DataFrame(np.c_[x, y, np.arange(ROWS) % 2]).astype({3: int, 4: int})
    data = from_table(frame, target=3, owner=4)
    assert data.columns == ("0", "1", "2") and data.outputs == 2
    assert from_table(frame, target=np.int64(3), inputs=[2, 0]).columns == ("2", "0")
    federation = Federation(
        frame.rename(columns={3: "label"}), partition.natural(4), model="linear"
    )
    run = federation.fit(rounds=1, quiet=True)
    assert (run.predict(frame[[0, 1, 2]][:9]) == run.predict(x[:9])).all()
    assert run.onboard(frame[[2, 1, 0, 3]].rename(columns={3: "label"})) == 2
    newest = federation.splits[2].train
    assert all(np.isclose(x, row, atol=1e-5).all(1).any() for row in federation.data.x[newest])


def test_a_dictionary_is_no_client():
    x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
    with pytest.raises(UserError, match=r"a dictionary of new; give what one client has: a pair"):
        from_clients([{"new": (x, y)}, {"old": (x, y)}])


class Mixed(nn.Module):
    """Numbers and a category."""

    def __init__(self):
        super().__init__()
        self.known, self.last = nn.Embedding(5, 2), nn.Linear(5, 2)

    def forward(self, numbers, category):
        return self.last(torch.cat([numbers, self.known(category)], 1))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_one_whole_number_per_sample_is_a_part(engine):
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=(ROWS, 3)).astype("float32")
    category = draw.integers(0, 5, ROWS)
    data = from_arrays({"category": category, "numbers": numbers}, category % 2)
    run = Federation(data, "iid", clients=2, model=Mixed, engine=engine, lr=0.5).fit(
        rounds=8, quiet=True
    )
    assert run.summary["final_accuracy"] > 0.8
    with pytest.raises(UserError, match=r"index|range|embedding"):
        Federation(
            from_arrays({"category": category + 3, "numbers": numbers}, category % 2),
            "iid", clients=2, model=Mixed,
        )  # fmt: skip


def patients(seed, kinds=("healthy", "ill")):
    draw = np.random.default_rng(seed)
    table = pd.DataFrame(draw.normal(size=(ROWS, 2)).astype("float32"), columns=["age", "bmi"])
    return table.assign(diagnosis=draw.choice(kinds, ROWS))


def test_a_client_may_be_what_from_table_returns():
    ulm, bern = patients(0), patients(1, ("ill", "unknown"))
    read = {
        name: from_table(table, target="diagnosis") for name, table in (("u", ulm), ("b", bern))
    }
    data = from_clients(read)
    assert data.labels == ("healthy", "ill", "unknown") and data.columns == ("age", "bmi")
    assert torch.equal(data.x[data.owners == "b"], read["b"].x)
    assert torch.equal(data.x_test[data.owners_test == "b"], read["b"].x_test)
    assert torch.equal(data.y[data.owners == "b"], 1 + read["b"].y)  # ill is 0 there, and 1 here
    assert len(from_clients(list(read.values()), test=read["b"]).x) == 2 * ROWS
    with pytest.raises(UserError, match="client 1 of 'data' has the columns bmi, age, but client"):
        from_clients([read["u"], from_table(bern, target="diagnosis", inputs=["bmi", "age"])])


def test_a_newcomer_may_be_what_from_table_returns():
    federation = Federation(from_table(patients(0), target="diagnosis"), "iid", clients=2)
    run = federation.fit(1, quiet=True)
    new = patients(1)
    number = run.onboard(from_table(new, target="diagnosis", inputs=["bmi", "age"]))
    split, pool = run.federation.splits[number], run.federation.engine.setup.data
    mine = torch.cat([pool.x[split.train], pool.x_test[split.test]])
    known = new[["age", "bmi"]].to_numpy()
    assert np.array_equal(np.sort(mine.numpy(), 0), np.sort(known, 0))


def test_a_client_that_is_a_data_set_has_no_clients():
    table = patients(0)
    owners = from_table(table.assign(who=np.arange(ROWS) % 2), target="diagnosis", owner="who")
    with pytest.raises(UserError, match="client 0 of 'data' is a data set with owners, which one"):
        from_clients([owners])
    scaled = from_arrays(table[["age", "bmi"]], np.arange(ROWS) % 2, mean=1, std=2)
    with pytest.raises(UserError, match="a data set with mean and std, which one client cannot"):
        from_clients([scaled])


@pytest.mark.parametrize("name", ["age", 0])
def test_one_column_needs_no_list(name):
    frame = patients(0).rename(columns={"age": name})
    assert from_table(frame, target="diagnosis", inputs=name).columns == (str(name),)


def test_the_target_is_no_input():
    table = pd.DataFrame({"temp": [1.0, 2.0, 3.0, 4.0], "life": [0.5, 1.5, 2.5, 3.5]})
    with pytest.raises(UserError, match=r"^column 'life' of 'table' is the target, so that it"):
        from_table(table, target="life", inputs=["temp", "life"])
