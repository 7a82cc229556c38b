"""Bounds as people read them."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context


def rounded_up(bound: float) -> str:
    """Four digits of a bound, such as an epsilon that was spent: rounded down it would not hold."""
    if not math.isfinite(bound):
        return f"{bound:g}"
    digits = Context(prec=4, rounding=ROUND_CEILING)
    return f"{float(digits.create_decimal_from_float(float(bound))):.4g}"
