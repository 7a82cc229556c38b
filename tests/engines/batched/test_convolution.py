import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap

from fedhelix import models
from fedhelix.engines.batched import convolution
from fedhelix.engines.batched.convolution import (
    MaxPoolStacks,
    StackedConvolutions,
    forward,
    to_input,
    to_weight,
)
from helpers import interpreted


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (0, 2)])
def test_the_primitives_are_convolutions_client_by_client(padding):
    x, weight, bias = torch.randn(3, 2, 4, 9, 8), torch.randn(3, 5, 4, 3, 3), torch.randn(3, 5)
    out = forward(x, weight, bias, padding)
    back = torch.randn_like(out)
    for client in range(3):
        one, kernel = x[client].clone().requires_grad_(), weight[client].clone().requires_grad_()
        expected = F.conv2d(one, kernel, bias[client], padding=padding)
        to_one, to_kernel = torch.autograd.grad(expected, (one, kernel), back[client])
        torch.testing.assert_close(out[client], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            to_input(back, weight, padding)[client], to_one, rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            to_weight(x, back, (3, 3), padding)[client], to_kernel, rtol=1e-4, atol=1e-4
        )


def opaque(function):
    """As a kernel: autograd does not see what is inside."""

    def call(*args):
        with torch.no_grad():
            return function(*args)

    return call


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["digits-cnn", "digits-bn-cnn", "lenet-sigmoid"])
def test_stacked_gradients_equal_those_of_single_clients(name, kernels, monkeypatch):
    for primitive in ("forward", "to_input", "to_weight") if kernels else ():
        monkeypatch.setattr(convolution, primitive, opaque(getattr(convolution, primitive)))
    shape = (
        (3, 32, 32) if name == "lenet-sigmoid" else (1, 8, 8)
    )  # a stride of 2, which is left to PyTorch
    nets = [models.build(name, shape, 10, seed=seed) for seed in range(3)]
    x, y = torch.randn(3, 6, *shape), torch.randint(0, 10, (3, 6))
    expected = [
        torch.autograd.grad(F.cross_entropy(net(a), b), list(net.parameters()))
        for net, a, b in zip(nets, x, y, strict=True)
    ]
    parameters = dict(nets[0].named_parameters())
    stacked = {
        key: torch.stack([net.state_dict()[key] for net in nets]).detach()
        for key in nets[0].state_dict()
    }
    trained = {key: stacked.pop(key).requires_grad_() for key in parameters}

    def objective(params, rest, a, b):
        return F.cross_entropy(functional_call(nets[0], {**params, **rest}, (a,)), b)

    with StackedConvolutions():
        losses = vmap(objective)(trained, stacked, x, y)
    grads = torch.autograd.grad(losses.sum(), list(trained.values()))
    for client, by_hand in enumerate(expected):
        for grad, value in zip(grads, by_hand, strict=True):
            torch.testing.assert_close(grad[client], value, rtol=1e-3, atol=1e-4)


KERNELS = """
import torch, torch.nn.functional as F
from torch.func import functional_call, vmap
from fedhelix import models
from fedhelix.engines.batched import convolution

convolution.has_kernels = lambda x: True
for name in ("digits-cnn", "digits-bn-cnn"):
    nets = [models.build(name, (1, 8, 8), 10, seed=seed) for seed in range(2)]
    x, y = torch.randn(2, 4, 1, 8, 8), torch.randint(0, 10, (2, 4))
    losses = [F.cross_entropy(net(a), b) for net, a, b in zip(nets, x, y)]
    wanted = [torch.autograd.grad(loss, list(net.parameters())) for loss, net in zip(losses, nets)]
    states = [{key: value.detach() for key, value in net.state_dict().items()} for net in nets]
    stacked = {key: torch.stack([state[key] for state in states]) for key in states[0]}
    trained = {key: stacked.pop(key).requires_grad_() for key, _ in nets[0].named_parameters()}

    def objective(params, rest, a, b):
        return F.cross_entropy(functional_call(nets[0], {**params, **rest}, (a,)), b)

    with convolution.StackedConvolutions():
        losses = vmap(objective)(trained, stacked, x, y)
    grads = torch.autograd.grad(losses.sum(), list(trained.values()))
    for client in range(2):
        for grad, value in zip(grads, wanted[client]):
            torch.testing.assert_close(grad[client], value, rtol=1e-2, atol=1e-4)
print("fine")
"""


def test_the_kernels_in_tritons_interpreter():
    interpreted(KERNELS)


def test_images_that_all_clients_share_need_no_copies():
    net, x = nn.Conv2d(1, 2, 3), torch.randn(4, 1, 6, 6)
    weights = torch.randn(5, *net.weight.shape)

    def call(weight):
        return functional_call(net, {"weight": weight, "bias": net.bias}, (x,))

    with StackedConvolutions():
        stacked = vmap(call)(weights)
    torch.testing.assert_close(stacked[2], call(weights[2]), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are for a GPU")
@pytest.mark.parametrize("shape", [(3, 2, 4, 8, 6), (5, 7, 9), (1, 1, 2, 2)])
def test_poolings_on_a_gpu_are_those_of_pytorch(shape):
    x = torch.randn(shape, device="cuda").relu()  # with ties, which go to the first
    expected_from, stacked_from = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.max_pool2d(expected_from.view(1, -1, *shape[-2:]), 2)
    stacked = MaxPoolStacks.apply(stacked_from)
    assert torch.equal(stacked, expected.view(stacked.shape))
    back = torch.randn_like(stacked)
    expected.backward(back.view(expected.shape))
    stacked.backward(back)
    assert torch.equal(stacked_from.grad, expected_from.grad)
