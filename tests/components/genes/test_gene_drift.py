"""Drift by hand: relative, by size, plain; masked; and its slope where it is zero."""

import math

import pytest
import torch
from torch.func import vmap

from fedhelix.components.genes import drift, scales
from fedhelix.components.genes.drift import members, pull, squares

UNITS = [["a"], ["b", "c"]]
CENTRE = {
    "a": torch.tensor([3.0, 4.0]),
    "b": torch.tensor([0.0]),
    "c": torch.tensor([0.0, 0.0, 0.0]),
}
HERE = {"a": torch.tensor([3.0, 9.0]), "b": torch.tensor([1.0]), "c": torch.tensor([0.0, 2.0, 2.0])}


MASK = {
    "a": torch.tensor([1.0, 0.0]),
    "b": torch.tensor([0.0]),
    "c": torch.tensor([0.0, 0.0, 1.0]),
}
CONTEXT = {
    "centre": CENTRE,
    "scale": torch.ones(2),
    "learnt": torch.ones(2),
    "members": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
    "mask": MASK,
}
SUMS = torch.tensor([25.0, 9.0])  # 0 + 25, and 1 + 0 + 4 + 4


def test_which_entries_a_unit_has():
    assert torch.equal(members(UNITS), CONTEXT["members"])


def test_squares_by_hand():
    assert squares(HERE, CONTEXT, UNITS, masked=False).tolist() == [[25, 9]]
    assert squares(HERE, CONTEXT, UNITS, masked=True).tolist() == [[25, 9], [0, 4]]


def stacked(tree):
    return {
        name: stacked(value) if isinstance(value, dict) else torch.stack([value, value])
        for name, value in tree.items()
    }


@pytest.mark.parametrize("masked", [False, True])
def test_one_model_and_stacked_ones_have_the_same_squares_and_slopes(masked):
    one = {name: value.clone().requires_grad_() for name, value in HERE.items()}
    many = {name: value.clone().requires_grad_() for name, value in stacked(HERE).items()}
    alone = squares(one, CONTEXT, UNITS, masked)
    together = vmap(lambda here, context: squares(here, context, UNITS, masked))(
        many, stacked(CONTEXT)
    )
    torch.testing.assert_close(together[1], alone)
    factors = torch.tensor([[2.0, 3.0], [5.0, 7.0]])[: 1 + masked]
    slopes = torch.autograd.grad((factors * alone).sum(), list(one.values()))
    others = torch.autograd.grad((factors * together).sum(), list(many.values()))
    for slope, other in zip(slopes, others, strict=True):
        torch.testing.assert_close(other[1], slope)
    # By hand, for the second value of `a`, which has moved by 5 and is not held; and for the last
    # of `c`, which has moved by 2 and is.
    assert slopes[0][1] == 2 * 2 * 5
    assert slopes[2][2] == 2 * 2 * (3 + 7 * masked)


def test_scales_by_hand():
    assert scales(CENTRE, UNITS, "plain").tolist() == [1, 1]
    assert scales(CENTRE, UNITS, "rms").tolist() == pytest.approx([math.sqrt(2), 2])
    # A layer of zeros has no length: the floor is 1e-2 times the root of its four values.
    assert scales(CENTRE, UNITS, "relative").tolist() == pytest.approx([5, 0.02])


def test_drift_by_hand():
    plain = scales(CENTRE, UNITS, "plain")
    assert float(drift(SUMS, plain)) == pytest.approx((5 + 3) / 2)
    assert float(drift(SUMS, plain, squared=True)) == pytest.approx((25 + 9) / 2)
    assert float(drift(SUMS, scales(CENTRE, UNITS, "rms"))) == pytest.approx(
        (5 / math.sqrt(2) + 1.5) / 2
    )
    assert float(drift(SUMS, scales(CENTRE, UNITS))) == pytest.approx((1 + 150) / 2)
    held = torch.tensor([0.0, 4.0])
    assert float(drift(held, plain)) == pytest.approx((0 + 2) / 2, abs=1e-5)


def test_the_papers_equation_4_has_one_norm_for_everything():
    whole = scales(CENTRE, UNITS, "whole")
    assert float(drift(SUMS, whole, whole=True)) == pytest.approx(math.sqrt(25 + 9))
    squared = drift(SUMS, whole, squared=True, whole=True)
    assert float(squared) == pytest.approx(25 + 9)


def test_what_was_not_learnt_does_not_count():
    plain = scales(CENTRE, UNITS, "plain")
    for learnt, mean, norm in (([1.0, 0.0], 5, 5), ([0.0, 1.0], 3, 3), ([0.0, 0.0], 0, 0)):
        marks = torch.tensor(learnt)
        assert float(drift(SUMS, plain, learnt=marks)) == pytest.approx(mean)
        whole = drift(SUMS, plain, learnt=marks, whole=True)
        assert float(whole) == pytest.approx(norm, abs=1e-5)


def test_the_slope_at_the_centre_is_zero_and_finite():
    here = {name: value.clone().requires_grad_() for name, value in CENTRE.items()}
    sums = squares(here, CONTEXT, UNITS, masked=False)[0]
    drift(sums, scales(CENTRE, UNITS)).backward()
    assert all(value.grad.abs().max() == 0 for value in here.values())


@pytest.mark.parametrize(
    ("gen", "elg", "expected"), [(0.5, 0.0, 8.5), (0.0, 0.1, 0.2), (0.5, 0.1, 8.7), (0, 0, 0)]
)
def test_the_pull_by_hand(gen, elg, expected):
    # Squares of 0 + 25 and 1 + 0 + 4 + 4 in all, of 0 and 4 inside of the mask; the means are
    # 17 and 2.
    assert float(pull(HERE, CONTEXT, UNITS, gen, elg, True, False)) == pytest.approx(expected)
