"""Sub-networks: a cut network is the narrow one, and a resized one keeps what it can."""

import pytest
import torch
from torch import nn

from fedhelix import UserError
from fedhelix.components.subnetworks import cut, filled, left_out, mask, places_of, resized, window
from fedhelix.core.layers import Layers
from fedhelix.models.cnn import bn_cnn, digits_bn_cnn, digits_cnn
from fedhelix.models.resnet import ResNet, resnet8

SHAPES = {digits_bn_cnn: (1, 8, 8), digits_cnn: (1, 8, 8), resnet8: (1, 8, 8), bn_cnn: (1, 16, 16)}


def read(builder, width=1.0):
    """A network and its layers."""
    torch.manual_seed(1)
    module = builder(SHAPES[builder], 10, width=width)
    for name, value in module.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 2)
    return module, Layers.of(module, torch.rand(4, *SHAPES[builder]))


@pytest.mark.parametrize("builder", SHAPES, ids=lambda builder: builder.__name__)
@pytest.mark.parametrize(("width", "start"), [(0.5, 0), (0.3, 5)])
def test_zeros_around_a_part_compute_what_the_narrow_network_does(builder, width, start):
    whole, layers = read(builder)
    narrow, _ = read(builder, width)
    places = places_of(layers, window(width, start))
    part = cut(whole.state_dict(), places)
    narrow.load_state_dict(part)  # every shape fits
    padded = filled(part, places, whole.state_dict())
    x = torch.randn(5, *SHAPES[builder])
    whole.load_state_dict(padded)
    assert torch.allclose(whole.eval()(x), narrow.eval()(x), atol=1e-5)
    assert all(torch.equal(value, part[name]) for name, value in cut(padded, places).items())
    for name, axes in places.items():
        inside = mask(axes, padded[name])
        assert inside.sum() == part[name].numel()
        assert torch.equal(padded[name] * inside, padded[name])


def residual(blocks):
    """A small ResNet with so many blocks in each of its two stages."""
    torch.manual_seed(1)
    return ResNet(1, 10, (3, 6), blocks)


def test_zeros_in_residual_blocks_compute_what_the_shallow_network_does():
    whole, shallow = residual(3), residual(2)
    layers = Layers.of(whole, torch.rand(4, 1, 8, 8))
    assert [block.entries[0] for block in layers.blocks] == [
        f"layer{stage}.{place}.conv1.weight" for stage in (1, 2) for place in (1, 2)
    ]
    state, places = whole.state_dict(), left_out(layers, 0.5)  # two of three, rounded up
    last = [name for name in state if ".2." in name and state[name].dim()]
    assert sorted(places) == sorted(last)
    assert left_out(layers, 1.0) == {} and len(left_out(layers, 0.1)) == 2 * len(last)
    part = cut(state, places)
    assert sum(part[name].numel() for name in last) == 0
    shallow.load_state_dict({name: part[name] for name in shallow.state_dict()})
    whole.load_state_dict(filled(part, places, state))
    x = torch.rand(5, 1, 8, 8)
    for mode in (True, False):
        torch.testing.assert_close(whole.train(mode)(x), shallow.train(mode)(x))


def test_blocks_without_a_shortcut_cannot_be_left_out():
    def block():
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())

    network = nn.Sequential(block(), block(), nn.Flatten(), nn.Linear(48, 2))
    assert Layers.of(network, torch.rand(2, 3, 4, 4)).blocks == ()


def test_windows_by_hand():
    assert window(0.5)(5).tolist() == [0, 1, 2]  # rounded up
    assert window(0.5, 3)(4).tolist() == [3, 0]  # behind the last comes the first
    assert window(0.1)(30).tolist() == [0, 1, 2]
    assert window(1.0, 7)(4).sort().values.tolist() == [0, 1, 2, 3]


def test_flattened_channels_stay_together():
    _, layers = read(digits_cnn)
    places = places_of(layers, window(0.5))
    outputs, inputs = places["fc1.weight"]
    assert len(outputs) == 32
    assert inputs.tolist() == list(range(8 * 4))  # 8 of 16 channels, of 2 x 2 pixels each
    assert places["fc2.weight"][0].tolist() == list(range(10))


def test_a_narrow_network_inherits_the_strongest_channels():
    layers = Layers.of(two_layers(4), torch.zeros(1, 3))
    weak = torch.tensor([[1.0, 1, 1], [9, 9, 9], [2, 2, 2], [7, 7, 7]])
    after = torch.arange(8.0).view(2, 4)
    target = Layers.of(two_layers(2), torch.zeros(1, 3))
    smaller = resized({"0.weight": weak, "2.weight": after}, layers, target)
    assert torch.equal(smaller["0.weight"], weak[[1, 3]])
    assert torch.equal(smaller["2.weight"], 2 * after[:, [1, 3]])  # two stand for four


def test_a_narrow_network_of_channels_that_say_the_same_computes_the_same():
    one, other = two_layers(6), two_layers(2)
    with torch.no_grad():
        one[0].weight.copy_(torch.randn(1, 3))
        one[2].weight.copy_(torch.randn(2, 1))
    layers, target = (Layers.of(net, torch.zeros(1, 3)) for net in (one, other))
    other.load_state_dict(resized(one.state_dict(), layers, target))
    x = torch.randn(6, 3)
    assert torch.allclose(one(x), other(x), atol=1e-5)


def test_a_wide_network_computes_the_same():
    one, other = two_layers(4), two_layers(10)
    layers, target = (Layers.of(net, torch.zeros(1, 3)) for net in (one, other))
    other.load_state_dict(resized(one.state_dict(), layers, target))
    x = torch.randn(6, 3)
    assert torch.allclose(one(x), other(x), atol=1e-6)


def two_layers(hidden):
    return nn.Sequential(
        nn.Linear(3, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 2, bias=False)
    )


class Odd(nn.Module):
    """Its second layer takes five inputs, which no layer gives."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(5, 2)

    def forward(self, x):
        return self.two(torch.cat([self.one(x), x[:, :1]], 1))


def test_what_cannot_be_cut_is_named():
    frozen = two_layers(4)
    frozen[0].weight.requires_grad_(False)
    norm = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    for net, words in [
        (Odd(), "5 inputs of 'two' are not the outputs of a layer before"),
        (norm, "and '1' is none of these"),
        (frozen, "frozen parameters cannot be cut"),
    ]:
        with pytest.raises(UserError, match=words):
            places_of(Layers.of(net, torch.zeros(2, 3)), window(0.5))
    places = places_of(Layers.of(two_layers(4), torch.zeros(1, 3)), window(0.5))
    with pytest.raises(UserError, match=r"'0.weight' has shape \(1, 1\) instead of \(2, 3\)"):
        filled({"0.weight": torch.ones(1, 1)}, places, two_layers(4).state_dict())


def test_networks_that_differ_in_more_than_their_width_are_refused():
    layers, state = Layers.of(two_layers(4), torch.zeros(1, 3)), two_layers(4).state_dict()
    one = nn.Sequential(nn.Linear(3, 4, bias=False))
    uneven = nn.Sequential(nn.Linear(5, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    for net, words in [(one, "has no '2.weight'"), (uneven, r"has shape \(2, 5\)")]:
        with pytest.raises(UserError, match=words):
            resized(state, layers, Layers.of(net))
