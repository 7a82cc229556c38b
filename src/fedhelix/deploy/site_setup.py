"""What a site with its own samples works with in a run."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fedhelix.core.objective import objective_for
from fedhelix.core.tree import Tree
from fedhelix.data import Dataset, Split
from fedhelix.deploy.remote_data import site_split
from fedhelix.engines.local import Setup
from fedhelix.federation.inputs import client_setup, device_of, network
from fedhelix.runs.spec import RunSpec


def own_setup(spec: RunSpec, data: Dataset, client: int, supplement: Tree) -> Setup:
    """The set-up for a client number, with the samples that the server has supplied, if any."""
    split = site_split(len(data.x), len(data.x_test), spec.config.valid, spec.config.seed, client)
    if supplement:
        x, y = (torch.cat([getattr(data, name), supplement[name]]) for name in ("x", "y"))
        added = np.arange(len(data.x), len(x))
        split = dataclasses.replace(split, train=np.append(split.train, added))
        data = dataclasses.replace(data, x=x, y=y)
    # The site knows nothing of the other clients.
    empty = Split(*[np.empty(0, dtype=np.int64)] * 3)
    return site_setup(spec, data, [empty] * client + [split])


def site_setup(spec: RunSpec, data: Dataset, splits: list[Split]) -> Setup:
    """What `Federation` sets up for its engine, for one site with its own samples."""
    config = spec.config
    objective = objective_for(data.classes, targets=data.y)
    module, layers = network(config.model, data, spec.method, config.seed, objective)
    setup = Setup(
        spec.method, module, layers, {}, data, splits, config, objective, config.seed,
        device_of("auto"),
    )  # fmt: skip
    return client_setup(setup, config.kernels)
