"""A federation: data with their owners, a model, a method, and THE round loop."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedhelix import describe, models, seeds
from fedhelix.asked import Asked
from fedhelix.attacks import Attack, Attackers
from fedhelix.channel import kept, receive, traffic
from fedhelix.client import Job, Setup, Training, client_of
from fedhelix.cpu import Kernels
from fedhelix.data import Dataset, Partition, Reserve, ServerData, Split, from_clients, load, partitions
from fedhelix.engines import Engine, engine_for
from fedhelix.engines.kernels import choose
from fedhelix.errors import BadInput
from fedhelix.method import Context, Method, Scorer
from fedhelix.methods import FedAvg
from fedhelix.options import build_all, convert
from fedhelix.participation import Newcomers, Participation, Sampler
from fedhelix.progress import Progress
from fedhelix.records import Record
from fedhelix.registry import make
from fedhelix.standing import Run, Standing
from fedhelix.store import RunFolder
from fedhelix.task import Loss, Metric, Task, task_for
from fedhelix.track import Tracker, check_tracker, tracker
from fedhelix.tree import State, Tree, payload_bytes
from fedhelix.units import Units

# The keys of a federation, the same for every method.
SETTINGS = (Training, ServerData, Participation, Newcomers, Attack)


class Federation:
    """Clients with their data, a model, and a method that trains it across them.

    `data` is a name for `load`, a `Dataset`, or a list with one (x, y) pair or torch data set per client.
    `partition` says who owns which sample: a value of `fedhelix.partition`, or text such as "dirichlet:0.1".
    `model` is a name, an `nn.Module`, or a function that makes one; `method` is a name such as "genfed+fedau", or a
    value such as `GenFed(FedAU())`. Everything else has a sensible default; the
    options of `Training` (epochs, batch_size, lr, lr_decay, momentum, weight_decay, augment) and of `ServerData`
    (validation_size, validation_shared, supplement_size, supplement_below) are keywords too, and so are
    `participation`, `participation_alpha`, `newcomers`, `newcomers_after`, `newcomers_classes`, `attack`,
    `attack_share` and `attack_scale`.
    """

    def __init__(
        self,
        data: str | Dataset | Sequence[Any] = "digits",
        partition: str | Partition | None = None,
        *,
        model: str | nn.Module | Callable[[], nn.Module] = "auto",
        method: str | Method | None = None,
        clients: int = 20,
        cohort: int | None = None,
        eval_clients: int | None = None,
        seed: int = 0,
        loss: Loss | None = None,
        metric: Metric | None = None,
        engine: str | Callable[[Setup], Engine] = "auto",
        device: str = "auto",
        workers: int | None = None,
        kernels: Literal["auto"] | Kernels = "auto",
        **settings: Any,
    ):
        pool = load(data) if isinstance(data, str) else data if isinstance(data, Dataset) else from_clients(data)
        if partition is None:
            partition = partitions.usual(pool)
        if isinstance(partition, str):
            partition = partitions.parse(partition, clients)
        if not isinstance(partition, Partition):
            raise BadInput(f"partition is text or a value such as partition.iid(10), not {partition!r}.")
        self.method = make(method) if isinstance(method, str) else FedAvg() if method is None else method
        if not isinstance(self.method, Method):
            raise BadInput(f"method is a name or a value such as FedAvg(), not {method!r}.")
        self.seed, self.device = convert("seed", seed, int), device_of(device)
        workers = convert("workers", workers, int | None)
        kernels = convert("kernels", kernels, Literal["auto", Kernels])
        built = build_all(SETTINGS, settings, "a federation")
        self.training, asked, self.participation, self.newcomers, self.attack = built
        self.server_data: ServerData = asked.resolved(self.method.scores)
        late = self.newcomers
        self.here = partition.here  # whether the clients' samples are on this machine
        parts = partition.divided(pool, late.newcomers, late.newcomers_classes, self.seed)
        self.reserve = Reserve.of(pool, parts[0], self.server_data, self.seed)
        if self.method.scores and not len(self.reserve.scoring):
            raise BadInput(f"{self.method.label} scores models on validation data; set validation_size above 0.")
        self.splits = [split for part in parts for split in part.split(pool, self.seed, exclude=self.reserve.all)]
        self.splits, self.supplements = self.reserve.supplement(pool, self.splits, self.server_data, self.seed)
        self.clients = len(self.splits)
        self.known = self.clients - late.newcomers  # newcomers have the last numbers
        if self.known < 1:
            raise BadInput(f"{late.newcomers} newcomers leave no known client among {self.clients}; lower newcomers.")
        cohort, eval_clients = (
            convert(name, count, int | None) for name, count in (("cohort", cohort), ("eval_clients", eval_clients))
        )
        self.cohort_size = min(10, self.known) if cohort is None else cohort
        if not 1 <= self.cohort_size <= self.known:
            raise BadInput(f"cohort must lie between 1 and the number of clients ({self.known}), not {cohort}.")
        if eval_clients is not None and eval_clients < 0:
            raise BadInput(f"eval_clients must be at least 0, not {eval_clients}.")
        groups = [range(self.known), range(self.known, self.clients)][: 1 + bool(late.newcomers)]
        self.samplers = [
            Sampler(self.participation, tuple(group), min(self.cohort_size, len(group)), self.seed) for group in groups
        ]
        self.judged = [client for group in groups for client in self._judged(eval_clients, group)]
        module, self.units = network(model, pool, self.method, self.seed)
        shared = Asked(self.method).shared(self.units)
        self.needed = shared if self.method.whole else ()  # what every upload must hold
        if self.method.packed and self.attack.attack not in ("none", "label-flip"):
            raise BadInput(
                f"attack = {self.attack.attack} cannot change what {self.method.label} uploads, which is packed."
            )
        if self.attack.attack not in ("none", "label-flip") and not shared:
            words = f"attack = {self.attack.attack} has nothing to forge: {self.method.label} uploads nothing."
            warnings.warn(words, stacklevel=2)
        self.attackers = Attackers(self.attack, self.clients, self.units.parameters, self.seed)
        self.studied = self.attackers.studied(pool, self.splits, len(self.reserve.scoring))
        pool, self.splits = self.attackers.poison(pool, self.splits)
        self.task = task_for(pool.classes, loss, metric)
        setup = setup_of(
            self.method, module, self.units, pool, self.splits, self.training, self.task, self.seed, self.device,
            kernels,
        )  # fmt: skip
        self.initial: State = setup.initial
        self.engine = engine_for(engine, setup, workers, self.cohort_size) if isinstance(engine, str) else engine(setup)

    @property
    def data(self) -> Dataset:
        """The data, where the engine keeps them."""
        return self.engine.setup.data

    def play(
        self, rounds: int, since: Standing | None = None, eval_every: int = 1
    ) -> Iterator[tuple[Record, Standing]]:
        """THE round loop: yields a record and the new standing after every round."""
        standing = since if since is not None else self.begin(rounds)
        for t in range(standing.round, rounds):
            clock, ctx, method = time.perf_counter(), self.context(t, rounds), Asked(self.method)
            arrival = Record()
            if self.newcomers.newcomers and t == self.newcomers.newcomers_after:
                standing, arrival = self.arrive(standing, ctx)
            workers = method.workers(standing.server, self.cohort(t), ctx)
            payloads = {i: method.download(standing.server, i, ctx) for i in workers}
            jobs = [Job(i, t, payloads[i], standing.own.get(i, {})) for i in workers]
            outcomes = self.engine.work(jobs)
            missing = {str(client): why for client, why in self.engine.missing.items()}
            answered = [job for job in jobs if str(job.client) not in missing]
            outcomes = self.attackers.forge(outcomes, answered, self._scorer(self.studied))
            uploads, refused = receive(outcomes, self.initial, self.needed)
            server = standing.server
            if uploads:
                server = method.merge(server, uploads, method.weigh(server, uploads, ctx), ctx)
            greeting = standing.greeting_bytes
            standing = Standing(
                t + 1,
                server,
                standing.own | kept(outcomes, standing.own),
                standing.changed | {outcome.client for outcome in outcomes},
            )
            record: Record = {
                "round": t + 1,
                "train_loss": float(np.mean([outcome.loss for outcome in outcomes])) if outcomes else math.nan,
                **traffic(payloads, outcomes, greeting + method.other_bytes(ctx)),
                "participants": workers,
                "refused": refused,
                "missing": missing,
                **arrival,
            }
            if (t + 1) % eval_every == 0 or t + 1 == rounds:
                record |= self.evaluate(standing, ctx)
            record |= self.engine.report() | {"notes": method.notes(ctx)}
            record["seconds"] = time.perf_counter() - clock
            yield record, standing

    def begin(self, rounds: int) -> Standing:
        """Before round 0: clients say hello, the server makes its first state and replies."""
        ctx = self.context(0, rounds)
        jobs = [Job(i, 0, {}, {}) for i in range(ctx.clients)]
        hellos = self.engine.hello(jobs) if self.method.greets else {}
        server, replies = Asked(self.method).begin(hellos, ctx)
        said = sum(payload_bytes(tree) for trees in (hellos, replies) for tree in trees.values())
        sample = 4 * (math.prod(self.data.shape) + math.prod(self.data.y.shape[1:]))
        return Standing(0, server, dict(replies), set(replies), said + sample * sum(self.supplements.values()))

    def arrive(self, standing: Standing, ctx: Context) -> tuple[Standing, Record]:
        """The newcomers are welcomed one after the other, and judged after the local training of one round."""
        received = []
        for client in range(self.known, self.known + self.newcomers.newcomers):
            standing, size = self.greet(standing, client, ctx)
            received.append(size)
        record = Record(arrival_bytes=float(np.mean(received)))
        judged = [client for client in self.judged if client in ctx.present and len(self.splits[client].test)]
        if judged:
            jobs = [job._replace(arriving=True) for job in self._jobs(standing, judged, ctx)]
            record[f"arrival_{self.task.name}"] = float(
                np.mean([found.test for found in self.engine.evaluate(jobs)[0]])
            )
        return standing, record

    def greet(self, standing: Standing, client: int, ctx: Context) -> tuple[Standing, int]:
        """The dialogue of the server with one unseen client: where that leads, and how many bytes it received."""
        ctx, server, payload, done = replace(ctx, clients=client), standing.server, Tree(), False
        sent = received = 0
        while not done:
            message = self.engine.reply(Job(client, ctx.round, payload, {}))
            server, payload, done = Asked(self.method).welcome(server, message, ctx)
            sent, received = sent + payload_bytes(message), received + payload_bytes(payload)
        own = self.engine.settle(Job(client, ctx.round, payload, {}))
        known = {client: own} if own else {}
        spent = standing.greeting_bytes + sent + received
        return Standing(standing.round, server, standing.own | known, standing.changed | set(known), spent), received

    def welcome(self, data: Any, standing: Standing) -> tuple[int, Standing]:
        """An unseen client with its own data, a pair (x, y) or a torch data set, joins: its number, and the standing.

        From the next round on it may be sampled and is judged; a fifth of its samples become its test part.
        """
        setup, number = self.engine.setup, self.clients
        pool = setup.data.joined(from_clients([data], classes=setup.data.classes, name="newcomer", seed=self.seed))
        places = [
            np.arange(len(old), len(new)) for old, new in ((setup.data.y, pool.y), (setup.data.y_test, pool.y_test))
        ]
        if self.units.norm and len(places[0]) < 2:
            raise BadInput("the newcomer has only one training sample, but BatchNorm needs two.")
        splits = [*self.splits, Split(places[0], places[0][:0], places[1])]
        self._go_on_with(replace(setup, data=pool, splits=splits))
        try:
            standing, _ = self.greet(standing, number, self.context(standing.round, standing.round))
        except BaseException:  # it is turned away, and all others go on as before
            self._go_on_with(setup)
            raise
        self.splits, self.clients, self.judged = splits, number + 1, [*self.judged, number]
        self.samplers = [replace(sampler, members=(*sampler.members, number)) for sampler in self.samplers]
        return number, standing

    def _go_on_with(self, setup: Setup) -> None:
        self.engine.close()
        self.engine.setup = setup

    def cohort(self, t: int) -> list[int]:
        """The clients sampled in round t: the same for every method with this seed."""
        return self.samplers[self.newcomers.here(t)].cohort(t)

    def _judged(self, count: int | None, group: Sequence[int]) -> list[int]:
        """The clients of a group whose personal models are judged: all, or the same few every time."""
        if count is None or count >= len(group):
            return list(group)
        chosen = seeds.numpy_draw(self.seed, "judged").choice(len(group), count, replace=False)
        return sorted(group[int(place)] for place in chosen)

    def context(self, t: int, rounds: int) -> Context:
        """What the server's hooks see in round t."""
        here = self.newcomers.here(t)
        known = self.clients if here or not self.newcomers.newcomers else self.known
        return Context(
            t, rounds, known, self.units, self.initial, self.device, self.seed, self.cohort,
            self.samplers[here].members, self._scorer(self.reserve.scoring),
        )  # fmt: skip

    def _scorer(self, samples: np.ndarray) -> Scorer | None:
        """Metric and loss of models on some training samples; None where there are none."""
        return partial(self.engine.score, pool="train", indices=torch.from_numpy(samples)) if len(samples) else None

    def evaluate(self, standing: Standing, ctx: Context) -> Record:
        """The server's model on the test set, and every client's personal model on its own part of it."""
        record, name = Record(), self.task.name
        judged = [client for client in self.judged if client in ctx.present]
        model = self.method.model(standing.server, ctx)
        jobs = self._jobs(standing, judged, ctx)
        scores, judgement = self.engine.evaluate(jobs, model)
        if judgement is not None:
            record[name], record["loss"] = judgement
        scored = ctx.score if not np.isin(self.reserve.scoring, self.reserve.pool).any() else None
        if model is not None and scored is not None and not any(len(self.splits[i].valid) for i in judged):
            # Then the server's validation set decides, unless clients train on samples of it.
            record[f"valid_{name}"] = scored([model])[0][0]
        if not scores:
            return record
        tests, losses, valids = (np.array(column) for column in zip(*scores, strict=True))
        # Clients that are missing or lack test or validation samples have no say, nor do those whose samples have no
        # metric, such as R² of a single one; a client whose model has diverged does.
        parts = {client: self.splits[client] for client in judged}
        here = np.array([client not in self.engine.missing for client in parts])
        finite = np.isfinite(losses)
        tested = here & np.array([len(part.test) > 0 for part in parts.values()]) & ~(np.isnan(tests) & finite)
        checked = here & np.array([len(part.valid) > 0 for part in parts.values()]) & ~(np.isnan(valids) & finite)
        if not here.all():
            record["unjudged"] = {str(client): why for client, why in self.engine.missing.items()}
        record["personal"] = [float(test) for test in tests]
        if tested.any():
            record.setdefault("loss", float(losses[tested].mean()))
            record[f"personal_{name}"] = float(tests[tested].mean())
            record["personal_p10"] = float(np.percentile(tests[tested], 10))
            if ctx.round == ctx.rounds - 1 and self._tunes(jobs):
                received = np.array([found.test for found in self.engine.evaluate_received(jobs)])
                record["untuned"], record[f"untuned_{name}"] = received.tolist(), float(received[tested].mean())
        if checked.any():
            record[f"valid_{name}"] = float(valids[checked].mean())
        return record

    def _tunes(self, jobs: Sequence[Job]) -> bool:
        """Whether clients fine-tune what they receive before they use it."""
        return any(self.method.tune(client_of(self.engine.setup, job)) for job in jobs[:1])

    def _jobs(self, standing: Standing, clients: Sequence[int], ctx: Context) -> list[Job]:
        """What the given clients would receive now."""
        return [
            Job(i, standing.round, self.method.download(standing.server, i, ctx), standing.own.get(i, {}))
            for i in clients
        ]

    def fit(
        self,
        rounds: int = 30,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        config: Mapping[str, Any] | None = None,
        eval_every: int = 1,
        checkpoint_every: int = 1,
        quiet: bool | None = None,
        title: str | None = None,
        watch: Callable[[Record], None] | None = None,
        track: str | None = None,
        client_state: Literal["memory", "disk"] = "memory",
    ) -> Run:
        """Train for some rounds with live progress; with `out`, into a run folder that can be resumed.

        `watch` sees every new record once it is kept; it may raise KeyboardInterrupt to stop after that round.
        With `track` ("tensorboard" or "mlflow") every record goes there too. With `client_state="disk"` what clients
        keep lies in the run folder and is read when they are sampled, however many there are.
        """
        if convert("client_state", client_state, Literal["memory", "disk"]) == "disk" and out is None:
            raise BadInput("clients' state on disk needs a run folder; give fit an out.")
        if track is not None:
            check_tracker(track)
            if out is None:
                raise BadInput("tracking needs a run folder; give fit an out.")
        for name, value in (("rounds", rounds), ("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
            if convert(name, value, int) < 1:
                raise BadInput(f"{name} must be at least 1, not {value}.")
        if self.newcomers.newcomers and rounds <= (self.newcomers.newcomers_after or 0):
            raise BadInput(f"newcomers arrive after {self.newcomers.newcomers_after} rounds; rounds must be more.")
        run = Run(self, [], Standing(0, {}, {}))
        with ExitStack() as stack:
            if out is not None:
                run.folder = (
                    RunFolder.open(out) if resume else RunFolder.create(out, config or describe.config(self, rounds))
                )
                stack.enter_context(run.folder)
                if resume:
                    describe.check_same(self, run.folder)
                    run.restore(on_disk=client_state == "disk")
                run.folder.write_clients(describe.census(self))
                self.engine.choices.update(run.folder.choices)
            if not run.standing.round:
                try:
                    run.standing = self.begin(rounds)
                except BadInput:  # clients or method refuse what they are asked for
                    if run.folder is not None and not resume:
                        run.folder.withdraw()
                    raise
            progress = stack.enter_context(Progress(rounds, title or self.method.label, run.standing.round, quiet))
            for record in run.records:
                progress.update(record)
            tracking: Tracker | None = None
            if track is not None and run.folder is not None:
                tracking = tracker(track, run.folder.path, run.folder.config, run.standing.round)
                stack.enter_context(tracking)
            try:
                for record, standing in self.play(rounds, run.standing, eval_every):
                    run.keep(record, standing)
                    if standing.round % checkpoint_every == 0 or standing.round == rounds:
                        run.checkpoint(on_disk=client_state == "disk")
                    if tracking is not None:
                        tracking.update(record)
                    progress.update(record)
                    if watch is not None:
                        watch(record)
            except BaseException:
                # Complete rounds are not lost; one whose record is not on disk yet is played again on resume.
                if run.folder is not None and len(run.folder.records()) == run.standing.round:
                    run.checkpoint()
                raise
            if run.folder is not None:
                run.folder.write_summary(run.summary)
        return run

    def census(self) -> dict[str, Any]:
        """Who has what: training samples per client (and class), who is malicious, and whose models are judged."""
        return describe.census(self)

    def __repr__(self) -> str:
        return f"Federation({self.data.name}, {self.clients} clients, {self.method}, seed={self.seed})"

    def close(self) -> None:
        """Give back what the engine holds."""
        self.engine.close()


def network(
    model: str | nn.Module | Callable[[], nn.Module], pool: Dataset, method: Method, seed: int
) -> tuple[nn.Module, Units]:
    """The network for these data and its units, if it fits them and the method can work with it."""
    outputs = pool.classes if pool.classes is not None else math.prod(pool.y.shape[1:])
    module = models.build(model, pool.shape, outputs, data_name=pool.name, seed=seed)
    example = pool.prepare(pool.x[:2]).cpu()  # where a new network is
    models.check_fits(module, example, outputs)
    units = Units.of(module, example)
    method.check(units)
    return module, units


def setup_of(
    method: Method,
    module: nn.Module,
    units: Units,
    pool: Dataset,
    splits: Sequence[Split],
    training: Training,
    task: Task,
    seed: int,
    device: torch.device,
    kernels: Kernels | Literal["auto"],
) -> Setup:
    """What clients' work depends on, where it is computed."""
    if training.batch_size < 2 and any(isinstance(layer, nn.BatchNorm1d) for layer in module.modules()):
        raise BadInput("BatchNorm needs two samples in a minibatch; set batch_size to 2 or more.")
    if units.norm and any(len(split.train) == 1 for split in splits):
        raise BadInput("a client has only one training sample, but BatchNorm needs two; use larger clients.")
    state = module.to(device).state_dict()
    initial = {name: state[name].detach().clone() for name in units.names}
    setup = Setup(method, module, units, initial, pool.to(device), splits, training, task, seed, device)
    return replace(setup, kernels=choose(setup) if kernels == "auto" else kernels)


def device_of(name: str) -> torch.device:
    """The device of that name; `auto` takes what there is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise BadInput(f"there is no device '{name}' here; use auto to take what there is.") from None
    return device
