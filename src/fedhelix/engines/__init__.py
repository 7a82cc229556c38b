"""Engines: how many clients run at once. A client's work itself is in `fedhelix.client`."""

from __future__ import annotations

from fedhelix.client import Setup
from fedhelix.engines.base import Engine
from fedhelix.engines.batched import Batched
from fedhelix.engines.parallel import Parallel
from fedhelix.engines.serial import Serial
from fedhelix.errors import unknown

ENGINES: dict[str, type[Engine]] = {"serial": Serial, "parallel": Parallel, "batched": Batched}

__all__ = ["ENGINES", "Engine", "Parallel", "Serial", "engine_for"]


def engine_for(name: str, setup: Setup, workers: int | None = None) -> Engine:
    """The engine of that name; `auto` takes the fastest that fits the device."""
    if name == "auto":
        name = "batched" if setup.device.type == "cuda" else "parallel"
    if name not in ENGINES:
        raise unknown("engine", name, [*ENGINES, "auto"])
    return Parallel(setup, workers) if name == "parallel" else ENGINES[name](setup)
