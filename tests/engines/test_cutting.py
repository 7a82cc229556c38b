"""Batches of sequences are as wide as their longest where that changes no result."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import Federation, from_arrays, partition
from fedhelix.core.tree import flatten
from fedhelix.engines.local import batch_schedule, gather
from fedhelix.engines.local.setup import ClientTask, Phase

LENGTHS = [40, *np.random.default_rng(0).geometric(0.2, size=119).clip(1, 40)]
TOKENS = [[1 + (i * place + i) % 19 for place in range(n)] for i, n in enumerate(LENGTHS)]
LABELS = [tokens[0] % 3 for tokens in TOKENS]


class Reader(nn.Module):
    """Attention of the first token over all others that the mask shows."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        x = self.embedding(x)
        scores = (x @ x[:, :1].transpose(1, 2)).masked_fill(~mask[..., None], -1e9)
        return self.head((scores.softmax(1) * x).sum(1))


class Tagger(Reader):
    def forward(self, x, mask):
        return self.head(self.embedding(x))


class Unmasked(Reader):
    def forward(self, x, mask):
        return self.head(self.embedding(x).mean(1))


class UnmaskedLater(Unmasked):
    """Its outputs depend on the padding only once it has been trained."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Normed(Reader):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, mask):
        x = self.norm(self.embedding(x).transpose(1, 2)) * mask[:, None]
        return self.head(x.sum(2))


class Fixed(Reader):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, 8))

    def forward(self, x, mask):
        return self.head(((self.embedding(x) + self.places) * mask[..., None]).sum(1))


class Strided(Reader):
    """Cut to a width that is no multiple of four, it would lose the last tokens."""

    def forward(self, x, mask):
        x = (self.embedding(x) * mask[..., None]).transpose(1, 2)
        return self.head(nn.functional.avg_pool1d(x, 4).sum(2))


def text(token_targets=False):
    return from_arrays(TOKENS, [[t % 3 for t in s] for s in TOKENS] if token_targets else LABELS)


def federation(model, data=None, engine="serial", **more):
    usual = {"cohort": 3, "epochs": 1, "batch_size": 4, "lr": 0.1, "kernels": "onednn"}
    return Federation(data or text(), partition.iid(3), model=model, engine=engine, **usual | more)


def weights(fed, rounds=2):
    run = fed.fit(rounds, quiet=True)
    fed.close()
    return flatten(run.state.server)


def padded(fed):
    fed.change_setup(replace(fed.engine.setup, cuts=False))
    return fed


def test_widths_are_lengths_rounded_up_to_eighths_of_the_longest():
    tokens = [[1] * n for n in (1, 5, 6, 16, 39, 40)] * 2
    data = from_arrays(tokens, [0] * 12, tokens, [0] * 12)
    assert data.widths[:6].tolist() == [5, 5, 10, 20, 40, 40]
    same = from_arrays([[1, 2]] * 9, [0] * 9)
    assert same.widths is None  # one tensor, nothing is padded


@pytest.mark.parametrize("model", [Reader, Tagger])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_cut_batches_train_the_same_model(model, engine):
    data = text(token_targets=model is Tagger)
    fed = federation(model, data, engine)
    assert fed.engine.setup.cuts
    torch.testing.assert_close(weights(fed), weights(padded(federation(model, data))))


def test_batches_are_as_wide_as_their_longest():
    setup = federation(Reader).engine.setup
    steps = list(batch_schedule(setup, ClientTask(0, 0, {}, {}), Phase(), "batches").steps())
    for samples, draws, width in steps:
        longest = int(setup.data.lengths[samples].max())
        (x, mask), _, _ = gather(setup, samples, draws, width)
        assert x.shape[1] == mask.shape[1] == -(-longest // 5) * 5 and mask.any(0).sum() == longest
    assert min(width for *_, width in steps) < 40


def test_stacks_are_as_wide_as_their_widest_batch(monkeypatch):
    seen = []
    plain = nn.Embedding.forward
    monkeypatch.setattr(
        nn.Embedding, "forward", lambda self, x: seen.append(x.shape[-1]) or plain(self, x)
    )
    fed = federation(Reader, engine="batched")
    seen.clear()
    tasks = [ClientTask(c, 0, fed.initial, {}) for c in range(3)]
    fed.engine.run_clients(tasks)
    schedules = [batch_schedule(fed.engine.setup, t, Phase(), "batches").widths for t in tasks]
    needed = [max(step) for step in zip(*schedules, strict=True)]
    assert [width for width in seen if width != 40] == [width for width in needed if width != 40]
    assert len(set(seen)) > 1


@pytest.mark.parametrize("model", [Unmasked, UnmaskedLater, Normed, Fixed, Strided])
def test_networks_whose_outputs_depend_on_padding_get_all_of_it(model):
    assert not federation(model).engine.setup.cuts


def test_losses_and_methods_that_see_every_place_get_all_of_it():
    def spread(output, target):  # over padded places, too
        return nn.functional.cross_entropy(output.movedim(-1, 1), target, reduction="none")

    tagged = text(token_targets=True)
    assert federation(Tagger, tagged).engine.setup.cuts
    assert not federation(Tagger, tagged, loss=spread).engine.setup.cuts
    assert not federation(Tagger, tagged, method="fedprox").engine.setup.cuts
    assert federation(Reader, method="fedprox").engine.setup.cuts


def test_padding_in_front_is_kept():
    width = max(LENGTHS)
    rows = np.array([[0] * (width - len(tokens)) + tokens for tokens in TOKENS])
    data = from_arrays((rows, rows > 0), LABELS)
    assert data.lengths is None and not federation(Reader, data).engine.setup.cuts
