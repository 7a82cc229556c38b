"""`Federation`: what a user of the library holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from fedhelix.core.errors import NoMoreRounds, UserError
from fedhelix.core.imports import check_extra
from fedhelix.core.method import Context, Method
from fedhelix.core.objective import Loss, Metric
from fedhelix.core.options import checks_arguments, convert, without_effect
from fedhelix.data import Partition
from fedhelix.engines import Engine
from fedhelix.engines.kernels import Kernels
from fedhelix.engines.local import Setup
from fedhelix.federation import description, evaluation, loop, newcomers
from fedhelix.federation.inputs import Model
from fedhelix.federation.provenance import device_name, versions
from fedhelix.federation.resuming import check_rounds, end_here, note_finished, settle
from fedhelix.federation.run import Run
from fedhelix.federation.setup import FederationSettings, FederationSetup
from fedhelix.federation.sinks import (
    DivergenceSink,
    FolderSink,
    ProgressSink,
    Sink,
    TrackerSink,
    UnmeasuredSink,
    UntrainedSink,
    WatchSink,
)
from fedhelix.federation.sources import sources_of
from fedhelix.federation.state import FederationState
from fedhelix.store import RunFolder
from fedhelix.store.progress import Progress
from fedhelix.store.records import Record, is_stalled
from fedhelix.store.trackers import check_tracker, tracker

Place = Literal["memory", "disk"]


class Federation(FederationSetup):
    """Clients with their data, a model, and a method that trains it across them.

    `data` is a name for `load`, a `Dataset`, a table (pandas or Hugging Face), a torch data set, or
    a list (with names: a dictionary) with one (x, y) pair, table or torch data set per client.
    `partition` says who owns which sample: a value of `fedhelix.partition`, or text such as
    "dirichlet:0.1". `model` is a name, an `nn.Module`, or a function that makes one. `method` is a
    name such as "genfed+fedau", or a value such as `GenFed(FedAU())`. `clients` is their number, by
    default 20; a partition that is a value, and data with owners, have theirs.

    Everything else has a sensible default. The fields of `FederationSettings` are keywords too:

    - training: epochs, batch_size, lr, lr_decay, momentum, weight_decay, optimizer, augment,
      sampler, precision;
    - the server's data: validation_size, validation_shared, supplement_size, supplement_below,
      server_only;
    - clients: participation, participation_alpha, client_weights, newcomers, newcomers_after,
      newcomers_classes, newcomers_samples;
    - the inputs' scale: standardize; how groups of clients differ: shift;
    - time: devices, device_speed, device_upload, device_download, availability, deadline, late,
      over_select, target;
    - attacks: attack, attack_share, attack_scale.

    They can also be given at once, as `settings=FederationSettings(...)`.
    """

    def __init__(  # noqa: PLR0913 - every argument but data has a default
        self,
        data: Any = "digits",
        partition: str | Partition | None = None,
        *,
        model: Model = "auto",
        method: str | Method | None = None,
        clients: int | None = None,
        cohort: int | None = None,
        eval_clients: int | None = None,
        eval_trained: bool = False,
        seed: int = 0,
        loss: Loss | None = None,
        metric: Metric | None = None,
        engine: str | Callable[[Setup], Engine] = "auto",
        device: str = "auto",
        workers: int | None = None,
        address: str | None = None,
        kernels: Literal["auto"] | Kernels = "auto",
        settings: FederationSettings | None = None,
        **options: Any,
    ):
        if settings is not None and options:
            raise UserError(f"give settings or {', '.join(options)}, not both.")
        super().__init__(
            data, partition, model=model, method=method, clients=clients, cohort=cohort,
            eval_clients=eval_clients, eval_trained=eval_trained, seed=seed, loss=loss,
            metric=metric, engine=engine, device=device, workers=workers, address=address,
            kernels=kernels, settings=settings, options=options,
        )  # fmt: skip
        if workers is not None and engine in ("serial", "batched"):
            warnings.warn(
                f"workers = {workers} does nothing with engine = {engine}; take parallel or ray.",
                stacklevel=2,
            )
        if eval_trained and eval_clients == 0:
            warnings.warn("eval_trained does nothing with eval_clients = 0.", stacklevel=2)
        for sentence in without_effect(self.settings):
            warnings.warn(sentence, stacklevel=2)
        self.sources = sources_of(model, self.method)
        if loss is None and metric is None:
            self.made_from = description.made_from(
                self.settings, data=data, partition=partition, model=model, method=method,
                clients=clients, eval_clients=eval_clients, eval_trained=eval_trained,
                engine=engine if isinstance(engine, str) else None, workers=workers,
                address=address, kernels=self.engine.setup.kernels,
            )  # fmt: skip

    def run_rounds(
        self, rounds: int, state: FederationState | None = None, eval_every: int = 1
    ) -> Iterator[tuple[Record, FederationState]]:
        """Yields a record and the new state after every round, from the beginning
        or from a state.
        """
        first = self.initialize(rounds) if state is None else state
        return loop.run_rounds(self, rounds, first, eval_every)

    def initialize(self, rounds: int) -> FederationState:
        """The state before the first round."""
        return loop.initialize(self, rounds)

    def evaluate(self, state: FederationState, ctx: Context) -> Record:
        """What a record says about the models in a state."""
        return evaluation.evaluate(self, state, ctx)

    def onboard(
        self, data: Any, state: FederationState, name: str | int | None = None
    ) -> tuple[int, FederationState]:
        """An unseen client with its own data joins: a pair (x, y), a table, a torch data set, or
        what `from_table` returns. Where clients have names, `name` is its own.

        Returns its number (where names are whole numbers: its name) and the next state. From the
        next round on it may be sampled and is evaluated; a fifth of its samples, at least one of
        two, become its test part. It lives in this federation and state alone: a run folder keeps
        the clients that it began with.
        """
        return newcomers.onboard(self, data, state, name)

    def census(self) -> dict[str, Any]:
        """Training samples per client (and class), who is malicious, and who is evaluated."""
        return description.census(self)

    @checks_arguments
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
        client_state: Place = "memory",
        patience: int | None = None,
    ) -> Run:
        """Train for some rounds with live progress; with `out`, into a run folder to resume from.

        `config` is what config.toml says instead; for a resumed run, what it says from now on.
        `watch` sees every new record once it is kept; it may raise KeyboardInterrupt to stop after
        that round, which leaves `fit`: with `out` the run can be resumed. With `track`
        ("tensorboard", "mlflow" or "wandb") every record goes there too. With `client_state="disk"`
        what clients keep lies in the run folder and is read when they are sampled, however many
        there are. With `patience` it ends early, once so many evaluated rounds in a row were not
        better on validation samples than the best one before.
        """
        self._check_arguments(
            rounds, eval_every, checkpoint_every, out, track, client_state, resume
        )
        self._check_patience(patience)
        check_extra(self.method)
        if watch is not None and not callable(watch):
            raise UserError(f"watch is a function of a record, not {watch!r}.")
        quiet = convert("quiet", quiet, bool | None)
        run = Run(self, [], FederationState(0, {}, {}))
        sinks: list[Sink] = []
        with ExitStack() as stack:
            stack.enter_context(self._withdrawn_if_refused(run, resume))
            if out is not None:
                given = {
                    "eval_every": eval_every, "checkpoint_every": checkpoint_every,
                    "client_state": client_state,
                }  # fmt: skip
                described = self._described(rounds, given) if config is None else config
                run.folder = RunFolder.open(out) if resume else RunFolder.create(out, described)
                stack.enter_context(run.folder)
                folder_sink = FolderSink(
                    run.folder, self.engine.choices, rounds, checkpoint_every,
                    str(self.device), on_disk=client_state == "disk",
                )  # fmt: skip
                self._prepare(run, folder_sink, resume)
                if resume:
                    check_rounds(rounds, run.state.round, out)
                    settle(run, rounds, eval_every, config or {})
                sinks.append(folder_sink)
            begun = run.state.round
            if not begun:
                run.state = self.initialize(rounds)
            if track is not None and run.folder is not None:
                done = run.state.round
                writer = tracker(track, run.folder.path, run.folder.config, done)
                sinks.append(TrackerSink(writer))
            progress = Progress(
                rounds, title or self.method.label, run.state.round, quiet,
                final_work=self.method.capabilities.final_work,
            )  # fmt: skip
            sinks.append(ProgressSink(progress, list(run.records)))
            soon = bool(self.method.capabilities.if_loss_rises)
            told = list(run.records), description.advice(self), soon, title or ""
            sinks.append(DivergenceSink(*told))
            sinks.append(UntrainedSink(list(run.records)))
            metric = description.named(self.objective.metric)
            sinks.append(UnmeasuredSink(list(run.records), metric))
            if watch is not None:
                sinks.append(WatchSink(watch))
            # The folder is entered last, so that after a failure it is the first to be closed.
            for sink in reversed(sinks):
                stack.enter_context(sink)
            names = self.names
            for record, state in self._rounds(run, rounds, eval_every, patience):
                if run.folder is not None and self.names != names:  # sites have joined
                    names = self.names
                    run.folder.write_clients(description.clients_file(self))
                for sink in sinks:
                    sink.update(record, state)
            if run.folder is not None:
                run.folder.write_summary(run.summary)
        note_finished(run, begun, silent=bool(quiet) or config is not None)
        return run

    def _rounds(
        self, run: Run, rounds: int, eval_every: int, patience: int | None
    ) -> Iterator[tuple[Record, FederationState]]:
        """The rounds that are left, which become part of the run; none once validation stalls, or
        nobody may take part any more.
        """
        metric = self.objective.name
        if patience is not None and is_stalled(run.records, metric, patience):
            return
        try:
            for record, state in self.run_rounds(rounds, run.state, eval_every):
                run.records.append(record)
                run.state = state
                yield record, state
                if patience is not None and is_stalled(run.records, metric, patience):
                    return
        except NoMoreRounds as problem:
            if not run.state.round:
                raise
            warnings.warn(f"the run ends after round {run.state.round}: {problem}", stacklevel=2)
            end_here(run)

    def _check_patience(self, patience: int | None) -> None:
        if patience is None:
            return
        if convert("patience", patience, int) < 1:
            raise UserError(f"patience must be at least 1, not {patience}.")
        if self.data_is_here and not any(len(split.valid) for split in self.splits):
            raise UserError("patience needs validation samples; set the partition's valid above 0.")
        if self.method.capabilities.final_work:
            raise UserError(
                f"{self.method.label} needs its last round, so leave out patience; summaries name "
                "the best round all the same."
            )

    def _check_arguments(
        self,
        rounds: int,
        eval_every: int,
        checkpoint_every: int,
        out: str | Path | None,
        track: str | None,
        client_state: Place,
        resume: bool,
    ) -> None:
        if convert("client_state", client_state, Place) == "disk" and out is None:
            raise UserError("clients' state on disk needs a run folder; give fit an out.")
        if track is not None:
            check_tracker(track)
            if out is None:
                raise UserError("tracking needs a run folder; give fit an out.")
        if resume and out is None:
            raise UserError("resume needs the folder of the run that goes on; give fit its out.")
        counts = {
            "rounds": rounds,
            "eval_every": eval_every,
            "checkpoint_every": checkpoint_every,
        }
        for name, value in counts.items():
            if isinstance(value, str):
                raise UserError(f"{name} must be a whole number, not the text {value!r}.")
            if convert(name, value, int) < 1:
                raise UserError(f"{name} must be at least 1, not {value!r}.")
        after = self.settings.newcomers_after or 0
        if self.settings.newcomers and rounds <= after:
            raise UserError(f"newcomers arrive after {after} rounds; rounds must be more.")

    def _described(self, rounds: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """What config.toml says of a run from Python: the federation, and what computes it."""
        used = {**versions(), "device": device_name(str(self.device))}
        made_from = {"made_from": {**self.made_from, **given}} if self.made_from else {}
        return {**description.config(self, rounds), **made_from, "versions": used}

    def _prepare(self, run: Run, sink: FolderSink, resume: bool) -> None:
        """Go back to the last checkpoint of a run folder, and write down who has what."""
        if resume:
            description.check_same(self, sink.folder, goes_on=True)
            restored = sink.restore()
            if restored is not None:
                run.records, run.state = restored
        sink.folder.write_clients(description.clients_file(self))
        self.engine.choices.update(sink.folder.choices)

    @contextmanager
    def _withdrawn_if_refused(self, run: Run, resume: bool) -> Iterator[None]:
        """Remove a new run folder where clients, the method or the clock refuse the settings."""
        try:
            yield
        except UserError:
            if run.folder is not None and not run.records and not resume:
                run.folder.withdraw()
            raise

    def __repr__(self) -> str:
        name, method = self.data.name, self.method
        return f"Federation({name}, {self.clients} clients, {method}, seed={self.seed})"

    def close(self) -> None:
        """Give back what the engine holds."""
        self.engine.close()
