"""Searches for settings with Optuna: equally many trials for every method, compared on validation.

A trial is an ordinary run with seed `seed`. What is over stands in trials.json, from which the same
command goes on. The settings of trial n depend on the seed, n and the trials before it, so a search
that was stopped ends as one that was not.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.core.imports import from_extra
from fedhelix.runs.jobs import Session, TimeIsUp
from fedhelix.runs.spec import RunSpec, make_spec, make_specs
from fedhelix.runs.sweep import Search, Space, concerned, variant
from fedhelix.store import RunFolder
from fedhelix.store.json import loads
from fedhelix.store.records import Record, is_number

FILE = "trials.json"
STARTUP = 5  # random trials before any is proposed, and finished ones before any is pruned
WARM_UP = 0.25  # of the rounds, before a trial may be pruned


class Pruned(KeyboardInterrupt):
    """A trial is worse than most others were at this round, and ends after it."""


@dataclass(frozen=True)
class Trial:
    """What one setting gave on validation data, by round; a pruned one has fewer rounds."""

    method: str
    number: int
    chosen: dict[str, Any]
    pruned: bool
    values: dict[int, float] = field(default_factory=dict)
    metric: str = ""  # of the values; empty in files of before

    @property
    def best(self) -> float:
        """The best value of all rounds."""
        return max(self.values.values(), default=-math.inf)

    @property
    def best_round(self) -> int:
        """The first round with that value; 0 where none was evaluated."""
        return max(self.values, key=lambda t: self.values[t], default=0)

    @property
    def spec(self) -> str:
        """The method with these settings, as `fedhelix compare` takes it."""
        return variant(self.method, self.chosen)


def tune_all(search: Search, out: Path, session: Session | None = None) -> list[Trial]:
    """Run the trials that are missing; all that are over, those of the first method first."""
    session = session or Session()
    optuna = from_extra("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    specs = dict(zip(search.methods, make_specs(search.methods, search.settings), strict=True))
    if len(specs) < len(search.methods):
        raise UserError("a search needs different methods; one is named twice.")
    done = _read(out, search)
    session.set_up(make_spec(one, search.settings) for one in _first_settings(search, done))
    try:
        for method in search.methods:
            mine = [trial for trial in done if trial.method == method]
            for _ in range(len(mine), search.trials_of(method)):
                session.check_time()
                study = _study(optuna, mine, concerned(method, search.space), specs[method])
                tried = [trial.chosen for trial in mine]
                mine.append(_run(study, method, tried, search, out, session))
                done = [trial for trial in done if trial.method != method] + mine
                _write(out, search, done)
    except TimeIsUp:
        pass
    return done


def _first_settings(search: Search, done: Sequence[Trial]) -> list[str]:
    """Some setting in the space of each method that lacks trials."""
    begun = Counter(trial.method for trial in done)
    left = [method for method in search.methods if begun[method] < search.trials_of(method)]
    some = {
        key: given[0] if isinstance(given, list) else given["low"]
        for key, given in search.space.items()
    }
    return [variant(method, dict(concerned(method, some))) for method in left]


def best(trials: Sequence[Trial]) -> dict[str, Trial]:
    """The best trial of each method."""
    methods = dict.fromkeys(trial.method for trial in trials)
    return {
        method: max((one for one in trials if one.method == method), key=lambda one: one.best)
        for method in methods
    }


def _study(optuna: Any, done: Sequence[Trial], space: Space, spec: RunSpec) -> Any:
    """A study that knows the trials so far."""
    sampler = optuna.samplers.TPESampler(
        seed=1000 * spec.config.seed + len(done), n_startup_trials=STARTUP
    )
    warm_up = math.ceil(WARM_UP * spec.config.rounds)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warm_up)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    states = optuna.trial.TrialState
    for trial in done:
        study.add_trial(
            optuna.trial.create_trial(
                state=states.PRUNED if trial.pruned else states.COMPLETE,
                params=trial.chosen,
                distributions={key: _distribution(optuna, given) for key, given in space.items()},
                value=None if trial.pruned and not trial.values else trial.best,
                intermediate_values=trial.values,
            )
        )
    return study


def _distribution(optuna: Any, given: Any) -> Any:
    kinds = optuna.distributions
    if isinstance(given, list):
        return kinds.CategoricalDistribution(given)
    low, high, log = given["low"], given["high"], bool(given.get("log"))
    whole = isinstance(low, int) and isinstance(high, int)
    kind = kinds.IntDistribution if whole else kinds.FloatDistribution
    return kind(low, high, log=log)


def _suggested(asked: Any, key: str, given: Any) -> Any:
    """A value for one key of the next trial."""
    if isinstance(given, list):
        return asked.suggest_categorical(key, given)
    low, high, log = given["low"], given["high"], bool(given.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return asked.suggest_int(key, low, high, log=log)
    # Three digits say enough, and make a short name.
    value = float(f"{asked.suggest_float(key, low, high, log=log):.3g}")
    return min(max(value, low), high)


def _asked(study: Any, space: Space, tried: Sequence[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The next trial, with settings that were not tried yet where these are lists."""
    asked = study.ask()
    chosen = {key: _suggested(asked, key, given) for key, given in space.items()}
    if chosen in tried and all(isinstance(given, list) for given in space.values()):
        combinations = (
            dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())
        )
        chosen = next(one for one in combinations if one not in tried)
        study.enqueue_trial(chosen)
        asked = study.ask()
    return asked, chosen


def _run(
    study: Any,
    method: str,
    tried: Sequence[dict[str, Any]],
    search: Search,
    out: Path,
    session: Session,
) -> Trial:
    """One trial, from the beginning or from its last checkpoint."""
    number = len(tried)
    asked, chosen = _asked(study, concerned(method, search.space), tried)
    spec = make_spec(variant(method, chosen), search.settings)
    folder = out / f"{spec.method.label}-trial{number}".replace("/", "_")

    def watch(record: Record) -> None:
        session.check_time()
        for _, round, value in _values([record]):
            asked.report(value, round)
            if asked.should_prune():
                raise Pruned

    for _, round, value in _values(_records(folder)):  # of a trial that was stopped
        asked.report(value, round)
    pruned = False
    try:
        title = f"{spec.label} ({number + 1}/{search.trials_of(method)})"
        session.start_or_resume(spec, folder, title=title, watch=watch)
    except Pruned:
        pruned = True
        with RunFolder.open(folder) as run:
            run.change(pruned=True)  # for reports, which would take it for a run that was stopped
    found = list(_values(_records(folder)))
    values = {round: value for _, round, value in found}
    if not values and not pruned:
        raise UserError(
            "a search needs validation data: keep validation samples at the clients (as every "
            "partition does by default) or at the server (validation_size)."
        )
    metric = found[-1][0] if found else ""
    return Trial(method, number, chosen, pruned, values, metric)


def _records(folder: Path) -> list[Record]:
    return RunFolder.open(folder).records() if (folder / "config.toml").exists() else []


def _values(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, float]]:
    """The name of the validation metric, and its value in each round that was evaluated."""
    for record in records:
        for key, value in record.items():
            if key.startswith("valid_") and not key.endswith("loss") and is_number(value):
                yield key.removeprefix("valid_"), int(record["round"]), float(value)


def _read(out: Path, search: Search) -> list[Trial]:
    """The trials that are over, of the same search."""
    path = out / FILE
    if not path.exists():
        return []
    try:
        content = loads(path.read_bytes())
        known, trials = content["search"], content["trials"]
        done = [
            Trial(**{**trial, "values": {int(t): value for t, value in trial["values"].items()}})
            for trial in trials
        ]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"'{path}' is damaged; choose another folder with --out.") from None
    if known != _described(search):
        raise UserError(f"'{out}' holds another search; choose another folder with --out.")
    return done


def _described(search: Search) -> dict[str, Any]:
    """What makes searches equal; more trials than before are welcome."""
    described = vars(replace(search, trials=0))
    return dict(json.loads(json.dumps(described)))


def _write(out: Path, search: Search, trials: Sequence[Trial]) -> None:
    content = {"search": _described(search), "trials": [vars(trial) for trial in trials]}
    write_atomically(out / FILE, (json.dumps(content, indent=1) + "\n").encode())
