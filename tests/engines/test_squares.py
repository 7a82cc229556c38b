"""Squared gradients of single samples, from one pass, against a gradient for every sample."""

import pytest
import torch
from torch import nn

from fedhelix import Federation
from fedhelix.components.genes import fisher_values
from fedhelix.engines.local import squares
from fedhelix.engines.local.setup import ClientTask
from fedhelix.engines.local.training import make_client


class Branches(nn.Module):
    """Strides, a branch, BatchNorm on images and on rows, layers with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.left = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.right = nn.Conv2d(4, 6, 1, stride=2)
        self.rows = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.rows((self.left(x) + self.right(x)).mean((2, 3))))


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.layer(self.layer(x)).flatten(1))


def client_of(model: nn.Module, **training):
    torch.manual_seed(0)
    x, y = torch.randn(60, 1, 8, 8), torch.randint(0, 3, (60,))
    fed = Federation([(x, y)], model=model, batch_size=16, engine="serial", **training)
    return make_client(fed.engine.setup, ClientTask(0, 0, {}, {})), fed


@pytest.mark.parametrize("at_once", [7, 10_000])
def test_one_pass_gives_the_squares_of_every_sample(at_once, monkeypatch):
    monkeypatch.setattr(squares, "SAMPLES_AT_ONCE", (at_once, 0))
    monkeypatch.setattr(squares, "VALUES_AT_ONCE", (40 * at_once, 0))
    client, fed = client_of(Branches())
    state = {**fed.initial, "norm.running_mean": torch.linspace(-1, 1, 4)}
    names = list(fed.layers.parameters)
    x, y = client.inputs(), client.targets()
    found = client.squared_gradients(state, names, x, y)
    expected = fisher_values(client.sample_loss, state, names, x, y)
    assert list(found) == names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-9)


def test_squares_are_computed_in_the_precision_of_the_training():
    found = {}
    for precision in ("float32", "bfloat16"):
        client, fed = client_of(Branches(), precision=precision)
        names = list(fed.layers.parameters)
        x, y = client.inputs(), client.targets()
        found[precision] = client.squared_gradients(fed.initial, names, x, y)
    for name, exact in found["float32"].items():
        rounded = found["bfloat16"][name]
        assert rounded.dtype == exact.dtype and not torch.equal(rounded, exact)
        assert (rounded - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    "model",
    [
        Twice(),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(72, 3)),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding="same"), nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Linear(8, 2), nn.Flatten(), nn.Linear(16, 3)),  # eight rows per sample
    ],
)
def test_other_layers_are_left_to_gradients_of_single_samples(model):
    client, fed = client_of(model)
    x, y = client.inputs(), client.targets()
    assert client.squared_gradients(fed.initial, list(fed.layers.parameters), x, y) is None
