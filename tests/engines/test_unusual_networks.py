"""Parameters that are single numbers, and layers that change themselves in training."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fedhelix import Federation, from_arrays
from fedhelix.components.sample_gradients import clipped_mean
from fedhelix.robust.defences import filled


class Scaled(nn.Module):
    """Two layers and a number between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.last(self.scale * self.first(x).relu())


class Bounded(nn.Module):
    """A spectral norm follows its largest singular value in training, which vmap cannot do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = spectral_norm(nn.Linear(5, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def trained(engine, model, method="fedavg"):
    """The model after two rounds."""
    torch.manual_seed(0)
    x = torch.randn(90, 5)
    data = from_arrays(x, x[:, :3].argmax(1))
    fed = Federation(data, "iid", clients=3, model=model, engine=engine, method=method, lr=0.2)
    return fed.fit(rounds=2, quiet=True).model().state_dict()


@pytest.mark.parametrize("method", ["fedavg", "helix", "scaffold"])
def test_all_engines_train_a_single_number(method):
    one, other = (trained(engine, Scaled, method) for engine in ("serial", "batched"))
    assert one["scale"].shape == () and one["scale"] != 1
    assert all(torch.allclose(value, other[name], atol=1e-5) for name, value in one.items())


def test_all_engines_train_a_spectral_norm():
    one, other = (trained(engine, Bounded) for engine in ("serial", "batched"))
    assert all(torch.allclose(value, other[name], atol=1e-5) for name, value in one.items())


def test_its_gradient_counts_when_samples_are_clipped():
    # Loss (s + 2w - y)²/2 at s = w = 0: gradients -y by s and -2y by w, lengths y√5.
    params = {"s": torch.tensor(0.0), "w": torch.tensor([0.0])}

    def loss(params, x, y):
        return (params["s"] + 2 * params["w"].sum() - y).square() / 2

    y = torch.tensor([1.0, 2.0])
    mean, _, count = clipped_mean(loss, params, torch.zeros(2, 1), y, None, torch.tensor(5**0.5))
    assert count == 2  # the second is halved to the length √5
    assert torch.allclose(mean["s"], torch.tensor(-1.0))
    assert torch.allclose(mean["w"], torch.tensor([-2.0]))


def test_a_missing_one_is_the_median_of_the_others():
    origin = {"s": torch.tensor(0.0), "w": torch.zeros(2)}
    sent = [{"s": torch.tensor(value), "w": torch.ones(2)} for value in (1.0, 2.0, 4.0)]
    assert filled([*sent, {"w": torch.ones(2)}], origin)[3]["s"] == 2
