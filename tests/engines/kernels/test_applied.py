import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix import load, models
from fedhelix.engines.kernels import applied, compiled
from helpers import small

KERNELS = ["native", "tuned", *(["compiled"] if compiled.available() else [])]


@pytest.mark.parametrize("name", ["digits-cnn", "digits-bn-cnn"])
def test_whole_networks_agree_whatever_the_kernels(name):
    net = models.build(name, (1, 8, 8), 10)
    data = load("digits")
    x, y = data.prepare(data.x[:20]), data.y[:20]
    grads = {}
    for kernels in ("onednn", *KERNELS):
        with applied(kernels, net):
            grads[kernels] = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    for kernels in KERNELS:
        for one, other in zip(grads[kernels], grads["onednn"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("between", [[nn.Tanh()], [nn.ReLU()], [nn.BatchNorm2d(2), nn.ReLU()]])
def test_replaced_layers_support_transforms_and_second_derivatives(kernels, between):
    torch.manual_seed(0)  # in some draws large terms cancel
    net = nn.Sequential(nn.Conv2d(1, 2, 3), *between, nn.MaxPool2d(2), nn.Flatten(0)).train()
    x, before = torch.randn(3, 1, 6, 6), copy.deepcopy(net.state_dict())

    def curvature() -> torch.Tensor:
        weight = net[0].weight
        (first,) = torch.autograd.grad(net(x).square().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    def each() -> torch.Tensor:
        net.eval()  # statistics cannot be updated for each sample
        return torch.func.vmap(lambda one: net(one[None]))(x)

    expected = curvature(), each()
    net.load_state_dict(before)
    with applied(kernels, net.train()):
        torch.testing.assert_close((curvature(), each()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_run_learns_the_same_whatever_the_kernels(kernels):
    runs = [
        small(model="digits-cnn", kernels=choice).fit(1, quiet=True)
        for choice in ("onednn", kernels)
    ]
    assert runs[0].records[0]["train_loss"] == pytest.approx(
        runs[1].records[0]["train_loss"], abs=1e-4
    )
