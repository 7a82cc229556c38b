"""What a federation consists of: data with their owners, a network, settings, an engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedhelix import models
from fedhelix.core import seeds
from fedhelix.core.errors import UserError
from fedhelix.core.fit import check_fits
from fedhelix.core.hooks import checked
from fedhelix.core.layers import Layers
from fedhelix.core.method import Context, Method, Scorer
from fedhelix.core.objective import Loss, Metric, objective_for
from fedhelix.core.options import build, convert
from fedhelix.core.registry import make
from fedhelix.core.tree import State
from fedhelix.data import (
    Dataset,
    Partition,
    Reserve,
    ServerData,
    Split,
    from_clients,
    load,
    partitions,
)
from fedhelix.engines import Engine, engine_for
from fedhelix.engines.kernels import Kernels
from fedhelix.engines.kernels.choice import choose
from fedhelix.engines.local import ClientTask, Setup, Training
from fedhelix.federation.sampling import Newcomers, Participation, Sampler
from fedhelix.federation.state import FederationState
from fedhelix.methods import FedAvg
from fedhelix.robust.attacks import Attack, Attackers

Model = str | nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class FederationSettings(Attack, Newcomers, Participation, ServerData, Training):
    """The settings of a federation, the same for every method."""


class FederationSetup:
    """Clients with their data, a model and a method, ready to train."""

    splits: list[Split]
    supplements: dict[int, int]  # how many samples the server gave to each small client
    clients: int
    cohort_size: int

    def __init__(  # noqa: PLR0913 - those of Federation
        self,
        data: str | Dataset | Sequence[Any],
        partition: str | Partition | None,
        *,
        model: Model,
        method: str | Method | None,
        clients: int,
        cohort: int | None,
        eval_clients: int | None,
        eval_trained: bool,
        seed: int,
        loss: Loss | None,
        metric: Metric | None,
        engine: str | Callable[[Setup], Engine],
        device: str,
        workers: int | None,
        kernels: Literal["auto"] | Kernels,
        settings: FederationSettings | None,
        options: dict[str, Any],
    ):
        pool = read_data(data)
        self.method = read_method(method)
        self.seed, self.device = convert("seed", seed, int), device_of(device)
        self.eval_trained = convert("eval_trained", eval_trained, bool)
        workers = convert("workers", workers, int | None)
        kernels = convert("kernels", kernels, Literal["auto", Kernels])
        if settings is None:
            settings = build(FederationSettings, options, "a federation", grouped=False)
        scores = self.method.capabilities.server_validation
        self.settings: FederationSettings = settings.resolved(scores)
        self._own_samples(pool, read_partition(partition, pool, clients))
        self._choose_clients(cohort, eval_clients)
        if self.method.capabilities.classification and pool.classes is None:
            raise UserError(
                f"{self.method.label} needs classes, and '{pool.name}' is no classification; "
                "use tau = 0 or another method."
            )
        module, self.layers = network(model, pool, self.method, self.seed)
        self._check_attack()
        self.attackers = Attackers(self.settings, self.clients, self.layers.parameters, self.seed)
        self.studied = self.attackers.studied(pool, self.splits, len(self.reserve.scoring))
        self.triggered = self.attackers.triggered(pool)
        pool, self.splits = self.attackers.poison(pool, self.splits)
        self.objective = objective_for(pool.classes, loss, metric)
        setup = client_setup(
            Setup(
                self.method, module, self.layers, {}, pool, self.splits, self.settings,
                self.objective, self.seed, self.device,
            ),
            kernels,
        )  # fmt: skip
        self.initial: State = setup.initial
        self.engine: Engine = (
            engine_for(engine, setup, workers, self.cohort_size)
            if isinstance(engine, str)
            else engine(setup)
        )

    def _own_samples(self, pool: Dataset, partition: Partition) -> None:
        """Who owns which samples, and what the server keeps for itself."""
        settings = self.settings
        self.data_is_here = partition.here  # whether the clients' samples are on this machine
        parts = partition.divided(pool, settings.newcomers, settings.newcomers_classes, self.seed)
        self.reserve = Reserve.of(pool, parts[0], settings, self.seed)
        if self.method.capabilities.server_validation and not len(self.reserve.scoring):
            raise UserError(
                f"{self.method.label} scores models on validation data; set validation_size "
                "above 0."
            )
        splits = [
            split
            for part in parts
            for split in part.split(pool, self.seed, exclude=self.reserve.all)
        ]
        self.splits, self.supplements = self.reserve.supplement(pool, splits, settings, self.seed)
        self.clients = len(self.splits)
        self.known = self.clients - settings.newcomers  # newcomers have the last numbers
        if self.known < 1:
            raise UserError(
                f"{settings.newcomers} newcomers leave no known client among {self.clients}; "
                "lower newcomers."
            )

    def _choose_clients(self, cohort: int | None, eval_clients: int | None) -> None:
        """Who can be sampled, and whose personal models are evaluated."""
        cohort = convert("cohort", cohort, int | None)
        eval_clients = convert("eval_clients", eval_clients, int | None)
        self.cohort_size = min(10, self.known) if cohort is None else cohort
        if not 1 <= self.cohort_size <= self.known:
            raise UserError(
                f"cohort must lie between 1 and the number of clients ({self.known}), not {cohort}."
            )
        if eval_clients is not None and eval_clients < 0:
            raise UserError(f"eval_clients must be at least 0, not {eval_clients}.")
        groups = [range(self.known)]
        if self.settings.newcomers:
            groups.append(range(self.known, self.clients))
        self.samplers = [
            Sampler(self.settings, tuple(group), min(self.cohort_size, len(group)), self.seed)
            for group in groups
        ]
        self.evaluated = [
            client for group in groups for client in self._some_of(group, eval_clients)
        ]

    def _some_of(self, group: Sequence[int], count: int | None) -> list[int]:
        """All clients of a group, or the same few every time."""
        if count is None or count >= len(group):
            return list(group)
        # The purpose of a draw must not change: it decides which clients are drawn.
        chosen = seeds.numpy_draw(self.seed, "judged").choice(len(group), count, replace=False)
        return sorted(group[int(place)] for place in chosen)

    def _check_attack(self) -> None:
        shared = checked(self.method).shared_params(self.layers)
        complete = self.method.capabilities.complete_uploads
        self.needed = shared if complete else ()  # what every upload must hold
        attack = self.settings.attack
        if not self.settings.forges:
            return
        if self.method.capabilities.packed_uploads:
            raise UserError(
                f"attack = {attack} cannot change what {self.method.label} uploads, which is "
                "packed."
            )
        if self.method.capabilities.packed_downloads:
            raise UserError(
                f"attack = {attack} cannot read what clients of {self.method.label} receive, "
                "which is packed."
            )
        if not shared:
            warnings.warn(
                f"attack = {attack} has nothing to forge: {self.method.label} uploads no model.",
                stacklevel=5,
            )

    @property
    def training(self) -> Training:
        """How clients train."""
        return self.settings

    @property
    def data(self) -> Dataset:
        """The data, where the engine keeps them."""
        return self.engine.setup.data

    def cohort(self, t: int) -> list[int]:
        """The clients sampled in round t: the same for every method with this seed."""
        return self.samplers[self.settings.arrived(t)].cohort(t)

    def context(self, t: int, rounds: int) -> Context:
        """What the server's hooks see in round t."""
        arrived = self.settings.arrived(t)
        everybody = arrived or not self.settings.newcomers
        return Context(
            round=t,
            rounds=rounds,
            clients=self.clients if everybody else self.known,
            layers=self.layers,
            initial=self.initial,
            device=self.device,
            seed=self.seed,
            cohort=self.cohort,
            present=self.samplers[arrived].members,
            score=self.scorer(self.reserve.scoring),
            score_on=self._score_on if len(self.reserve.scoring) else None,
        )

    def _score_on(self, states: Sequence[State], count: int) -> list[tuple[float, float]]:
        """Metric and loss of models on about so many of the server's samples, evenly spread."""
        samples = self.reserve.scoring
        score = self.scorer(samples[:: max(1, len(samples) // count)])
        assert score is not None
        return score(states)

    def scorer(self, samples: np.ndarray) -> Scorer | None:
        """Metric and loss of models on some training samples; None where there are none."""
        if not len(samples):
            return None
        return partial(self.engine.score, pool="train", indices=torch.from_numpy(samples))

    def tasks(
        self, state: FederationState, clients: Sequence[int], ctx: Context
    ) -> list[ClientTask]:
        """What the given clients would receive now, to use it."""
        deliver = checked(self.method).deliver
        return [
            ClientTask(
                i,
                state.round,
                deliver(state.server, i, ctx),
                state.client_states.get(i, {}),
                final=state.round >= ctx.rounds,
            )
            for i in clients
        ]

    def change_setup(self, setup: Setup) -> None:
        """Let the engine go on with other clients."""
        self.engine.close()
        self.engine.setup = setup


def read_data(data: str | Dataset | Sequence[Any]) -> Dataset:
    """A data set by its name, as it is, or made of one part per client."""
    if isinstance(data, str):
        return load(data)
    return data if isinstance(data, Dataset) else from_clients(data)


def read_partition(partition: str | Partition | None, pool: Dataset, clients: int) -> Partition:
    """A partition as it is or from text; None takes the usual one for these data."""
    if partition is None:
        partition = partitions.usual(pool)
    if isinstance(partition, str):
        partition = partitions.parse(partition, clients)
    if not isinstance(partition, Partition):
        raise UserError(
            f"partition is text or a value such as partition.iid(10), not {partition!r}."
        )
    return partition


def read_method(method: str | Method | None) -> Method:
    """A method by its name or as it is; None is FedAvg."""
    chosen = make(method) if isinstance(method, str) else FedAvg() if method is None else method
    if not isinstance(chosen, Method):
        raise UserError(f"method is a name or a value such as FedAvg(), not {method!r}.")
    return chosen


def network(model: Model, pool: Dataset, method: Method, seed: int) -> tuple[nn.Module, Layers]:
    """The network for these data and its layers, if it fits them and the method can use it."""
    outputs = pool.classes if pool.classes is not None else math.prod(pool.y.shape[1:])
    module = models.build(model, pool.shape, outputs, data_name=pool.name, seed=seed)
    example = pool.prepare(pool.x[:2]).cpu()  # where a new network is
    check_fits(module, example, outputs)
    layers = Layers.of(module, example)
    checked(method).check(layers)
    return module, layers


def client_setup(setup: Setup, kernels: Kernels | Literal["auto"]) -> Setup:
    """What clients' work depends on, on its device, with the initial state and with kernels."""
    batch_size = setup.training.batch_size
    if batch_size < 2 and any(isinstance(m, nn.BatchNorm1d) for m in setup.module.modules()):
        raise UserError("BatchNorm needs two samples in a minibatch; set batch_size to 2 or more.")
    if setup.layers.norm and any(len(split.train) == 1 for split in setup.splits):
        raise UserError(
            "a client has only one training sample, but BatchNorm needs two; use larger clients."
        )
    state = setup.module.to(setup.device).state_dict()
    initial = {name: state[name].detach().clone() for name in setup.layers.names}
    setup = replace(setup, initial=initial, data=setup.data.to(setup.device))
    return replace(setup, kernels=choose(setup) if kernels == "auto" else kernels)


def device_of(name: str) -> torch.device:
    """The device of that name; `auto` takes what there is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"there is no device '{name}' here; use auto to take what there is."
        ) from None
    return device
