"""A parameter that is a single number, such as a learnt temperature."""

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("method", ["fedavg", "helix", "scaffold"])
def test_all_engines_train_it(method):
    torch.manual_seed(0)
    x = torch.randn(90, 5)
    models = []
    for engine in ("serial", "batched"):
        data = from_arrays(x, x[:, :3].argmax(1))
        fed = Federation(data, "iid", clients=3, model=Scaled, engine=engine, method=method, lr=0.2)
        models.append(fed.fit(rounds=2, quiet=True).model().state_dict())
    assert models[0]["scale"].shape == () and models[0]["scale"] != 1
    for name, value in models[0].items():
        assert torch.allclose(value, models[1][name], atol=1e-5)


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
