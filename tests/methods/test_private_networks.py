"""Which networks `private`, `secure` and `dp-sgd` can protect: types of weights, and buffers."""

import pytest
import torch
from torch import nn

from fedhelix import DPSGD, FedAvg, Private, Secure, UserError
from fedhelix.components.clipping import clipped, flat_update, moved
from fedhelix.components.sample_gradients import clipped_mean
from helpers import small

pytest.importorskip("dp_accounting")
HALF = [torch.bfloat16, torch.float16]


class Net(nn.Linear):
    """Rows of pixels in the type of its weights."""

    def __init__(self, dtype: torch.dtype):
        torch.manual_seed(0)
        super().__init__(64, 10, dtype=dtype)

    def forward(self, x):
        return super().forward(x.flatten(1).to(self.weight.dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_updates_in_half_precision_are_no_longer_than_the_clip(dtype):
    """(1, 1, 1) becomes (1, 1, 1) / √3; in bfloat16 that is 0.578125 each, 1.0013 long."""
    origin = {"w": torch.zeros(3, dtype=dtype)}
    update = clipped(flat_update({"w": torch.ones(3, dtype=dtype)}, origin), torch.tensor(1.0))
    assert float(update.double().norm()) == pytest.approx(1, abs=1e-6)
    assert moved(origin, update)["w"].dtype == dtype
    # From 1 to 2^-12 is a step of 4095/4096, for which either type has too few bits.
    ones = {"w": torch.ones(1, dtype=dtype)}
    near = {"w": torch.full((1,), 2**-12, dtype=dtype)}
    assert flat_update(near, ones).tolist() == [-4095 / 4096]


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_in_half_precision_are_clipped_in_float32(dtype):
    """w·x with x = (3, 4), (0, 1): at a clip of 2 the first is (1.2, 1.6), the mean (0.6, 1.3)."""

    def loss(params, x, y):
        return (params["w"] * x).sum() + 0 * y

    x, weights = torch.tensor([[3.0, 4], [0, 1]]), {"w": torch.ones(2, dtype=dtype)}
    mean, _, _ = clipped_mean(loss, weights, x, torch.zeros(2), None, torch.tensor(2.0))
    assert mean["w"].tolist() == pytest.approx([0.6, 1.3], abs=1e-6)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", [Private(noise=1.0), Secure(), DPSGD(noise=1.0)])
def test_networks_in_half_precision_can_be_protected(method, dtype):
    run = small(method, Net(dtype)).fit(1, quiet=True)
    model = run.state.server["model"]
    assert all(value.dtype == dtype and value.isfinite().all() for value in model.values())


def test_a_sum_of_updates_in_half_precision_is_their_mean():
    """Rounded once, as fedavg's own mean is: they differ by a last digit, of eight bits."""
    one, other = (
        small(method, Net(torch.bfloat16)).fit(1, quiet=True).state.server["model"]
        for method in (Secure(), FedAvg())
    )
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=2**-7, atol=1e-6)


def test_what_half_precision_would_round_before_the_noise_is_complete_is_refused():
    net = Net(torch.bfloat16)
    for method in (Private(noise=1.0, noise_by="clients"), Secure(Private(noise=1.0))):
        with pytest.raises(UserError, match=r"half precision would round single .*net\.float\("):
            small(method, net)
    small(Secure(Private(noise=1.0, noise_by="clients")), net.float())


class Buffered(nn.Module):
    """A network with a buffer of its own, and perhaps with BatchNorm."""

    def __init__(self, norm: bool = False, dtype: torch.dtype = torch.float32, **more):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.register_buffer("places", torch.ones(16, dtype=dtype), **more)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.hidden(x.flatten(1)))) * self.places)


def refused(method, network):
    with pytest.raises(UserError) as problem:
        small(method, network)
    return str(problem.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_private_names_the_buffer_that_travels_and_what_it_recommends_works(dtype):
    said = refused("private", Buffered(dtype=dtype))
    assert "buffer 'places' travels" in said and "persistent=False" in said
    assert "BatchNorm" not in said and "fedbn" not in said
    small("private", Buffered(persistent=False, dtype=dtype)).fit(1, quiet=True)


def test_private_tells_a_buffer_from_batchnorm():
    said = refused("private", Buffered(norm=True))
    assert "buffer 'places' travels" in said and "BatchNorm needs private+fedbn" in said
    said = refused("private+fedbn", Buffered(norm=True))
    assert "buffer 'places' travels" in said and "fedbn," not in said and "BatchNorm" not in said
    assert "running statistics" in refused("private", Buffered(norm=True, persistent=False))
    small("private+fedbn", Buffered(norm=True, persistent=False)).fit(1, quiet=True)


class Smoothed(Buffered):
    """A network whose training changes its buffer."""

    def forward(self, x):
        if self.training:
            self.places.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().forward(x)


def test_dp_sgd_takes_constant_buffers_and_names_those_that_change():
    for dtype in (torch.float32, torch.int64):
        run = small(DPSGD(noise=1.0), Buffered(dtype=dtype)).fit(1, quiet=True)
        assert run.state.server["model"]["places"].tolist() == [1] * 16
    network = Smoothed()
    for more in ({}, {"persistent": False}):
        said = refused(DPSGD(noise=1.0), Smoothed(**more))
        assert "training changes the network's buffer 'places'" in said
    refused(DPSGD(noise=1.0), network)
    assert network.places.tolist() == [1] * 16  # a copy was tried
