"""Engines: how many clients run at once. A client's work itself is in `fedhelix.client`."""

from __future__ import annotations

from fedhelix.client import Setup
from fedhelix.engines.base import Engine
from fedhelix.engines.batched import Batched
from fedhelix.engines.kernels import step_seconds
from fedhelix.engines.parallel import Parallel
from fedhelix.engines.serial import Serial
from fedhelix.errors import unknown

LONG_ROUND = 0.5  # seconds

ENGINES: dict[str, type[Engine]] = {"serial": Serial, "parallel": Parallel, "batched": Batched}

__all__ = ["ENGINES", "Engine", "Parallel", "Serial", "engine_for"]


def worth_processes(setup: Setup, cohort: int) -> bool:
    """Whether a round takes long enough that starting worker processes pays."""
    steps = cohort * setup.training.epochs * sum(len(split.train) for split in setup.splits) / len(setup.splits)
    step_seconds(setup, setup.kernels)  # the first one is slow
    return steps / setup.training.batch_size * step_seconds(setup, setup.kernels) > LONG_ROUND


def engine_for(name: str, setup: Setup, workers: int | None = None, cohort: int = 10) -> Engine:
    """The engine of that name.

    `auto` takes `batched` on a GPU; on a CPU `parallel` where a round is long and `serial` where it is short. These
    two give the same results to the bit.
    """
    if name == "auto":
        name = "batched" if setup.device.type == "cuda" else "parallel" if worth_processes(setup, cohort) else "serial"
    if name not in ENGINES:
        raise unknown("engine", name, [*ENGINES, "auto"])
    return Parallel(setup, workers) if name == "parallel" else ENGINES[name](setup)
