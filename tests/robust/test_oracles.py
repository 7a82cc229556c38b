"""Robust rules against other people's: SciPy and NumPy, plain loops, and byzfl where it is
installed.
"""

import importlib.util
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedhelix.robust.defences import rules

shapes = st.tuples(st.integers(5, 12), st.integers(1, 6), st.integers(0, 10_000))


def rows(shape) -> torch.Tensor:
    count, width, seed = shape
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(count, width))
    rows[: count // 4] *= 50  # some outliers
    return torch.from_numpy(rows)


@given(shapes, st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_means_of_coordinates(shape, trim):
    x = rows(shape)
    assert np.allclose(rules.median(x), np.median(x.numpy(), axis=0))
    assert np.allclose(
        rules.trimmed_mean(x, trim), stats.trim_mean(x.numpy(), trim / len(x) + 1e-9, axis=0)
    )


@given(shapes, st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_krum_by_plain_loops(shape, attackers):
    x = rows(shape).numpy()
    scores = []
    for i, mine in enumerate(x):
        squares = sorted(float(((mine - other) ** 2).sum()) for j, other in enumerate(x) if j != i)
        scores.append(sum(squares[: len(x) - attackers - 2]))
    assert np.allclose(rules.krum_scores(torch.from_numpy(x), attackers), scores)
    best = np.argsort(scores, kind="stable")
    assert np.allclose(rules.multi_krum(torch.from_numpy(x), attackers, 1), x[best[0]])
    assert np.allclose(rules.multi_krum(torch.from_numpy(x), attackers, 3), x[best[:3]].mean(0))


@given(shapes, st.integers(0, 4))
@settings(max_examples=30, deadline=None)
def test_mixing_by_plain_loops(shape, attackers):
    x = rows(shape).numpy()
    mixed = []
    for mine in x:
        near = sorted(range(len(x)), key=lambda j: float(((mine - x[j]) ** 2).sum()))
        mixed.append(x[near[: len(x) - attackers]].mean(0))
    assert np.allclose(rules.nearest_mixed(torch.from_numpy(x), attackers), mixed)


@given(shapes, st.integers(1, 13))
@settings(max_examples=30, deadline=None)
def test_buckets_keep_the_mean_and_draw_the_rows_together(shape, size):
    x = rows(shape)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(size))
    means = rules.bucket_means(x, order, size)
    counts = torch.tensor([len(bucket) for bucket in order.split(size)])
    assert torch.allclose((counts[:, None] * means).sum(0), x.sum(0))
    assert (means.amax(0) <= x.amax(0) + 1e-9).all() and (means.amin(0) >= x.amin(0) - 1e-9).all()


@given(shapes)
@settings(max_examples=15, deadline=None)
def test_no_point_is_nearer_to_all_rows_than_the_geometric_median(shape):
    x = rows(shape).numpy()

    def total(point):
        return np.linalg.norm(x - point, axis=1).sum()

    reached = total(rules.geometric_median(torch.from_numpy(x), steps=300).numpy())
    assert reached <= optimize.minimize(total, np.median(x, axis=0), method="Powell").fun * (
        1 + 1e-3
    )


@pytest.fixture(scope="module")
def byzfl():
    """The rules of byzfl (`pip install --no-deps byzfl`), without its benchmarks, which want
    torchvision.
    """
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    before = set(sys.modules)
    sys.modules["byzfl"] = package
    try:
        from byzfl.aggregators import aggregators, preaggregators
        from byzfl.attacks import attacks

        yield types.SimpleNamespace(**vars(aggregators) | vars(preaggregators) | vars(attacks))
    finally:
        for name in {name for name in sys.modules if name.partition(".")[0] == "byzfl"} - before:
            del sys.modules[name]


def test_rules_agree_with_byzfl(byzfl):
    for seed in range(20):
        x = rows((9, 5, seed)).float()
        assert torch.allclose(rules.trimmed_mean(x, 2), byzfl.TrMean(2)(x))
        # Of an even number of rows its median is the lower one, ours lies between the middle two.
        assert torch.allclose(rules.median(x), byzfl.Median()(x))
        # It counts n - f - 1 neighbours; Krum's paper, and we, one fewer.
        assert torch.allclose(rules.multi_krum(x, 1, 1), byzfl.Krum(2)(x))
        assert torch.allclose(rules.multi_krum(x, 1, 7), byzfl.MultiKrum(2)(x))
        assert torch.allclose(
            rules.centred_clipping(x, 2.0, 3), byzfl.CenteredClipping(L=3, tau=2.0)(x)
        )
        assert torch.allclose(
            rules.geometric_median(x, 500, 1e-6),
            byzfl.GeometricMedian(nu=1e-6, T=500)(x),
            atol=1e-3,
        )
        bounded = torch.stack([row * min(1, 2 / row.norm()) for row in x])
        assert torch.allclose(rules.clipped(x, 2.0), bounded)
        assert torch.allclose(rules.nearest_mixed(x, 2), byzfl.NNM(2)(x))
        carried = byzfl.CenteredClipping(L=3, tau=2.0)
        centre = rules.centred_clipping(x, 2.0, 3)
        assert torch.allclose(carried(x), centre)
        assert torch.allclose(carried(x + 1), rules.centred_clipping(x + 1, 2.0, 3, centre))
