"""Runs as rows to compare: which method and seed each one is, and which runs belong together."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from fedhelix.core.errors import UserError
from fedhelix.report.naming import label_of
from fedhelix.store import RunFolder
from fedhelix.store.records import MAIN_METRICS, Record, is_number, spent

# Entries of a config that do not make runs different experiments.
NOT_COMPARED = (
    "format", "versions", "library", "made_from", "method", "seed", "data_dir", "engine", "device",
    "workers", "address", "kernels", "eval_every", "checkpoint_every", "client_state", "deployment",
    "pruned",
)  # fmt: skip

MOST_NAMED = 20  # runs that a sentence lists, for a command

# Settings under which methods are compared: runs that differ in one of them are told apart first.
SETTING = ("data", "partition", "shift")


@dataclass(frozen=True, eq=False)
class Result:
    """One run: its settings, its records and its summary (empty while the run is unfinished)."""

    name: str
    method: str
    options: dict[str, Any]
    circumstances: dict[str, Any]
    seed: int
    complete: bool
    records: list[Record]
    summary: dict[str, Any]
    config: dict[str, Any]
    census: dict[str, Any]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The records as a table: one row per round, one column per key."""
        return pd.DataFrame(self.records or {"round": []})

    def has(self, column: str) -> bool:
        """Whether some round has such an entry, even if a diverged model made it null."""
        return any(column in record for record in self.records)

    def series(self, column: str) -> pd.Series:
        """A column's values where there are any, indexed by round."""
        if column not in self.metrics:
            return pd.Series(dtype=float)
        values = pd.to_numeric(self.metrics[column], errors="coerce").astype(float)
        return values.set_axis(pd.Index(self.metrics["round"])).dropna()

    def final(self, column: str) -> float:
        """A column's value in the last round that has one.

        The best round would be a choice by the test data. Of a run that has diverged it is NaN.
        """
        value = next(
            (record[column] for record in reversed(self.records) if column in record), None
        )
        return float(value) if is_number(value) else float("nan")

    def chosen(self, column: str) -> float:
        """A summary's metric at the round that the validation set chose; NaN without validation."""
        round, value = self.summary.get("best_round"), self.summary.get(column)
        metric = "accuracy" if "accuracy" in column else "score"
        chosen = any(
            record["round"] == round and is_number(record.get(f"valid_{metric}"))
            for record in self.records
        )
        return float(value) if chosen and is_number(value) else float("nan")

    def summarized(self, column: str) -> float:
        """A number of the summary; NaN where it has none."""
        value = self.summary.get(column)
        return float(value) if is_number(value) else float("nan")

    def total(self, column: str) -> float:
        """A cost of the whole run: the summary's, which includes costs before the first round."""
        value = self.summary.get(column)
        return float(value) if is_number(value) else float(self.series(column).sum())

    def main_metric(self) -> str | None:
        """The column that this run is compared by; None when no round has been evaluated."""
        return next((column for column in MAIN_METRICS if self.has(column)), None)

    @property
    def names(self) -> list[str]:
        """What the clients are called; empty where they have numbers only."""
        names = self.census.get("names")
        return [str(name) for name in names] if isinstance(names, list) else []

    def clients(self) -> dict[int, list[tuple[int, float]]]:
        """Every evaluated client's metric as (round, value) pairs."""
        histories: dict[int, list[tuple[int, float]]] = {}
        for round, client, value in self._by_client():
            if is_number(value):
                histories.setdefault(client, []).append((round, float(value)))
        return histories

    def client_finals(self) -> dict[int, float]:
        """The metric of every client in the last round that evaluated it, where it is a number."""
        return {client: value for client, (_, value) in self.last_values().items()}

    def last_values(self) -> dict[int, tuple[int, float]]:
        """Round and metric of every client's last evaluation, where the metric is a number."""
        last = {client: (round, value) for round, client, value in self._by_client()}
        return {
            client: (round, float(value))
            for client, (round, value) in last.items()
            if is_number(value)
        }

    @cached_property
    def last_evaluation(self) -> int:
        """The last round that evaluated clients: not those that were away or, once newcomers are
        there, the others; 0 where none did.
        """
        return max((round for round, *_ in self._by_client()), default=0)

    def _by_client(self) -> Iterator[tuple[int, int, Any]]:
        """Round, client and metric of every evaluation."""
        absent = dict(self._column("unevaluated", Mapping))
        arrival = self.arrival
        for round, values in self._column("personal", list):
            everybody: Sequence[int] | None = self.census.get("evaluated")
            if not _are_numbers(everybody) or len(everybody) < len(values):
                everybody = range(len(values))
            # Newcomers have the last numbers, and once they are there only they are evaluated.
            ids = everybody[-len(values) :] if round >= arrival else everybody
            for client, value in zip(ids, values, strict=False):
                if str(client) not in absent.get(round, ()):
                    yield round, client, value

    @property
    def arrival(self) -> float:
        """The first round of newcomers; infinite where none have come."""
        if "arrival_bytes" not in self.metrics:
            return math.inf
        rounds = self.metrics["round"][self.metrics["arrival_bytes"].notna()]
        return float(rounds.min()) if len(rounds) else math.inf

    def epsilon(self) -> float:
        """The largest epsilon that a client has spent; NaN of a run that counts none."""
        return float(spent(self.records, self.options).get("epsilon", math.nan))

    def delta(self) -> float:
        """The probability with which `epsilon` may not hold; NaN where none is known."""
        delta = spent(self.records, self.options).get("delta")
        return float(delta) if is_number(delta) else math.nan

    def metadata(self, key: str | None = None) -> Iterator[tuple[int, Any]]:
        """What the method recorded under a key, or all of it, with the round."""
        for round, metadata in self._column("metadata", Mapping):
            if key is None:
                yield round, metadata
            elif metadata.get(key) is not None:
                yield round, metadata[key]

    def incidents(self, kind: str) -> list[tuple[int, str, str]]:
        """The entries under a key such as `refused`: round, client (or site) and reason."""
        return [
            (round, str(who), str(reason))
            for round, reasons in self._column(kind, Mapping)
            for who, reason in reasons.items()
        ]

    @property
    def damage(self) -> str:
        """What a finished run has lost, in one sentence; empty if nothing."""
        rounds, kept = self.summary.get("rounds"), len(self.metrics)
        if self.complete and is_number(rounds) and kept < rounds:
            return f"{self.name} was cut: metrics.jsonl holds {kept} of its {rounds} rounds."
        return ""

    @property
    def attackers(self) -> frozenset[int]:
        """The malicious clients."""
        listed = self.census.get("attackers")
        if not isinstance(listed, list):
            return frozenset()
        return frozenset(client for client in listed if type(client) is int)

    def _column(self, name: str, kind: Any) -> Iterator[tuple[int, Any]]:
        """A column of lists or tables, with the round; other and empty values are left out."""
        if name in self.metrics:
            for round, value in zip(self.metrics["round"], self.metrics[name], strict=True):
                if isinstance(value, kind) and value:
                    yield int(round), value


def _are_numbers(clients: object) -> TypeGuard[list[int]]:
    return isinstance(clients, list) and all(type(client) is int for client in clients)


Groups = dict[str, list[Result]]  # the seeds of a method under its label


def read(folder: RunFolder) -> Result:
    """The result of one run, finished or not."""
    return make(
        str(folder.path), folder.config, folder.summary or {}, folder.records(), folder.clients
    )


def make(
    name: str,
    config: dict[str, Any],
    summary: dict[str, Any],
    records: list[Record],
    census: dict[str, Any],
) -> Result:
    """A result from what a run folder holds."""
    method = config.get("method", {})
    if not isinstance(method, Mapping):
        method = {"name": method}
    configured = {key: value for key, value in method.items() if key != "name"}
    options = summary.get("options", configured)
    seed = summary.get("seed", config.get("seed", 0))
    if not isinstance(options, Mapping) or type(seed) is not int:
        raise UserError(
            f"'{name}' is damaged: 'options' must be a table, and 'seed' a whole number."
        )
    known = _about(census) | summary  # which a run has only at its end
    circumstances = _circumstances(config) | {
        key: known[key] for key in ("data", "clients") if key in known
    }
    if str(data := circumstances.get("data")).endswith(".npz"):
        circumstances["data"] = Path(str(data)).stem
    return Result(
        name=name,
        method=str(known.get("method", method.get("name", "unknown"))),
        options=dict(options),
        circumstances=circumstances,
        seed=seed,
        complete=bool(summary.get("complete", False)),
        records=records,
        summary=summary,
        config=config,
        census=census,
    )


def _about(census: Mapping[str, Any]) -> dict[str, str]:
    """What a run that has just begun calls its method and its data; older ones do not say it."""
    about = census.get("about", {})
    return dict(about) if isinstance(about, Mapping) else {}


def by_setting(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs on the same data in the same hands, under what tells them from the others."""
    told = {
        key: [str(one.circumstances.get(key, f"no {key}")) for one in results] for key in SETTING
    }
    told["shift"] = [word.replace("none", "no shift") for word in told["shift"]]
    differing = [key for key, values in told.items() if len(set(values)) > 1]
    sections: dict[str, list[Result]] = {}
    for place, result in enumerate(results):
        words = [told[key][place] for key in differing]
        sections.setdefault(" · ".join(words), []).append(result)
    return sections


def unequal(results: Sequence[Result]) -> dict[str, dict[str, str]]:
    """The settings that methods on the same data do not have in common: their values by method."""
    found: dict[str, dict[str, str]] = {}
    for part in by_setting(results).values():
        keys = dict.fromkeys(key for one in part for key in one.circumstances)
        if len({str(one.config.get("versions", {}).get("fedhelix")) for one in part}) > 1:
            # A version may know settings that another one did not have.
            keys = {key: None for key in keys if all(key in one.circumstances for one in part)}
        for key in keys:
            values: dict[str, dict[str, None]] = {}
            for one in part:
                value = str(one.circumstances.get(key, "not set"))
                values.setdefault(one.method, {})[value] = None
            if len({frozenset(of_method) for of_method in values.values()}) > 1:
                found[key] = {method: " or ".join(each) for method, each in values.items()}
    return found


def grouped(runs: Sequence[RunFolder | Result]) -> Groups:
    """Runs that differ only in the seed, under a label that tells them from the others.

    Unfinished runs are groups of their own: a mean of finished and unfinished ones means nothing.
    """
    if not runs:
        raise UserError("there is no run to compare; give at least one run folder.")
    results = [run if isinstance(run, Result) else read(run) for run in runs]
    groups: dict[str, list[Result]] = {}
    for result in results:
        members = groups.setdefault(label_of(result, results), [])
        for twin in members:
            if twin.seed == result.seed:
                others = [one.name for one in results if one is not result]
                some = shlex.join(others[:MOST_NAMED]) + " ..." * (len(others) > MOST_NAMED)
                raise UserError(
                    f"'{twin.name}' and '{result.name}' are both {result.method} "
                    f"with seed {result.seed}; compare only one of them, by naming runs instead "
                    f"of the folder around them: `{some}`."
                )
        members.append(result)
    return groups


def given_in_python(config: Mapping[str, Any], key: str) -> Any:
    """An argument of a federation that was made in Python from names; None where it was not."""
    given = config.get("made_from")
    return given.get(key) if isinstance(given, Mapping) else None


def _circumstances(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can change a result, besides the method's own options."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key in NOT_COMPARED:
            continue
        if not isinstance(value, Mapping):
            settings[key] = value
        elif "name" in value:
            settings[key] = value["name"]
        else:
            settings |= value
    if partition := given_in_python(config, "partition"):
        settings.setdefault("partition", partition)  # older runs have it there alone
    deployment = config.get("deployment")
    if isinstance(deployment, Mapping) and "server_data" in deployment:
        settings["server_data"] = deployment["server_data"]
    return settings
