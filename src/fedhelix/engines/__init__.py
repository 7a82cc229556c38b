"""Engines: how many clients run at once. One client's work is in `fedhelix.engines.local`."""

from __future__ import annotations

from fedhelix.core.errors import UserError, unknown
from fedhelix.engines.base import Engine
from fedhelix.engines.batched.engine import Batched
from fedhelix.engines.kernels.choice import step_seconds
from fedhelix.engines.local import Setup
from fedhelix.engines.parallel.engine import Parallel
from fedhelix.engines.ray.engine import RayEngine
from fedhelix.engines.serial import Serial

LONG_ROUND = 0.5  # seconds

ENGINES: dict[str, type[Engine]] = {
    "serial": Serial,
    "parallel": Parallel,
    "batched": Batched,
    "ray": RayEngine,
}

__all__ = ["ENGINES", "Engine", "Parallel", "RayEngine", "Serial", "engine_for"]


def suited(setup: Setup, cohort: int) -> tuple[str, str]:
    """The engine that `auto` takes, and the reason."""
    if setup.device.type == "cuda":
        return "batched", "a GPU wants many clients at once"
    samples = sum(len(split.train) for split in setup.splits) / len(setup.splits)
    steps = cohort * setup.training.epochs * samples / setup.training.batch_size
    step_seconds(setup, setup.kernels)  # warm-up: the first step is slow
    seconds = steps * step_seconds(setup, setup.kernels)
    if seconds > LONG_ROUND:
        return "parallel", f"a round of about {seconds:.1f} s is worth several processes"
    return "serial", f"a round of about {seconds:.2f} s is too short to start processes for"


def engine_for(
    name: str,
    setup: Setup,
    workers: int | None = None,
    cohort: int = 10,
    address: str | None = None,
    gpus: bool = True,
) -> Engine:
    """The engine of that name.

    `auto` takes `batched` on a GPU. On a CPU it takes `parallel` where a round is long and `serial`
    where it is short; these two give bitwise identical results. `ray` runs on a cluster: the one
    at `address`, with its GPUs or without.
    """
    why = "as configured"
    if name == "auto":
        name, why = suited(setup, cohort)
    if name not in ENGINES:
        raise unknown("engine", name, [*ENGINES, "auto"])
    if address is not None and name != "ray":
        raise UserError(f"address is for the ray engine, not for {name}; leave it out.")
    engine: Engine
    if name == "ray":
        engine = RayEngine(setup, workers, address, gpus)
    else:
        engine = Parallel(setup, workers) if name == "parallel" else ENGINES[name](setup)
    engine.why = why
    return engine
