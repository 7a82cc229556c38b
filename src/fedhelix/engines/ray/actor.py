"""An actor: it receives a setup once, then runs the engine that its machine would use alone."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from fedhelix.core.errors import UserError
from fedhelix.data import Split
from fedhelix.data.datasets import POOLS
from fedhelix.engines.base import Engine
from fedhelix.engines.batched.engine import Batched
from fedhelix.engines.blame import described
from fedhelix.engines.kernels.compiled import available
from fedhelix.engines.local import Setup
from fedhelix.engines.parallel.pool import with_fields
from fedhelix.engines.parallel.worker import Failure
from fedhelix.engines.ray.parcel import Parcel, Unpacker, as_view, pack
from fedhelix.engines.serial import Serial
from fedhelix.engines.splits import PackedSplits


class ClientActor:
    """Works on clients, several in one call, on one GPU or with one thread of a CPU."""

    def __init__(self, gpu: bool):
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.device = torch.device("cuda" if gpu else "cpu")
        self.engine: Engine | None = None
        self.program: Iterator[Any] = iter(())

    def configure(self, placed: Sequence[Any], choices: dict[str, str]) -> Failure | None:
        """Take a setup; a failure says why it cannot be used here.

        The references come in a list, so that what they hold is loaded, or not, in this method.
        """
        return self._answer(lambda: self._configure(placed, choices))

    def _configure(self, placed: Sequence[Any], choices: dict[str, str]) -> None:
        import ray

        setup, samples, splits = ray.get(list(placed))
        self.engine = local_engine(setup, samples, PackedSplits(*splits), self.device)
        self.engine.choices.update(choices)

    def begin(self, program: Sequence[Any]) -> Failure | None:
        """Take a program for the setup: a function that makes an iterator of the engine."""
        return self._answer(lambda: self._begin(*program))

    def _begin(self, program: Any) -> None:
        import ray

        self.program = ray.get(program)(self.engine)

    def advance(self) -> Parcel | Failure:
        """What the program yields next, or None at its end; and the choices made by timing."""
        return self._answer(self._advance)

    def _advance(self) -> Parcel:
        assert self.engine is not None
        item = next(self.program, None)
        return pack((item, dict(self.engine.choices)))[0]

    def release(self) -> None:
        """Forget the setup until the next one comes."""
        self.engine, self.program = None, iter(())

    def work(self, name: str, shared: np.ndarray | None, parcel: Parcel) -> Parcel | Failure:
        """Call a method of the engine with lists of arguments, one entry per task.

        The answer holds the results, one per task, and the choices that were made by timing.
        """
        return self._answer(lambda: self._work(name, shared, parcel))

    def _work(self, name: str, shared: np.ndarray | None, parcel: Parcel) -> Parcel:
        assert self.engine is not None
        arguments = Unpacker(self.device, shared).unpack(parcel)
        results = WORK[name](self.engine, *arguments)
        return pack((results, dict(self.engine.choices)))[0]

    def _answer(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except UserError as problem:
            return Failure(str(problem), "")
        except Exception as problem:
            return Failure(described(problem), traceback.format_exc())


def client_inits(engine: Engine, tasks: Sequence[Any]) -> list[Any]:
    """What clients send before round 0, in their order."""
    sent = engine.client_init(tasks)
    return [sent[task.client] for task in tasks]


def outputs(engine: Engine, parts: Sequence[Any], state: Any, subset: Any) -> list[Any]:
    """One model's outputs for several parts of the samples."""
    return [engine.outputs(state, subset, part) for part in parts]


WORK: dict[str, Callable[..., list[Any]]] = {
    "run_clients": lambda engine, tasks: engine.run_clients(tasks),
    "personal": lambda engine, tasks: engine.personal(tasks),
    "evaluate_each": lambda engine, tasks: engine.evaluate_each(tasks),
    "evaluate_received": lambda engine, tasks: engine.evaluate_received(tasks),
    "client_init": client_inits,
    "outputs": outputs,
    "score": lambda engine, states, pool, indices: engine.score(states, pool, indices),
}
"""What an actor can be asked for: the first list has an entry per task, the rest is for all."""


def local_engine(
    setup: Setup, samples: Sequence[np.ndarray], splits: PackedSplits, device: torch.device
) -> Engine:
    """The engine that one machine would use, on the samples in the object store."""
    pools = {name: as_view(array) for name, array in zip(POOLS, samples, strict=True)}
    data = with_fields(setup.data, **pools)
    initial = {name: value.to(device) for name, value in setup.initial.items()}
    kernels = "native" if setup.kernels == "compiled" and not available() else setup.kernels
    here = replace(
        setup, data=data.to(device), splits=cast(Sequence[Split], splits), device=device,
        initial=initial, module=setup.module.to(device), kernels=kernels,
    )  # fmt: skip
    return Batched(here) if device.type == "cuda" else Serial(here)
