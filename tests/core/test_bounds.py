"""Bounds are never printed below what they are."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fedhelix.core.bounds import rounded_up


@given(st.floats(1e-6, 1e9))
def test_bounds_are_not_rounded_down(bound):
    assert bound <= float(rounded_up(bound)) <= bound * 1.001


def test_bounds_have_four_digits():
    assert [rounded_up(bound) for bound in (13.1341, 7.9994, 2.0, 8.0, 0.0, 8.0001)] == [
        "13.14", "8", "2", "8", "0", "8.001",
    ]  # fmt: skip
    assert rounded_up(math.inf) == "inf" and rounded_up(12345.6) == "1.235e+04"
