"""FedPAC: combinations of heads by hand and against a solver, moments by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

from fedhelix import FedPAC, FedRep, Upload, partition
from fedhelix.data import Dataset
from fedhelix.methods.fedpac import combination
from helpers import close, small


def test_combinations_by_hand():
    zero, one = torch.zeros(1), torch.ones(1)
    # Equal moments: weights by one over the variance.
    same = torch.stack([zero, zero])
    assert combination(zero, same, torch.tensor([1.0, 3])) == pytest.approx([0.75, 0.25])
    # Moments 0 and 1: (1 - a)² + a² v + (1 - a)² v is least at a = (1 + v) / (1 + 2 v) = 0.75.
    apart, half = torch.stack([zero, one]), torch.tensor([0.5, 0.5])
    assert combination(zero, apart, half) == pytest.approx([0.75, 0.25])
    assert combination(one, apart, half) == pytest.approx([0.25, 0.75])
    # Without variance only its own counts.
    assert combination(zero, apart, torch.zeros(2)) == pytest.approx([1, 0], abs=1e-6)


def test_a_variance_that_rounding_made_negative_is_none():
    zero = torch.zeros(1)
    same, variances = torch.stack([zero, zero]), torch.tensor([1.0, -1e-7])
    assert combination(zero, same, variances) == pytest.approx([0, 1], abs=1e-6)


def test_a_combination_never_subtracts():
    # From 0, moments 1 and 2 are on one side: 2 would get a weight below zero.
    moments = torch.tensor([[1.0], [2.0]])
    assert combination(torch.zeros(1), moments, torch.full((2,), 0.01)) == pytest.approx([1, 0])


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
def test_combinations_agree_with_a_general_solver(seed, clients, size):
    draw = torch.Generator().manual_seed(seed)
    moments = torch.randn(clients, size, generator=draw)
    variances = torch.rand(clients, generator=draw) + 0.05
    found = np.array(combination(moments[0], moments, variances))
    h, v = moments.double().numpy(), variances.double().numpy()

    def objective(a):
        return ((h[0] - a @ h) ** 2).sum() + (a**2 * v).sum()

    best = minimize(
        objective,
        np.full(clients, 1 / clients),
        bounds=[(0, 1)] * clients,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
    )
    assert found.min() >= 0 and found.sum() == pytest.approx(1)
    assert objective(found) <= best.fun + 1e-6


def points(**more):
    """Features are inputs: client 0 has (1, 0) and (3, 0) of class 0 and (0, 2) of class 1."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3))
    nn.init.eye_(model[0].weight)
    x = torch.tensor([[1.0, 0], [3, 0], [0, 2], [5, 6], [0, 4]])
    y, owners = torch.tensor([0, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1]).numpy()
    data = Dataset("points", x, y, x, y, classes=3, owners=owners)
    natural = partition.natural(valid=0)
    return small(FedPAC(), model, data=data, partition=natural, cohort=2, **more)


def test_moments_by_hand():
    fed = points()
    state = fed.initialize(1)
    tasks = fed.tasks(state, [0], fed.context(0, 1))
    (result,) = fed.engine.run_clients(tasks)
    moments = result.upload["moments"]
    # Of three samples: class 0 has the sum (4, 0), class 1 has (0, 2).
    expected = torch.tensor([[4 / 3, 0], [0, 2 / 3], [0, 0]])
    assert torch.allclose(moments["means"], expected)
    # Mean square (1 + 9 + 4) / 3, less 16/9 + 4/9, over three.
    assert moments["variance"].item() == pytest.approx((14 / 3 - 20 / 9) / 3)


def test_every_participant_gets_its_combination_of_heads():
    fed = points()
    ctx, server = fed.context(0, 1), fed.initialize(1).server
    uploads = []
    for client, (value, mean) in enumerate([(1.0, 0.0), (3.0, 1.0), (99.0, 0.0)]):
        model = {name: torch.full_like(old, value) for name, old in fed.initial.items()}
        moments = {"means": torch.zeros(3, 2), "variance": torch.tensor(0.5)}
        moments["means"][0, 0] = mean
        tree = {"model": model, "prototypes": {}, "shares": torch.zeros(3), "moments": moments}
        uploads.append(Upload(client, 1, tree))
    after = fed.method.aggregate(server, uploads, [0.5, 0.5, 0.0], ctx)
    # Weights (0.75, 0.25) and (0.25, 0.75), as above; the third has no weight.
    assert list(after["heads"]) == ["0", "1"]
    for client, value in ((0, 1.5), (1, 2.5)):
        sent = fed.method.download(after, client, ctx)["model"]
        assert all((sent[name] - value).abs().max() < 1e-5 for name in fed.layers.head)
        assert all(torch.equal(sent[name], after["model"][name]) for name in fed.layers.body)
    unknown = fed.method.download(after, 2, ctx)["model"]
    assert all((value - 2).abs().max() < 1e-5 for value in unknown.values())


def test_the_head_learns_first():
    """With no pull, a first round trains as FedRep does."""
    pac, rep = (
        small(method, "mlp", cohort=6).fit(1, quiet=True)
        for method in (FedPAC(strength=0.0), FedRep())
    )
    body = {name: pac.state.server["model"][name] for name in pac.federation.layers.body}
    assert close(body, rep.state.server["model"])
