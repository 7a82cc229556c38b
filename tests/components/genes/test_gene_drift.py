"""Drift by hand: relative, by size, plain; masked; and its slope where it is zero."""

import math

import pytest
import torch

from fedhelix.components.genes import drift, scales
from fedhelix.components.genes.drift import flat, pull, unflat

UNITS = [["a"], ["b", "c"]]
CENTRE = {
    "a": torch.tensor([3.0, 4.0]),
    "b": torch.tensor([0.0]),
    "c": torch.tensor([0.0, 0.0, 0.0]),
}
HERE = {"a": torch.tensor([3.0, 9.0]), "b": torch.tensor([1.0]), "c": torch.tensor([0.0, 2.0, 2.0])}


SIZES = [2, 4]


def squares(here=HERE, mask=None):
    apart = flat(here, UNITS) - flat(CENTRE, UNITS)
    return apart.square() if mask is None else apart.square() * flat(mask, UNITS)


def test_a_vector_becomes_the_entries_again():
    again = unflat(flat(HERE, UNITS), UNITS, CENTRE)
    assert again.keys() == HERE.keys()
    assert all(torch.equal(again[name], HERE[name]) for name in HERE)


def test_scales_by_hand():
    assert scales(CENTRE, UNITS, "plain").tolist() == [1, 1]
    assert scales(CENTRE, UNITS, "rms").tolist() == pytest.approx([math.sqrt(2), 2])
    # A layer of zeros has no length: the floor is 1e-2 times the root of its four values.
    assert scales(CENTRE, UNITS, "relative").tolist() == pytest.approx([5, 0.02])


def test_drift_by_hand():
    plain = scales(CENTRE, UNITS, "plain")
    assert float(drift(squares(), SIZES, plain)) == pytest.approx((5 + 3) / 2)
    assert float(drift(squares(), SIZES, plain, squared=True)) == pytest.approx((25 + 9) / 2)
    assert float(drift(squares(), SIZES, scales(CENTRE, UNITS, "rms"))) == pytest.approx(
        (5 / math.sqrt(2) + 1.5) / 2
    )
    assert float(drift(squares(), SIZES, scales(CENTRE, UNITS))) == pytest.approx((1 + 150) / 2)
    mask = {
        "a": torch.tensor([1.0, 0.0]),
        "b": torch.tensor([0.0]),
        "c": torch.tensor([0.0, 0.0, 1.0]),
    }
    assert float(drift(squares(mask=mask), SIZES, plain)) == pytest.approx((0 + 2) / 2, abs=1e-5)


def test_the_papers_equation_4_has_one_norm_for_everything():
    whole = scales(CENTRE, UNITS, "whole")
    assert float(drift(squares(), SIZES, whole, whole=True)) == pytest.approx(math.sqrt(25 + 9))
    squared = drift(squares(), SIZES, whole, squared=True, whole=True)
    assert float(squared) == pytest.approx(25 + 9)


def test_what_was_not_learnt_does_not_count():
    plain = scales(CENTRE, UNITS, "plain")
    for learnt, mean, norm in (([1.0, 0.0], 5, 5), ([0.0, 1.0], 3, 3), ([0.0, 0.0], 0, 0)):
        marks = torch.tensor(learnt)
        assert float(drift(squares(), SIZES, plain, learnt=marks)) == pytest.approx(mean)
        whole = drift(squares(), SIZES, plain, learnt=marks, whole=True)
        assert float(whole) == pytest.approx(norm, abs=1e-5)


def test_the_slope_at_the_centre_is_zero_and_finite():
    here = {name: value.clone().requires_grad_() for name, value in CENTRE.items()}
    drift(squares(here), SIZES, scales(CENTRE, UNITS)).backward()
    assert all(value.grad.abs().max() == 0 for value in here.values())


@pytest.mark.parametrize(
    ("gen", "elg", "expected"), [(0.5, 0.0, 8.5), (0.0, 0.1, 0.2), (0.5, 0.1, 8.7), (0, 0, 0)]
)
def test_the_pull_by_hand(gen, elg, expected):
    mask = {"a": [1.0, 0.0], "b": [0.0], "c": [0.0, 0.0, 1.0]}
    context = {
        "centre": flat(CENTRE, UNITS),
        "scale": torch.ones(2),
        "learnt": torch.ones(2),
        "mask": flat({name: torch.tensor(values) for name, values in mask.items()}, UNITS),
    }
    # Squares of 0 + 25 and 1 + 0 + 4 + 4 in all, of 0 and 4 inside of the mask; the means are
    # 17 and 2.
    assert float(pull(HERE, context, UNITS, gen, elg, True, False)) == pytest.approx(expected)
