"""Denoised matrices: published constants, formulas by hand, and what the best shrinkage does."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq

from fedhelix.components.shrinkage import denoised, marchenko_pastur_median, shrunk


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.3, 0.8, 1.0])
def test_the_median_of_noise_by_quadrature(ratio):
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2

    def density(value):
        return math.sqrt((high - value) * (value - low)) / (2 * math.pi * ratio * value)

    median = brentq(lambda end: quad(density, low, end)[0] - 0.5, low + 1e-6, high)
    assert marchenko_pastur_median(ratio) == pytest.approx(median, abs=2e-4)


@pytest.mark.parametrize(
    ("ratio", "threshold"), [(0.05, 1.5194), (0.1, 1.6089), (0.5, 2.1711), (1.0, 2.8582)]
)
def test_the_thresholds_that_gavish_and_donoho_print(ratio, threshold):
    """Their Table IV (2014): the optimal hard threshold in units of the median."""
    root = math.sqrt(ratio**2 + 14 * ratio + 1)
    best = math.sqrt(2 * (ratio + 1) + 8 * ratio / (ratio + 1 + root))
    assert best / math.sqrt(marchenko_pastur_median(ratio)) == pytest.approx(threshold, abs=2e-4)


def test_shrinkage_by_hand():
    """In a square matrix sqrt(y² - 4), and nothing up to the edge."""
    values = torch.tensor([0.5, 2.0, 3.0, 10.0])
    expected = [0.0, 0.0, math.sqrt(5), math.sqrt(96)]
    assert shrunk(values, 1.0).tolist() == pytest.approx(expected)
    assert float(shrunk(torch.tensor(2.0), 0.25)) == pytest.approx(math.sqrt(6.5625) / 2)


@pytest.mark.parametrize("shape", [(20, 200), (60, 60), (300, 40)])
def test_little_is_left_of_noise(shape):
    noise = 3 + 0.1 * randn(*shape)
    assert denoised(noise).norm() < 0.35 * (noise - noise.mean(0)).norm()


@pytest.mark.parametrize(("shape", "bound"), [((40, 200), 1.6), ((60, 60), 1.6), ((300, 40), 3.2)])
def test_groups_get_nearly_what_knowing_them_would_give(shape, bound):
    """Many short rows tell less: each has two components of its own, with their noise."""
    count, length = shape
    centres = randn(3, length, seed=1)
    group = torch.arange(count) % 3
    truth = centres[group] - centres[group].mean(0)
    rows = truth + 0.8 * randn(*shape, seed=2)
    means = torch.stack([rows[group == k].mean(0) for k in range(3)])
    known = means[group] - rows.mean(0)
    error = (denoised(rows) - truth).norm()
    assert error < 0.35 * (rows - rows.mean(0) - truth).norm()
    assert error < bound * (known - truth).norm()


def test_no_shrinkage_of_these_singular_values_is_much_better():
    """The least error that any factors on the singular vectors reach, which need the truth."""
    u, v = randn(80, 2, seed=3), randn(2, 120, seed=4)
    truth = 0.4 * (u - u.mean(0)) @ v
    rows = truth + randn(80, 120, seed=5)
    left, _, right = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    factors = ((left.T @ truth) * right).sum(1)
    best = ((left * factors) @ right - truth).norm()
    assert best <= (denoised(rows) - truth).norm() < 1.05 * best


@given(st.integers(4, 30), st.integers(2, 30), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_moving_scaling_turning_and_sorting_rows_does_what_it_should(count, length, seed):
    rows = randn(count, length, seed=seed) + 3 * randn(count, 1, seed=seed + 1) * randn(1, length)
    plain = denoised(rows)
    size = float(rows.norm())
    turn, _ = torch.linalg.qr(randn(length, length, seed=seed + 2))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(denoised(rows + 7), plain, atol=1e-6 * size)
    assert torch.allclose(denoised(5 * rows), 5 * plain, atol=1e-6 * size)
    assert torch.allclose(denoised(rows @ turn), plain @ turn, atol=1e-6 * size)
    assert torch.allclose(denoised(rows[order]), plain[order], atol=1e-6 * size)
    assert plain.norm() <= (rows - rows.mean(0)).norm() * (1 + 1e-9)
    assert torch.allclose(plain.mean(0), torch.zeros(length, dtype=plain.dtype), atol=1e-6 * size)


def test_few_or_equal_rows_have_nothing_of_their_own():
    assert not denoised(randn(1, 5)).any() and not denoised(randn(2, 5)).any()
    assert not denoised(torch.ones(6, 5)).any()
    huge = denoised(torch.full((6, 5), 3e38) * torch.eye(6, 5))
    assert huge.isfinite().all() and huge.dtype == torch.float32
    assert np.isfinite(marchenko_pastur_median(1e-6))
