"""What a federation consists of: data with their owners, a network, settings, an engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from fedhelix.core import seeds
from fedhelix.core.errors import UserError
from fedhelix.core.hooks import checked
from fedhelix.core.method import Context, Method, Scorer
from fedhelix.core.objective import Loss, Metric, objective_for
from fedhelix.core.options import build, checks_options, convert
from fedhelix.core.tree import State
from fedhelix.core.wrapper import without_classes
from fedhelix.data import (
    Dataset,
    Partition,
    Reserve,
    Scaling,
    ServerData,
    Shift,
    Split,
    scaled,
    shifted,
)
from fedhelix.engines import Engine, engine_for
from fedhelix.engines.kernels import Kernels
from fedhelix.engines.local import ClientTask, Setup, Training, samples_trained, try_phases
from fedhelix.federation.devices import Devices, devices_for
from fedhelix.federation.inputs import (
    OWN,
    Model,
    check_apart,
    check_forging,
    client_setup,
    device_of,
    network,
    read_data,
    read_method,
    read_partition,
)
from fedhelix.federation.keywords import check_keys
from fedhelix.federation.sampling import Newcomers, Participation, Sampler, class_shares
from fedhelix.federation.schedule import schedule_for
from fedhelix.federation.small_clients import check_for_batchnorm
from fedhelix.federation.sources import Sources
from fedhelix.federation.state import FederationState
from fedhelix.robust.attacks import Attack, Attackers

NOTHING: Mapping[int, list[int]] = MappingProxyType({})


@checks_options
@dataclass(frozen=True)
class FederationSettings(
    Attack, Devices, Newcomers, Participation, Scaling, ServerData, Shift, Training
):
    """The settings of a federation, the same for every method."""


class FederationSetup:
    """Clients with their data, a model and a method, ready to train."""

    splits: list[Split]
    supplements: dict[int, int]  # how many samples the server gave to each small client
    clients: int
    joined = 0  # of these, after a run
    untaken: Collection[int] = ()  # places for sites that are not there yet
    cohort_size: int
    cohort_is_auto: bool  # it grows with the clients
    made_from: dict[str, Any] | None = None  # its arguments, if they can be written down
    sources = Sources()  # the files of its network and its method

    def __init__(  # noqa: PLR0913 - those of Federation
        self,
        data: Any,
        partition: str | Partition | None,
        *,
        model: Model,
        method: str | Method | None,
        clients: int | None,
        cohort: int | None,
        eval_clients: int | None,
        eval_trained: bool,
        seed: int,
        loss: Loss | None,
        metric: Metric | None,
        engine: str | Callable[[Setup], Engine],
        device: str,
        workers: int | None,
        address: str | None,
        kernels: Literal["auto"] | Kernels,
        settings: FederationSettings | None,
        options: dict[str, Any],
    ):
        pool = read_data(data, partition)
        self.method = read_method(method)
        self.seed, self.device = convert("seed", seed, int), device_of(device)
        self.eval_trained = convert("eval_trained", eval_trained, bool)
        workers = convert("workers", workers, int | None)
        address = convert("address", address, str | None)
        kernels = convert("kernels", kernels, Literal["auto", Kernels])
        if settings is None:
            check_keys(options, self.method, [field.name for field in fields(FederationSettings)])
            settings = build(FederationSettings, options, "a federation", False, beside=OWN)
        scores = self.method.capabilities.server_validation
        self.settings: FederationSettings = settings.resolved(scores)
        clients = convert("clients", clients, int | None)
        given = pool
        pool = self._own_samples(given, read_partition(partition, pool, clients))
        if clients is not None and clients not in (self.known, self.clients):
            raise UserError(
                f"clients = {clients}, but the partition or the owners of the data make "
                f"{self.clients}; leave clients out, start `fedhelix up` with --sites "
                f"{self.clients}, or use another partition."
            )
        self._choose_clients(pool, cohort, eval_clients)
        if self.method.capabilities.classification and pool.classes is None:
            setting = without_classes(self.method)
            raise UserError(
                f"{self.method.label} needs classes, and '{pool.name}' is no classification; "
                f"use {f'{setting} or ' if setting else ''}another method."
            )
        self.devices = devices_for(self.settings, self.method, self.clients, self.seed)
        self.schedule = schedule_for(
            self.settings, self.devices, self.method, self.cohort_size, self._samples_trained
        )
        self.objective = objective_for(pool.classes, loss, metric, pool.y)
        module, self.layers = network(model, pool, self.method, self.seed, self.objective)
        if self.layers.norm:
            check_for_batchnorm(self.splits, self.names, self.partition, given, self.settings)
        self._check_attack()
        self.attackers = Attackers(self.settings, self.clients, self.layers.parameters, self.seed)
        self.studied = self.attackers.studied(pool, self.splits, len(self.reserve.scoring))
        self.triggered = self.attackers.triggered(pool)
        pool, self.splits = self.attackers.poison(pool, self.splits)
        setup = client_setup(
            Setup(
                self.method, module, self.layers, {}, pool, self.splits, self.settings,
                self.objective, self.seed, self.device,
            ),
            kernels,
        )  # fmt: skip
        if self.data_is_here:
            try_phases(setup)
        self.initial: State = setup.initial
        self.engine: Engine = (
            engine_for(engine, setup, workers, self.cohort_size, address, gpus=device != "cpu")
            if isinstance(engine, str)
            else engine(setup)
        )

    def _own_samples(self, pool: Dataset, partition: Partition) -> Dataset:
        """Who owns which samples, and what the server keeps for itself; the data with shifts."""
        settings = self.settings
        self.partition = partition
        self.data_is_here = partition.here  # whether the clients' samples are on this machine
        if not self.data_is_here:
            check_apart(settings)
        self._check_shift()
        if self.data_is_here:
            pool = scaled(pool, settings.standardize)
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
        self.clients, self.names = len(splits), partition.names(pool)
        self.known = self.clients - settings.newcomers  # newcomers have the last numbers
        if self.known < 1:
            raise UserError(
                f"{settings.newcomers} newcomers leave no known client among {self.clients}; "
                "lower newcomers."
            )
        splits[self.known :] = map(settings.cut, splits[self.known :])
        pool, splits, self.shifts = shifted(
            pool, splits, settings.shift, self.seed, settings.newcomers
        )
        if settings.server_only:
            splits = self.reserve.replacing(splits)
        self.splits, self.supplements = self.reserve.supplement(pool, splits, settings, self.seed)
        return pool

    def _check_shift(self) -> None:
        settings = self.settings
        if settings.newcomers and settings.newcomers_classes and settings.relabels:
            raise UserError(
                f"shift = {settings.shift} changes labels, so that newcomers cannot hold classes "
                "of their own; set newcomers_classes to 0."
            )

    def _choose_clients(self, pool: Dataset, cohort: int | None, eval_clients: int | None) -> None:
        """Who can be sampled, and whose personal models are evaluated."""
        cohort = convert("cohort", cohort, int | None)
        eval_clients = convert("eval_clients", eval_clients, int | None)
        self.cohort_is_auto = cohort is None and not self.settings.server_only
        usual = 1 if self.settings.server_only else min(10, self.known)
        self.cohort_size = usual if cohort is None else cohort
        if not 1 <= self.cohort_size <= self.known:
            raise UserError(
                f"cohort must lie between 1 and the number of clients ({self.known}), not {cohort}."
            )
        if eval_clients is not None and eval_clients < 0:
            raise UserError(f"eval_clients must be at least 0, not {eval_clients}.")
        groups = [range(self.known)]
        if self.settings.newcomers:
            groups.append(range(self.known, self.clients))
        by_class = self.settings.participation == "classes"
        self.samplers = [
            Sampler(
                self.settings,
                tuple(group),
                min(self.settings.places(self.cohort_size), len(group)),
                self.seed,
                class_shares(pool, self.splits, group) if by_class else None,
            )
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
        check_forging(self.settings, self.method)
        if self.settings.forges and not shared:
            warnings.warn(
                f"attack = {self.settings.attack} has nothing to forge: {self.method.label} "
                "uploads no model.",
                stacklevel=4,
            )

    @property
    def training(self) -> Training:
        """How clients train."""
        return self.settings

    @property
    def data(self) -> Dataset:
        """The data, where the engine keeps them."""
        return self.engine.setup.data

    def cohort(self, t: int, drawn: Mapping[int, list[int]] = NOTHING) -> list[int]:
        """The clients sampled in round t, unless they are drawn already: the same for every method
        with this seed, as long as no device is busy or unavailable and no privacy budget spent.
        """
        return drawn[t] if t in drawn else self.sampler(t).cohort(t)

    def sampler(self, t: int) -> Sampler:
        """Draws from those who can be sampled in round t."""
        return self.samplers[self.settings.arrived(t)]

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
            present=self.sampler(t).members,
            sampling=self.sampler(t).sampling(clocked=self.devices is not None),
            counts=self._counts,
            epochs=self.settings.epochs,
            since=(self.settings.newcomers_after or 0) if arrived else 0,
            deployed=self.engine.deployed,
            counted=self.engine.counted,
            score=self.scorer(self.reserve.scoring),
            score_on=self._score_on if len(self.reserve.scoring) else None,
            train=partial(self.engine.train, self.reserve.all) if len(self.reserve.all) else None,
        )

    def _counts(self, client: int) -> int:
        return 1 if self.settings.client_weights == "equal" else len(self.splits[client].train)

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

    def _samples_trained(self, task: ClientTask) -> int:
        return samples_trained(self.engine.setup, task)

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
