"""How much less an upload counts, the older the model is that it was trained from."""

from __future__ import annotations

from typing import Literal

Discount = Literal["constant", "polynomial", "hinge"]


def discount(staleness: int, kind: Discount, slope: float = 0.5, grace: int = 0) -> float:
    """The factor on an upload whose model is so many versions old; 1 if it is the latest.

    `polynomial` is (1 + staleness) ^ -slope; `hinge` is 1 up to `grace` versions and then falls as
    1 / (1 + slope * (staleness - grace)).
    """
    if kind == "constant" or staleness == 0:
        return 1.0
    if kind == "polynomial":
        return float((1 + staleness) ** -slope)
    return 1 / (1 + slope * max(0, staleness - grace))
