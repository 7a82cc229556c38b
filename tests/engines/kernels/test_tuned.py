import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhelix.engines.kernels import applied
from fedhelix.engines.kernels.tuned import Convolution, Pooling


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]


def assert_equal_to_pytorchs(layer: nn.Module, x: torch.Tensor) -> None:
    x = x.double().requires_grad_()
    expected = gradients(layer.double(), x)
    with applied("tuned", layer):
        grads = gradients(layer, x)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


sizes = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(
    batch=sizes,
    channels=sizes,
    outputs=sizes,
    rows=sizes,
    columns=sizes,
    bias=st.booleans(),
    data=st.data(),
)
def test_tuned_convolutions_equal_pytorchs(batch, channels, outputs, rows, columns, bias, data):
    padding = data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))
    height, width = data.draw(st.integers(rows, 9)), data.draw(st.integers(columns, 9))
    layer = nn.Conv2d(channels, outputs, (rows, columns), padding=padding, bias=bias)
    assert_equal_to_pytorchs(layer, torch.randn(batch, channels, height, width))


OTHERS = [
    nn.Conv2d(2, 4, 3, stride=2),
    nn.Conv2d(2, 4, 3, dilation=2),
    nn.Conv2d(2, 4, 3, groups=2),
    nn.Conv2d(2, 4, 3, padding="same"),
    nn.Conv2d(2, 4, 2, padding=3),
    nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
    nn.MaxPool2d(2, return_indices=True),
]


@pytest.mark.parametrize("layer", OTHERS, ids=str)
def test_other_layers_are_left_alone(layer):
    with applied("tuned", layer):
        assert type(layer) in (nn.Conv2d, nn.MaxPool2d)


POOLINGS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3),
    nn.MaxPool2d(2, stride=1),
    nn.MaxPool2d(2, padding=1),
    nn.MaxPool2d(2, ceil_mode=True),
]


@pytest.mark.parametrize("layer", POOLINGS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 7, 9), (1, 1, 3, 3)])
def test_tuned_pooling_equals_pytorchs_even_among_equals(layer, shape):
    # Full of ties: the first of equals gets the gradient.
    assert_equal_to_pytorchs(layer, torch.randint(0, 3, shape))


def test_an_image_without_a_batch_is_left_to_pytorch():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    x = torch.randn(1, 6, 6)
    expected = net(x)
    with applied("tuned", net):
        torch.testing.assert_close(net(x), expected)


def test_the_choice_holds_inside_only():
    net, before = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)), torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError), applied("tuned", net):
        assert not torch.backends.mkldnn.enabled
        assert [type(layer) for layer in net] == [Convolution, Pooling]
        raise RuntimeError
    assert torch.backends.mkldnn.enabled == before
    assert [type(layer) for layer in net] == [nn.Conv2d, nn.MaxPool2d]
