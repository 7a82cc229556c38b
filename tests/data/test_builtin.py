"""Data sets that need no file: what they hold, and that the networks for them learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedhelix import Federation
from fedhelix.data import available, load
from fedhelix.data.builtin import BUILT_IN, EACH, OWNERS, SYMBOLS, transitions
from helpers import close


@pytest.mark.parametrize("name", BUILT_IN)
def test_they_are_listed_with_their_sizes_and_always_the_same(name):
    data, again = load(name), load(name)
    row = next(row for row in available() if row.name == name)
    assert row.found and (row.train, row.test) == (len(data.y), len(data.y_test))
    assert torch.equal(data.x, again.x) and torch.equal(data.y_test, again.y_test)
    assert {*data.y.tolist()} == {*range(data.classes)}


def test_digits_are_those_of_scikit_learn():
    images, labels = load_digits(return_X_y=True)
    data = load("digits")
    pixels, digits = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
    ours = sorted(zip(pixels.flatten(1).tolist(), digits.tolist(), strict=True))
    pixels = np.rint(images * 255 / 16).astype(int).tolist()
    assert ours == sorted(zip(pixels, labels.tolist(), strict=True))


@pytest.mark.parametrize("name", ["breast-cancer", "wine"])
def test_columns_of_tables_are_normalised(name):
    data = load(name)
    x = data.prepare(data.x)
    torch.testing.assert_close(x.mean(0), torch.zeros(x.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(x.shape[1]), atol=1e-4, rtol=0)


def test_texts_follow_their_authors_chains():
    data, chances = load("synthetic-text"), transitions()
    np.testing.assert_allclose(chances.sum(2), 1)
    texts = torch.cat([data.x, data.y[:, None]], 1).numpy()
    for author in range(0, OWNERS, 7):
        mine = texts[data.owners == author]
        assert len(mine) == EACH * 4 // 5
        counts = np.zeros((SYMBOLS, SYMBOLS))
        np.add.at(counts, (mine[:, :-1].ravel(), mine[:, 1:].ravel()), 1)
        seen = counts.sum(1) > 100
        shares = counts[seen] / counts[seen].sum(1, keepdims=True)
        assert np.abs(shares - chances[author][seen]).max() < 0.15


def test_authors_differ():
    data, chances = load("synthetic-text"), transitions()
    last, labels = data.x_test[:, -1].numpy(), data.y_test.numpy()
    own = (chances[data.owners_test, last].argmax(1) == labels).mean()
    common = (chances.mean(0)[last].argmax(1) == labels).mean()
    assert own > common + 0.1


def test_every_sensor_has_all_motions_in_training_and_test():
    data = load("synthetic-series")
    for labels, owners in ((data.y, data.owners), (data.y_test, data.owners_test)):
        for sensor in range(OWNERS):
            assert len(labels[owners == sensor].unique()) == data.classes


@pytest.mark.parametrize(
    ("name", "guess"), [("wine", 0.4), ("synthetic-text", 0.2), ("synthetic-series", 0.17)]
)
def test_a_federation_learns_and_engines_agree(name, guess):
    settings = {"cohort": 4, "epochs": 3, "lr": 0.05, "kernels": "native"}
    settings |= {"clients": 4} if name == "wine" else {}  # the others' samples have owners
    serial, batched = (
        Federation(name, engine=engine, **settings).fit(2, quiet=True)
        for engine in ("serial", "batched")
    )
    assert serial.summary["final_accuracy"] > guess + 0.05
    assert close(serial.state.server["model"], batched.state.server["model"], 1e-4)


def test_shifts_of_what_is_no_picture():
    text = Federation("synthetic-text", shift="concept:2", engine="serial", kernels="native")
    assert text.shifts.count("labels 1") == 10 and text.clients == 20
    series = Federation("synthetic-series", shift="scale:4", engine="serial", kernels="native")
    assert series.shifts.count("scale 1/4") == 5
