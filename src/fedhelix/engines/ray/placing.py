"""What actors need of a federation, in Ray's object store: every node gets it once."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

from fedhelix.core.errors import UserError
from fedhelix.core.imports import IMPORTED
from fedhelix.data import Dataset
from fedhelix.data.datasets import POOLS
from fedhelix.engines.local import Setup
from fedhelix.engines.parallel.pool import with_fields
from fedhelix.engines.ray.connection import first_line
from fedhelix.engines.ray.parcel import as_array
from fedhelix.engines.splits import PackedSplits


class Placed(NamedTuple):
    """References to the parts of a setup."""

    setup: Any  # without samples and splits
    samples: Any  # a list of arrays, in the order of POOLS
    splits: Any  # the arrays of PackedSplits


def place(ray: Any, setup: Setup, samples: Any | None = None) -> Placed:
    """Put a setup into the object store; its samples may be there already."""
    splits = PackedSplits.of(setup.splits)
    data = with_fields(setup.data, **dict.fromkeys([*POOLS, "owners", "owners_test"]))
    data.__dict__.pop("_copies", None)
    module = setup.module.cpu() if setup.device.type != "cpu" else setup.module
    initial = {name: value.cpu() for name, value in setup.initial.items()}
    lean = replace(setup, data=data, splits=(), module=module, initial=initial)
    try:
        return Placed(
            place_value(ray, lean),
            place_samples(ray, setup.data) if samples is None else samples,
            ray.put([splits.samples, splits.ends]),
        )
    finally:
        if setup.device.type != "cpu":
            setup.module.to(setup.device)


def place_samples(ray: Any, data: Dataset) -> Any:
    """Put the samples of a data set into the object store."""
    return ray.put([as_array(getattr(data, name)) for name in POOLS])


def place_value(ray: Any, value: Any) -> Any:
    """Put anything there; the code of files that the nodes do not have travels with it."""
    for name in IMPORTED:
        if name in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return ray.put(value)
    except (TypeError, AttributeError) as problem:
        raise UserError(
            f"the federation cannot be sent to other machines ({first_line(problem)})"
        ) from None
