"""Runs with other methods, losses or metrics are not taken for each other; text has its form."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix import (
    FedAvg,
    Federation,
    Helix,
    Phase,
    UserError,
    from_arrays,
    from_clients,
    from_table,
    load_run,
    metrics,
)
from fedhelix.core.tree import drop
from fedhelix.federation import description
from fedhelix.store import RunFolder

QUICK = {"model": "mlp", "clients": 3, "engine": "serial", "epochs": 1, "kernels": "onednn"}
DRAW = np.random.default_rng(0)


class Tuned(FedAvg):
    """FedAvg whose personal models have another head; nobody has registered it."""

    def personalize(self, client):
        return (Phase("head", 3),)


def test_a_method_without_a_name_is_not_its_parent(tmp_path):
    federation = Federation("wine", method=Tuned(), **QUICK)
    run = federation.fit(1, out=tmp_path / "run", quiet=True)
    assert run.summary["method"] == "Tuned" and Tuned.name == "Tuned" and FedAvg.name == "fedavg"
    with pytest.raises(UserError, match="a method of your own, which its folder does not hold"):
        load_run(tmp_path / "run")
    with pytest.raises(UserError, match="was run with method = Tuned, not fedavg"):
        Federation("wine", method="fedavg", **QUICK).fit(
            2, out=tmp_path / "run", resume=True, quiet=True
        )
    again = load_run(tmp_path / "run", Federation("wine", method=Tuned(), **QUICK))
    x = federation.data.x_test
    assert np.array_equal(again.predict(x, client=0, raw=True), run.predict(x, client=0, raw=True))


def test_wrappers_and_composed_methods_without_a_name_say_so_too():
    @dataclass(frozen=True)
    class Mine(Helix):
        pass

    assert Mine().label == "Mine" and Helix().label == "helix"


def inverted(output, target):
    return F.cross_entropy(-output, target, reduction="none")


@pytest.mark.parametrize(
    ("given", "other", "words"),
    [
        ({"loss": inverted}, {}, "loss = inverted, not cross_entropy"),
        ({}, {"loss": inverted}, "loss = cross_entropy, not inverted"),
        ({"metric": metrics.f1}, {"metric": metrics.auc}, "metric = f1, not auc"),
        ({"loss": nn.CrossEntropyLoss()}, {}, r"loss = CrossEntropyLoss\(\), not cross_entropy"),
    ],
)
def test_a_run_goes_on_with_its_own_loss_and_metric(given, other, words, tmp_path):
    Federation("wine", method="fedavg", **QUICK, **given).fit(1, out=tmp_path / "run", quiet=True)
    wrong = Federation("wine", method="fedavg", **QUICK, **other)
    with pytest.raises(UserError, match=f"was run with {words}"):
        wrong.fit(2, out=tmp_path / "run", resume=True, quiet=True)
    with pytest.raises(UserError, match=f"was run with {words}"):
        load_run(tmp_path / "run", wrong)
    right = Federation("wine", method="fedavg", **QUICK, **given)
    assert right.fit(2, out=tmp_path / "run", resume=True, quiet=True).summary["rounds"] == 2


def test_a_run_that_names_no_class_is_older(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = from_arrays(x, np.array(["cat", "dog"] * 20))
    given = {"model": "linear", "seed": 0, "engine": "serial", "kernels": "native"}
    Federation(data, "iid", clients=2, **given).fit(1, out=tmp_path / "run", quiet=True)
    with RunFolder.open(tmp_path / "run") as folder:
        known = folder.clients
        assert known.pop("class_names") == ["cat", "dog"]
        folder.write_clients(known)
    again = Federation(data, "iid", clients=2, **given)
    again.fit(2, out=tmp_path / "run", resume=True, quiet=True)


def test_a_run_that_names_no_loss_is_older(tmp_path, monkeypatch):
    federation, now = Federation("wine", method="fedavg", **QUICK), description.config
    monkeypatch.setattr(description, "config", lambda *args: drop(now(*args), ["objective"]))
    federation.fit(1, out=tmp_path / "run", quiet=True)
    assert "objective" not in RunFolder.open(tmp_path / "run").config
    monkeypatch.undo()
    assert federation.fit(2, out=tmp_path / "run", resume=True, quiet=True).summary["rounds"] == 2


def test_one_prediction_of_text_is_a_list_of_one():
    x = DRAW.normal(size=(60, 3))
    data = from_arrays(x, np.where(x[:, 0] > 0, "pos", "neg"))
    run = Federation(data, "iid", **QUICK).fit(1, quiet=True)
    for count in (0, 1, 2):
        assert run.predict(x[:count]).shape == (count,)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x, mask=None):
        return self.head(self.embed(x))


TOKENS = [DRAW.integers(1, 50, size=3 + place % 5) for place in range(40)]
TAGS = [["OBI"[token % 3] for token in row] for row in TOKENS]


@pytest.mark.parametrize("named", [False, True])
def test_tokens_may_have_texts_as_tags(named):
    class Named(Tagger):
        def forward(self, x, attention_mask):
            return super().forward(x)

    x = {"x": TOKENS} if named else TOKENS
    data = from_arrays(x, TAGS)
    assert data.labels == ("B", "I", "O") and data.y.shape == (32, 7)
    assert bool((data.y == -100).any()) and set(data.y.unique().tolist()) == {-100, 0, 1, 2}
    network = Named if named else Tagger
    run = Federation(data, "iid", **(QUICK | {"model": network, "epochs": 20, "lr": 0.5})).fit(
        5, quiet=True
    )
    assert run.summary["final_accuracy"] > 0.9
    first = run.predict({"x": TOKENS[:2]} if named else TOKENS[:2])
    assert first.tolist() == [[*TAGS[0], ""], TAGS[1]]
    number = run.onboard((x if named else TOKENS, TAGS))
    assert run.predict(x, client=number).shape == (40, 7)


def test_two_names_of_tokens_are_classes_too():
    """Zeros and ones would be labels of which several may hold."""
    x = DRAW.integers(1, 50, (40, 5))
    tags = np.where(x > 20, "B", "A")
    for y in (tags, tags.tolist(), [tuple(row) for row in tags.tolist()]):
        data = from_arrays(x, y)
        assert data.y.dtype == torch.int64 and data.labels == ("A", "B") and data.outputs == 2
    even = from_clients([([row[:3] for row in x], [row[:3] for row in tags.tolist()])])
    assert even.y.dtype == torch.int64 and even.labels == ("A", "B")
    quick = QUICK | {"model": lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2))}
    run = Federation(data, "iid", **quick).fit(1, quiet=True)
    number = run.onboard((x, tags))
    assert set(run.predict(x, client=number).ravel()) <= {"A", "B"}
    table = pd.DataFrame({"x": x[:, 0], "z": x[:, 1], "p": tags[:, 0], "q": tags[:, 1]})
    two = from_table(table, target=["p", "q"])
    assert two.y.dtype == torch.int64 and two.labels == ("A", "B")
    with pytest.raises(UserError, match="2 texts per sample, which are classes of tokens"):
        Federation(two, "iid", **(QUICK | {"model": "linear"}))


def test_texts_of_another_number_than_tokens_are_labels():
    for x in (DRAW.normal(size=(3, 2)), TOKENS[:3]):
        with pytest.raises(UserError, match="several texts per sample; give as many as x has"):
            from_arrays(x, [["red"], ["red", "blue"], ["blue"]])
    tags = [["O", "", "B"], ["O"] * 4, ["B"] * 5]
    with pytest.raises(UserError, match="no label in sample 0"):
        from_arrays(TOKENS[:3], tags)


@pytest.mark.parametrize("named", [False, True])
def test_numbers_of_tokens_have_the_lengths_of_their_sequences(named):
    numbers = [["OBI".index(tag) for tag in row] for row in TAGS]
    x, shifted = {"x": TOKENS} if named else TOKENS, [*numbers[1:], numbers[0]]
    says = "sample 0 of {} has 3 tokens and 4 labels; give one for each token, -100 where"
    with pytest.raises(UserError, match=says.format("'data'")):
        from_arrays(x, shifted)
    with pytest.raises(UserError, match=says.format("client 1 of 'data'")):
        from_clients([(x, numbers), (x, shifted)])
    assert from_arrays(x, numbers).y.shape == (32, 7)


def test_a_target_may_be_a_sequence_of_its_own():
    numbers = [["OBI".index(tag) for tag in row] for row in TAGS]
    sources = [row[:2] if place % 2 else row for place, row in enumerate(TOKENS)]
    assert from_arrays({"source": sources, "target": TOKENS}, numbers).y.shape == (32, 7)
    summed = [row[: 1 + place % 4] for place, row in enumerate(numbers)]  # by a loss of one's own
    assert from_arrays(TOKENS, summed).y.shape == (32, 4)
    by_hand = np.array([[*row, *[0] * (7 - len(row))] for row in TOKENS])
    assert from_arrays(by_hand, numbers).y.shape == (32, 7)


def test_a_mask_that_comes_as_another_argument_is_explained():
    class Cached(Tagger):
        def forward(self, input_ids, past=None, attention_mask=None):
            return super().forward(input_ids + past.length)

    with pytest.raises(
        UserError, match=r"argument 2 is 'past': give x as \{'input_ids': x\}, or a"
    ):
        Federation(from_arrays(TOKENS, TAGS), "iid", **(QUICK | {"model": Cached}))


def test_a_model_card_says_whose_samples_it_counts(tmp_path):
    run = Federation("wine", **QUICK).fit(1, quiet=True)
    data = run.federation.data
    run.onboard((data.x[:20], data.y[:20]))
    run.export(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| Clients | 3 |" in card and "those of clients that joined after the training |" in card


def test_a_run_that_goes_on_says_that_lambdas_cannot_be_compared(tmp_path):
    x = np.linspace(0, 1, 40, dtype="float32").reshape(20, 2)
    halves = [(x[:10], x[:10].sum(1)), (x[10:], x[10:].sum(1))]

    def fit(rounds, resume=False):
        more = {"loss": lambda o, t: (o.squeeze(-1) - t).abs(), "model": "linear"}
        federation = Federation(halves, engine="serial", kernels="onednn", **more)
        return federation.fit(rounds, out=tmp_path / "run", resume=resume, quiet=True)

    fit(1)
    with pytest.warns(UserWarning, match=r"^loss without a name \(lambda\) cannot be compared"):
        fit(2, resume=True)
