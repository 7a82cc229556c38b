"""Minimisers on bowls with known minima, labels from gradients, and an image that is rebuilt."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedhelix import load
from fedhelix.models import build
from fedhelix.privacy import Attacker, invert, label_of, psnr
from fedhelix.privacy.minimise import adam, lbfgs

SCALES = torch.tensor([[1.0, 10.0, 100.0], [3.0, 3.0, 3.0]])
BOTTOMS = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.5, 0.5]])


def bowls(points):
    apart = points - BOTTOMS
    return (SCALES * apart.square()).sum(1) / 2, SCALES * apart


@pytest.mark.parametrize(("minimise", "steps"), [(lbfgs, 60), (adam, 500)])
def test_every_row_reaches_its_own_minimum(minimise, steps):
    best = minimise(bowls, torch.zeros(2, 3), steps)
    torch.testing.assert_close(best.points, BOTTOMS, atol=2e-3, rtol=0)


def test_the_best_point_is_kept_when_a_row_diverges():
    def cliff(points):
        values, slopes = bowls(points)
        return values, slopes * torch.tensor([[1.0], [-1.0]])  # the second row climbs

    best = lbfgs(cliff, torch.zeros(2, 3), 30)
    assert best.values[1] == bowls(torch.zeros(2, 3))[0][1]


@pytest.fixture(scope="module")
def digits():
    data = load("digits")
    module = build("lenet-sigmoid", data.shape, 10, seed=0).double().eval()
    state = {name: value.detach() for name, value in module.state_dict().items()}
    return data.x[:2].double() / 255, data.y[:2], module, state


def test_labels_are_read_from_the_heads_gradient(digits):
    x, y, module, state = digits
    head = [name for name in state if name.endswith("weight")][-1]
    seen = vmap(Attacker(module, state, [head]).gradients)(x, F.one_hot(y, 10).double())
    assert [label_of(one) for one in seen[head]] == y.tolist()


def test_gradients_are_those_of_autograd(digits):
    x, y, module, state = digits
    gradients = Attacker(module, state, list(state)).gradients(x[0], F.one_hot(y[0], 10).double())
    module.zero_grad()
    F.cross_entropy(module(x[:1]), y[:1]).backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad)


def test_an_image_is_rebuilt(digits):
    x, y, module, state = digits
    attacker = Attacker(module, state, list(state))
    seen = vmap(attacker.gradients)(x[:1], F.one_hot(y[:1], 10).double())
    rebuilt, distance = invert(
        attacker,
        seen,
        x.shape[1:],
        10,
        y[:1],
        steps=120,
        generator=torch.Generator().manual_seed(0),
    )
    assert rebuilt.shape == (1, 1, 1, 8, 8) and float(distance) < 1e-3
    assert float(psnr(rebuilt[:, 0], x[:1])) > 25
    sought, _ = invert(attacker, seen, x.shape[1:], 10, None, steps=3)
    assert sought.shape == rebuilt.shape
