import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix import load, models
from fedhelix.cpu import Tuned, applied, pool
from helpers import small

CONVOLUTIONS = [
    nn.Conv2d(2, 5, 3),
    nn.Conv2d(2, 5, 3, padding=1, bias=False),
    nn.Conv2d(2, 4, (3, 5), padding=(0, 2)),
    nn.Conv2d(2, 4, 1),
    nn.Conv2d(2, 4, 3, stride=2),  # left to PyTorch
    nn.Conv2d(2, 4, 3, dilation=2),
    nn.Conv2d(2, 4, 3, groups=2),
    nn.Conv2d(2, 4, 3, padding="same"),
    nn.Conv2d(2, 4, 2, padding=3),
]


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_tuned_convolutions_equal_pytorchs(layer):
    x = torch.randn(3, 2, 9, 8, requires_grad=True)
    expected = gradients(layer, x)
    with Tuned():
        found = gradients(layer, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 7, 9), (1, 1, 2, 2)])
def test_tuned_pooling_equals_pytorchs_even_among_equals(shape):
    x = torch.randint(0, 3, shape).float().requires_grad_()  # full of ties: the first of equals gets the gradient
    expected = F.max_pool2d(x, 2)
    weights = torch.randn_like(expected)
    assert torch.equal(pool(x.detach()), expected)
    assert torch.equal(pool(x), expected)
    (by_pytorch,) = torch.autograd.grad((expected * weights).sum(), x)
    (found,) = torch.autograd.grad((pool(x) * weights).sum(), x)
    assert torch.equal(found, by_pytorch)


def test_other_poolings_are_left_to_pytorch():
    x = torch.randn(2, 3, 9, 9)
    for layer in (
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, padding=1),
    ):
        with Tuned():
            found = layer(x)
        assert torch.equal(found, layer(x))


@pytest.mark.parametrize("name", ["digits-cnn", "digits-bn-cnn"])
def test_whole_networks_agree_whatever_the_kernels(name):
    net = models.build(name, (1, 8, 8), 10)
    data = load("digits")
    x, y = data.prepare(data.x[:20]), data.y[:20]
    found = {}
    for kernels in ("onednn", "native", "tuned"):
        with applied(kernels):
            found[kernels] = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    for kernels in ("native", "tuned"):
        for one, other in zip(found[kernels], found["onednn"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_choice_holds_inside_only():
    before = torch.backends.mkldnn.enabled
    with applied("tuned"):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_a_run_with_tuned_kernels_learns_the_same():
    runs = [small(model="digits-cnn", kernels=kernels).fit(1, quiet=True) for kernels in ("onednn", "tuned")]
    assert runs[0].records[0]["train_loss"] == pytest.approx(runs[1].records[0]["train_loss"], abs=1e-4)
