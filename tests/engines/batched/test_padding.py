"""Short batches are filled up only where nothing about a sample depends on the others."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix import Federation, UserError
from fedhelix.core.copies import copied
from fedhelix.core.fit import probe
from fedhelix.engines.batched.padding import allows_padding, mixes_samples


class Centred(nn.Module):
    """Looks at the mean of a batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(x - x.mean(0))


class Clipped(nn.Module):
    """Looks at the norm of a batch, but only of a large one."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(x * torch.clamp(14 / x.norm(), max=1))


class Means(nn.Module):
    """A running mean of its own, changed in place."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def follow(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))

    def forward(self, x):
        if self.training:
            self.follow(x)
        return self.head(x - self.mean)


class Assigned(Means):
    """The same, assigned."""

    def follow(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)


class Tied(Assigned):
    """The same with tied weights, and with a module that has two names."""

    def __init__(self):
        super().__init__()
        self.same, self.turned = self.head, nn.Linear(5, 3)
        self.turned.weight = self.head.weight

    def forward(self, x):
        return super().forward(x) + self.turned(x)


class Counting(nn.Module):
    """Counts steps or samples."""

    def __init__(self, samples):
        super().__init__()
        self.head, self.samples = nn.Linear(5, 3), samples
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x) if self.samples else 1
        return self.head(x)


class Noisy(nn.Module):
    """Dropout that is no module."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.dropout(self.first(x), 0.5, self.training))


class Growing(nn.Module):
    """Assigns a buffer of another shape."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last = x.mean(1)
        return self.head(x)


def unaffine():
    return nn.Sequential(
        nn.BatchNorm1d(5, affine=False, track_running_stats=False), nn.Linear(5, 3)
    )


def contrast(output, target):
    """One value per sample that depends on all of them."""
    z = F.normalize(output, dim=1)
    same = (target[:, None] == target[None]).float()
    return -(same * F.log_softmax(z @ z.T, 1)).sum(1) / same.sum(1)


def shared(output, target):
    """One value per sample that depends on their number."""
    return F.cross_entropy(output, target, reduction="none") / len(output)


def federation(engine="batched", **options):
    x = np.random.default_rng(0).normal(size=(90, 5)).astype("float32") + 1
    y = x[:, :3].argmax(1)
    parts = [(x[at:end], y[at:end]) for at, end in ((0, 30), (30, 43), (43, 90))]
    return Federation(parts, engine=engine, seed=0, lr=0.1, **{"batch_size": 16, **options})


def trained(engine, **options):
    """The model and the scores of two rounds, and whether the initial model stayed as it was."""
    fed = federation(engine, **options)
    before = copy.deepcopy(fed.context(0, 1).initial)
    run = fed.fit(2, quiet=True)
    after = fed.context(0, 1).initial
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return run.model().state_dict(), run.records[-1]["personal"]


@pytest.mark.parametrize(
    "options",
    [
        {"model": "linear", "loss": contrast},
        {"model": "linear", "loss": shared},
        {"model": Centred},
        {"model": Centred, "method": "ditto"},
        {"model": Clipped, "batch_size": 40},
        {"model": unaffine},
        {"model": Means},
        {"model": Assigned},
        {"model": Tied},
        {"model": lambda: Counting(samples=False)},
        {"model": lambda: Counting(samples=True)},
        {"model": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3))},
    ],
)
def test_what_looks_at_a_batch_trains_as_one_client_alone(options):
    (one, scores), (other, other_scores) = (trained(e, **options) for e in ("serial", "batched"))
    assert all(torch.allclose(value, other[name], atol=1e-4) for name, value in one.items())
    assert scores == pytest.approx(other_scores)


@pytest.mark.parametrize("network", [Assigned, Tied])
def test_an_assigned_buffer_is_kept_as_one_changed_in_place(network):
    (assigned, _), (in_place, _) = trained("serial", model=network), trained("serial", model=Means)
    assert in_place["mean"].abs().min() > 0.1
    assert torch.allclose(assigned["mean"], in_place["mean"])
    assert "turned.weight" not in assigned or torch.equal(
        assigned["turned.weight"], assigned["head.weight"]
    )


@pytest.mark.parametrize(
    ("options", "pads", "mixes"),
    [
        ({"model": "linear"}, True, False),
        ({"model": Noisy}, True, False),
        ({"model": lambda: Counting(samples=False)}, True, False),
        ({"model": lambda: Counting(samples=True)}, False, False),
        ({"model": Tied}, False, False),
        ({"model": Centred}, False, True),
        ({"model": unaffine}, False, True),
        ({"model": Means}, False, False),
        ({"model": "linear", "loss": contrast}, False, False),
        ({"model": "linear", "loss": shared}, False, False),
        ({"model": "linear", "loss": F.cross_entropy}, False, False),
    ],
)
def test_a_few_samples_tell_who_may_be_padded(options, pads, mixes):
    setup = federation(**options).engine.setup
    assert (allows_padding(setup), mixes_samples(setup)) == (pads, mixes)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_weight_norm_of_the_old_form_trains_and_is_copied():
    def network():
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.ReLU(), nn.Linear(4, 3))

    (one, scores), (other, others) = (trained(e, model=network) for e in ("serial", "batched"))
    assert all(torch.allclose(value, other[name], atol=1e-5) for name, value in one.items())
    assert scores == pytest.approx(others)
    ran = network()
    ran(torch.ones(2, 5)).sum().backward()  # leaves a weight that deepcopy refuses
    assert torch.equal(copied(ran)(torch.ones(2, 5)), ran(torch.ones(2, 5)))
    federation("serial", model=ran).fit(1, quiet=True)


def test_a_buffer_of_another_shape_is_refused_and_a_probe_changes_none():
    network = Growing()
    with pytest.raises(UserError, match=r"shape of its buffer 'last' from \(1,\) to \(16,\)"):
        federation("serial", model=network).fit(1, quiet=True)
    probe(network, torch.ones(2, 5))
    assert network.last.shape == (1,)
