"""Samples and targets of any form, through whole federations on every engine."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset

from fedhelix import Federation, UserError, from_arrays, from_clients, from_table, partition
from fedhelix.core.metrics import auc, iou
from fedhelix.core.tree import flatten

DRAW = np.random.default_rng(0)


def fit(data, model, rounds=2, engine="serial", **more):
    usual = {"cohort": 3, "epochs": 1, "batch_size": 8, "kernels": "onednn", "lr": 0.05}
    split = more.pop("partition", partition.iid(4))
    fed = Federation(data, split, model=model, engine=engine, **usual | more)
    run = fed.fit(rounds, quiet=True)
    fed.close()
    return run


class Reader(nn.Module):
    """The mean of embedded tokens, as far as the mask says."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, mask):
        mask = mask[..., None].float()
        mean = (self.embedding(x) * mask).sum(1) / mask.sum(1).clamp_min(1)
        return self.head(torch.relu(self.hidden(mean)))


class Named(Reader):
    """The same, as Hugging Face's networks are called, with a score of the sample added."""

    def forward(self, input_ids, attention_mask, score):
        outputs = super().forward(input_ids, attention_mask)
        return SimpleNamespace(logits=outputs + score)


class Careless(Reader):
    """It takes whatever it is given, as Hugging Face's networks do, and uses the tokens."""

    def forward(self, input_ids, attention_mask, **kwargs):
        return super().forward(input_ids, attention_mask)


class Greedy(Reader):
    """The same, but it uses what it is given."""

    def forward(self, input_ids, attention_mask, **kwargs):
        return super().forward(input_ids, attention_mask) + kwargs["score"]


class Tagger(nn.Module):
    """Outputs for every token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        return self.head(self.embedding(x))


def sequences(count=48):
    """Token sequences of different lengths; the class is whether the first token is large."""
    x = [DRAW.integers(0, 20, DRAW.integers(2, 9)) for _ in range(count)]
    return x, np.array([int(one[0] >= 10) for one in x])


def parts(count=48):
    return {
        "input_ids": DRAW.integers(0, 20, (count, 5)),
        "attention_mask": np.ones((count, 5), dtype=bool),
        "score": DRAW.normal(size=(count, 1)),
    }, DRAW.integers(0, 2, count)


def test_a_network_may_use_parts_that_it_does_not_name():
    assert fit(from_arrays(*parts()), Greedy, rounds=1).records


@pytest.mark.parametrize("form", ["ragged", "parts", "tokens"])
def test_batched_agrees_on_every_form(form):
    x, y = parts() if form == "parts" else sequences()
    if form == "tokens":
        y = [one % 3 for one in x]
    data = from_arrays(x, y)
    model = {"ragged": Reader, "parts": Named, "tokens": Tagger}[form]
    one, other = (fit(data, model, engine=engine) for engine in ("serial", "batched"))
    for name, value in flatten(one.state.server).items():
        assert torch.allclose(value, flatten(other.state.server)[name], atol=1e-5), name
    assert one.records[-1]["accuracy"] == pytest.approx(other.records[-1]["accuracy"])


def test_parallel_agrees_on_several_parts():
    data = from_arrays(*parts())
    one, other = (fit(data, Named, engine=engine) for engine in ("serial", "parallel"))
    for name, value in flatten(one.state.server).items():
        assert torch.equal(value, flatten(other.state.server)[name]), name


def test_parts_come_back_as_they_were():
    x, y = parts()
    data = from_arrays(x, y, x, y)
    back = data.prepare(data.x)
    assert {name: part.dtype for name, part in back.items()} == {
        "input_ids": torch.int64, "attention_mask": torch.bool, "score": torch.float32
    }  # fmt: skip
    for name, part in x.items():
        assert np.allclose(back[name].numpy(), part)
    nested = data.prepare(data.x[torch.tensor([[0, 1], [2, 3]])])
    assert nested["input_ids"].shape == (2, 2, 5)
    assert data.shape == {"input_ids": (5,), "attention_mask": (5,), "score": (1,)}
    assert "input_ids 5 int64" in repr(data)


def test_padding_changes_no_output():
    x, y = sequences()
    model = Reader()
    data = from_arrays(x, y, x, y)
    tokens, mask = data.prepare(data.x)
    assert mask.sum(1).tolist() == [len(one) for one in x]
    for place in (0, 7):
        alone = torch.from_numpy(x[place])[None]
        expected = model(alone, torch.ones_like(alone, dtype=torch.bool))
        found = model(tokens[place : place + 1], mask[place : place + 1])
        assert torch.allclose(found, expected)


def test_clients_with_sequences_of_different_lengths():
    clients = [sequences(12), (DRAW.integers(0, 20, (12, 3)), DRAW.integers(0, 2, 12))]
    data = from_clients(clients)
    assert data.fields.names == ("0", "1") and data.fields.shapes[0] == data.fields.shapes[1]
    assert fit(data, Reader, partition="natural", cohort=2).records[-1]["accuracy"] >= 0


@pytest.mark.parametrize("method", ["gene-fl", "ifca", "clustered", "knn-per", "fedcp", "gpfl"])
def test_methods_that_look_at_samples_take_parts(method):
    assert fit(from_arrays(*parts()), Named, 1, method=method).records


class Looking(Named):
    """As networks of `transformers`, it looks at the mask's values, which PyTorch cannot stack."""

    def forward(self, input_ids, attention_mask, score):
        if bool(attention_mask.all()):
            attention_mask = torch.ones_like(attention_mask)
        return super().forward(input_ids, attention_mask, score)


@pytest.mark.parametrize("method", ["gene-fl", "ifca", "dp-sgd"])
def test_networks_that_look_at_values_give_the_gradients_of_samples(method):
    data = from_arrays(*parts())
    one, other = (fit(data, model, 1, method=method) for model in (Named, Looking))
    torch.testing.assert_close(
        flatten(one.state.server), flatten(other.state.server), atol=1e-5, rtol=0
    )


def test_several_labels_may_hold():
    x = DRAW.normal(size=(90, 6)).astype("float32")
    data = from_arrays(x, (x[:, :4] > 0).astype(int))
    assert data.y.dtype == torch.bool and data.outputs == 4 and data.classes is None
    for engine in ("serial", "batched"):
        run = fit(data, "linear", 6, engine=engine, lr=0.5, epochs=5)
        assert run.records[-1]["score"] > 0.85  # F1


def test_segmentation():
    x = DRAW.normal(size=(60, 1, 6, 6)).astype("float32")
    data = from_arrays(x, (x[:, 0] > 0).astype(int) + (x[:, 0] > 1))
    assert data.y.shape[1:] == (6, 6) and data.outputs == 3
    run = fit(data, nn.Conv2d(1, 3, 3, padding=1), 10, metric=iou, lr=0.5, epochs=4)
    assert run.records[-1]["score"] > run.records[0]["score"] > 0
    assert run.records[-1]["score"] > 0.5


def test_vectors_and_whole_numbers_are_regressions():
    x = DRAW.normal(size=(80, 3)).astype("float32")
    vectors = from_arrays(x, x @ DRAW.normal(size=(3, 2)))
    assert fit(vectors, "linear", 20).records[-1]["score"] > 0.9
    whole = from_arrays(x, (100 * x[:, 0]).round().astype(int), classes=None)
    assert whole.y.dtype == torch.float32 and whole.classes is None
    with pytest.raises(UserError, match="classes=None makes it a regression"):
        from_arrays(x, np.arange(80))


def test_text_labels_have_names():
    x, names = DRAW.normal(size=(40, 2)), np.array(["cat", "dog"])[np.arange(40) % 2]
    for data in (from_arrays(x, names), from_clients([(x[:20], names[:20]), (x[20:], names[20:])])):
        assert data.labels == ("cat", "dog") and data.classes == 2


class Waves(TorchDataset):
    """A torch data set with a transform."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.sin(torch.arange(12.0) * (1 + index % 2)), index % 2


def test_a_torch_data_set_is_one_pool():
    run = fit(Waves(), "mlp", 3, epochs=10)
    assert run.federation.data.classes == 2 and run.records[-1]["accuracy"] > 0.5


def frame(rows=60):
    table = pd.DataFrame(DRAW.normal(size=(rows, 3)), columns=["a", "b", "c"])
    table["town"] = np.array(["oslo", "lyon", "rome"])[np.arange(rows) % 3]
    table["label"] = np.where(table.a > 0, "high", "low")
    return table


def test_a_data_frame_with_owners():
    run = fit(frame(), "linear", 2, partition=partition.natural("town"))
    data = run.federation.data
    assert data.shape == (3,) and data.labels == ("high", "low")
    assert run.federation.clients == 3
    for split, town in zip(run.federation.splits, ("lyon", "oslo", "rome"), strict=True):
        assert set(data.owners[split.train]) == set(data.owners_test[split.test]) == {town}


YES = [0, 1] * 30


class Keys(TorchDataset):
    """Samples that are dictionaries, with these keys in turn."""

    def __init__(self, *keys):
        self.keys = keys

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return dict.fromkeys(self.keys[index % len(self.keys)], 1.0) | {"label": index % 2}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: from_table(frame(), "lable"), "did you mean 'label'"),
        (lambda: from_table(frame()[["a", "b"]]), "which column of 'table' is to be predicted"),
        (lambda: from_table(frame().assign(y=1, label=2)), "label and y of 'table' could all be"),
        (lambda: from_table(frame()), "column 'town' of 'table' holds text"),
        (
            lambda: fit(from_arrays(*parts()), Reader),
            "does not take the part 'input_ids' of a sample; it takes .*give the parts these names",
        ),
        (
            lambda: fit(from_arrays(*parts()), Careless),
            "ignores the part 'score' of a sample; leave",
        ),
        (lambda: fit(from_arrays(*parts()), "mlp"), "need a model of your own"),
        (lambda: fit(from_arrays(*parts()), Named, augment=True), "augment changes samples of"),
        (
            lambda: from_clients([parts(), ({"input_ids": np.zeros((4, 5))}, [0, 1, 0, 1])]),
            "parts input_ids, attention_mask, score, not .*; give every client the same ones",
        ),
        (
            lambda: from_clients([parts(4), (np.ones((4, 5)), YES[:4])]),
            "attention_mask, score, not one part without a name; give every client the same ones",
        ),
        (
            lambda: from_clients([Keys("ab", "ac")]),
            "sample 1 has the parts a, c, label, but the first a, b, label; give all samples",
        ),
        (
            lambda: from_clients([Keys("ab"), Keys("ac")]),
            "client 1 of 'data' has the columns a, c, but client 0 of 'data' a, b; give all",
        ),
        (
            lambda: fit(from_arrays(np.ones((20, 3)), YES[:20]), Reader),
            "a part for each argument of its forward, which gets 1, a mask only with sequences",
        ),
        (
            lambda: from_clients([(frame()[["a", "b"]], YES), (frame()[["b", "a"]], YES)]),
            "client 1 of 'data' has the columns b, a, but client 0 of 'data' a, b; give",
        ),
    ],
)
def test_what_does_not_fit_gets_one_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize("engine", ["serial", "batched", "parallel"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o - t) ** 2,
        lambda o, t: ((o - t) ** 2).mean(),
    ],
)
def test_a_loss_that_broadcasts_is_refused_on_every_engine(engine, loss):
    x = DRAW.normal(size=(40, 3)).astype("float32")
    with pytest.raises(UserError, match=r"\(3, 1\) .* \(3,\).*o.squeeze\(-1\)"):
        fit(from_arrays(x, x[:, 0]), "linear", engine=engine, loss=loss)


def test_losses_that_fit_are_taken():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    data = from_arrays(x, x[:, 0])
    for loss in (
        lambda o, t: (o.squeeze(-1) - t) ** 2,
        lambda o, t: (o[:, 0] - t).abs().mean(),
        lambda o, t: (o.reshape(t.shape) - t).square().mean(),
    ):
        assert fit(data, "linear", 1, loss=loss).records
    with pytest.raises(UserError, match="loss fails for outputs of shape"):
        fit(data, "linear", loss=lambda o, t: o @ t[:2])
    binary = from_arrays(x, (x[:, 0] > 0).astype(int))
    assert fit(binary, "linear", 5, metric=auc).records[-1]["score"] > 0.8


def test_a_model_without_outputs_is_refused():
    class Silent(nn.Linear):
        def forward(self, x):
            return {"scores": super().forward(x)}

    with pytest.raises(UserError, match=r"as \.logits, not dict; let its forward return the"):
        fit(from_arrays(DRAW.normal(size=(20, 3)), [0, 1] * 10), Silent(3, 2))

    class Headless(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(last_hidden_state=super().forward(x))

    with pytest.raises(UserError, match="take one with a head, such as AutoModelFor"):
        fit(from_arrays(DRAW.normal(size=(20, 3)), [0, 1] * 10), Headless(3, 2))
