"""Many clients at once on a Ray cluster: one actor per GPU or CPU, which may come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.means import Means, tensors_of
from fedhelix.core.tree import State, Tree, tensors
from fedhelix.engines.base import Engine, Evaluation
from fedhelix.engines.local import (
    EVALUATED_AT_ONCE,
    ClientResult,
    ClientTask,
    PersonalModel,
    Scores,
    Setup,
    Subset,
    samples_of,
)
from fedhelix.engines.ray.cluster import Cluster, Tasks
from fedhelix.engines.ray.connection import HOLDERS, connect, equal_nodes
from fedhelix.engines.ray.parcel import Parcel, Slices, Unpacker, pack, pack_shared
from fedhelix.engines.ray.placing import place

CHUNK = EVALUATED_AT_ONCE[0]  # as in `predict`


class RayEngine(Engine):
    """Gives the results of `serial` up to rounding, whatever the number of actors.

    It connects at once, so that a wrong address shows before a run begins; actors start when they
    are first needed. `workers` is the largest number of them; without `gpus` they use CPUs only.
    """

    name: ClassVar[str] = "ray"

    def __init__(
        self,
        setup: Setup,
        workers: int | None = None,
        address: str | None = None,
        gpus: bool = True,
    ):
        if workers is not None and workers < 1:
            raise UserError(f"workers must be at least 1, not {workers}.")
        super().__init__(setup)
        self.workers, self.address, self.gpus = workers, address, gpus
        self._cluster: Cluster | None = None
        self._nodes = equal_nodes(connect(address, workers))

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the tasks, in order."""
        return self._each("run_clients", tasks)

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the clients send before round 0."""
        clients = [task.client for task in tasks]
        return dict(zip(clients, self._each("client_init", tasks), strict=True))

    def personal(self, tasks: Sequence[ClientTask]) -> list[PersonalModel]:
        """The clients' personal models as of now."""
        return self._each("personal", tasks)

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Scores of clients that each use a different model."""
        return self._each("evaluate_each", tasks)

    def evaluate_received(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Each client's personal model on its own samples, before `personalize`."""
        return self._each("evaluate_received", tasks)

    def outputs(self, state: State, subset: Subset, indices: Tensor) -> Tensor:
        """One model's outputs for some samples of a subset; few samples stay here."""
        if len(indices) <= CHUNK:
            return super().outputs(state, subset, indices)
        parts = indices.split(CHUNK)
        sizes = [len(part) for part in parts]
        work = ActorWork(self, "outputs", parts, sizes, list(state.values()), (state, subset))
        return torch.cat(self._run(work))

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[Evaluation]:
        """Metric and loss of several models on the same samples, spread over the actors."""
        if len(states) < 2:
            return super().score(states, pool, indices)
        if indices is None:
            indices = torch.arange(len(samples_of(self.setup, pool)[1]))
        shared = [indices, *(tensors_of(states) if isinstance(states, Means) else [])]
        work = ActorWork(self, "score", states, [1] * len(states), shared, (pool, indices))
        work.even = True
        return self._run(work)

    def close(self) -> None:
        """Release the actors; the engine takes others if it is used again."""
        if self._cluster is not None:
            self._cluster.release()
            self._cluster = None

    def _each(self, name: str, tasks: Sequence[ClientTask]) -> list[Any]:
        """Call a method of the actors' engines for all tasks."""
        sizes = [len(self.setup.splits[task.client].train) for task in tasks]
        uses = Counter(id(tensor) for task in tasks for tensor in tensors(task.payload))
        shared = [
            tensor for task in tasks for tensor in tensors(task.payload) if uses[id(tensor)] > 1
        ]
        return self._run(ActorWork(self, name, tasks, sizes, shared))

    def _run(self, work: Tasks) -> list[Any]:
        if not work.sizes:
            return []
        try:
            return self._open().run(work)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """End all actors, so that none goes on with work whose result nobody awaits."""
        if self._cluster is not None:
            self._cluster.end()
            self._cluster = None

    def _open(self) -> Cluster:
        if self._cluster is None:
            with self.starting():
                self._cluster = self._new_cluster()
                self._cluster.ready()
        return self._cluster

    def _new_cluster(self) -> Cluster:
        for other in list(HOLDERS):  # they would wait for each other's processors
            other.close()
        HOLDERS.add(self)
        ray = connect(self.address, self.workers)
        placed, choices = list(place(ray, self.setup)), self.choices
        return Cluster(
            ray,
            lambda actor: actor.configure.remote(placed, dict(choices)),
            self._nodes,
            self.workers,
            self.gpus,
        )


class ActorWork(Tasks):
    """Calls of one method of the actors' engines; shared tensors go to every node once."""

    def __init__(
        self,
        engine: RayEngine,
        name: str,
        tasks: Sequence[Any],
        sizes: Sequence[int],
        shared: Sequence[Tensor],
        more: tuple[Any, ...] = (),
    ):
        self.engine, self.name, self.tasks, self.sizes = engine, name, tasks, sizes
        self.shared, self.more = shared, more

    @cached_property
    def store(self) -> tuple[Any, Slices]:
        """The shared tensors in the object store, and where they lie in it."""
        if not self.shared:
            return None, {}
        content, slices = pack_shared(self.shared)
        ray = connect(self.engine.address, self.engine.workers)
        return ray.put(content), slices

    def message(self, taken: Sequence[int]) -> tuple[str, Any, Parcel]:
        """The arguments of an actor's `work` for some of the tasks."""
        reference, slices = self.store
        tasks: Sequence[Any] = (
            self.tasks.rows(taken)
            if isinstance(self.tasks, Means)
            else [self.tasks[index] for index in taken]
        )
        parcel, _ = pack((tasks, *self.more), slices)
        return self.name, reference, parcel

    def opened(self, received: Parcel) -> Sequence[Any]:
        """The results in an answer; the actor's choices become the run's."""
        results, choices = Unpacker(self.engine.setup.device).unpack(received)
        for key, choice in choices.items():
            self.engine.choices.setdefault(key, choice)
        return results

    def label(self, index: int) -> str:
        """A task in error messages."""
        task = self.tasks[index]
        return f"client {task.client}" if isinstance(task, ClientTask) else "the evaluation"
