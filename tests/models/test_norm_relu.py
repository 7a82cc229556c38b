"""BatchNorm, a sum and a ReLU: the plain form, and the GPU's kernels in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix.models.norm import norm_alone, norm_relu
from helpers import interpreted

KERNELS = """
import itertools
import torch, torch.nn.functional as F
from torch import nn
from fedhelix.models.fused import FusedNorm

torch.manual_seed(0)
last = torch.channels_last
cases = ((5, 3, False), (64, 9, True), (16, 5, False), (100, 4, True))
for (channels, size, has), relu in itertools.product(cases, (True, False)):
    x = (torch.randn(8, channels, size, size) * 3 + 70).contiguous(memory_format=last)
    x, other = x.requires_grad_(), torch.randn(8, channels, size, size, requires_grad=True)
    norm, same = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    same.load_state_dict(norm.state_dict())
    norm.double()
    out = norm(x.double()) + other if has else norm(x.double())
    out = F.relu(out) if relu else out
    slope = torch.randn_like(out, dtype=torch.float32)
    leaves = [x, norm.weight, norm.bias, *[other] * has]
    wanted = torch.autograd.grad(out, leaves, slope.double())
    running = (same.running_mean, same.running_var, same.num_batches_tracked)
    how = (same.momentum, same.eps, relu)
    got = FusedNorm.apply(x, other if has else None, same.weight, same.bias, *running, *how)
    grads = torch.autograd.grad(got, [x, same.weight, same.bias, *[other] * has], slope)
    for one, two in zip((out, *wanted, norm.running_mean, norm.running_var),
                        (got, *grads, same.running_mean, same.running_var)):
        torch.testing.assert_close(two.double(), one.double(), rtol=1e-4, atol=2e-4)
    assert same.num_batches_tracked == norm.num_batches_tracked == 1
print("fine")
"""


@pytest.mark.parametrize("has", [True, False])
def test_the_plain_form(has: bool) -> None:
    norm, same = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x, shortcut = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    wanted = F.relu(norm(x) + shortcut if has else norm(x))
    got = norm_relu(same, x, (lambda: shortcut) if has else None)
    assert torch.equal(got, wanted)
    assert torch.equal(same.running_mean, norm.running_mean)
    assert same.num_batches_tracked == 1


def test_the_plain_form_without_relu() -> None:
    norm, same = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(norm_alone(same, x), norm(x))
    assert same.num_batches_tracked == 1


def test_the_kernels_agree_with_pytorch() -> None:
    interpreted(KERNELS)
