"""Runs as rows to compare: which method and seed each one is, and which runs belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedhelix.errors import BadInput
from fedhelix.store import RunFolder

# What a run is judged by, best first: the model that a client uses, and where there is none, the server's.
JUDGED_BY = ("personal_accuracy", "personal_score", "accuracy", "score")

# Settings that a reader expects to be the same for all methods of a comparison.
OF_EVERY_METHOD = ("data", "clients")

# What a config.toml holds besides settings that can change a result.
IRRELEVANT = ("method", "seed", "kernels", "workers", "data_dir", "checkpoint_every", "format", "versions", "library")


@dataclass(frozen=True)
class Result:
    """One run: its settings, its records and its summary (empty while the run is unfinished)."""

    folder: RunFolder
    method: str
    settings: dict[str, Any]
    seed: int
    complete: bool
    metrics: pd.DataFrame
    summary: dict[str, Any]

    def series(self, column: str) -> pd.Series:
        """A column's values where there are any, indexed by round."""
        if column not in self.metrics:
            return pd.Series(dtype=float)
        values = pd.to_numeric(self.metrics.set_index("round")[column], errors="coerce")
        return values.dropna().astype(float)

    def final(self, column: str) -> float:
        """A column's value in the last round that has one (not the best one: that would be choosing by the test)."""
        values = self.series(column)
        return float(values.iloc[-1]) if len(values) else float("nan")

    def total(self, column: str) -> float:
        """A cost of the whole run: the summary's number, which includes what happened before the first round."""
        value = self.summary.get(column)
        return float(value) if value is not None else float(self.series(column).sum())

    def judged_by(self) -> str | None:
        """The column that this run is judged by; None when no round has been evaluated."""
        return next((column for column in JUDGED_BY if len(self.series(column))), None)

    def client_finals(self) -> list[float]:
        """The metric of every client in the last round that lists them."""
        if "personal" not in self.metrics:
            return []
        lists = [values for values in self.metrics["personal"] if isinstance(values, list) and values]
        return [float(value) for value in lists[-1] if value is not None] if lists else []


def read(folder: RunFolder) -> Result:
    """The result of one run, finished or not."""
    config, summary = folder.config, folder.summary or {}
    asked_method = config.get("method", {})
    if not isinstance(asked_method, Mapping):
        asked_method = {"name": asked_method}
    asked_options = {key: value for key, value in asked_method.items() if key != "name"}
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key not in (*IRRELEVANT, *OF_EVERY_METHOD):
            settings |= value if isinstance(value, Mapping) else {key: value}
    settings |= summary.get("options", asked_options)
    settings |= {key: summary[key] for key in OF_EVERY_METHOD if key in summary}
    return Result(
        folder=folder,
        method=str(summary.get("method", asked_method.get("name", "unknown"))),
        settings=settings,
        seed=int(summary.get("seed", config.get("seed", 0))),
        complete=bool(summary.get("complete", False)),
        metrics=folder.metrics,
        summary=summary,
    )


def grouped(folders: Sequence[RunFolder]) -> dict[str, list[Result]]:
    """Runs that differ in nothing but the seed, under a label that tells them from the others.

    Unfinished runs stand apart: an average of finished and unfinished ones would mean nothing.
    """
    if not folders:
        raise BadInput("there is no run to compare; give at least one run folder.")
    results = [read(folder) for folder in folders]
    groups: dict[str, list[Result]] = {}
    for result in results:
        members = groups.setdefault(_label(result, results), [])
        for twin in members:
            if twin.seed == result.seed:
                raise BadInput(
                    f"'{twin.folder.path}' and '{result.folder.path}' are both {result.method} with seed "
                    f"{result.seed}; compare only one of them."
                )
        members.append(result)
    return groups


def _label(result: Result, others: Sequence[Result]) -> str:
    """The method's name, and in brackets only what tells it from other runs of this method or on other data."""
    kin = [other for other in others if other.method == result.method]
    keys = dict.fromkeys(key for other in kin for key in other.settings if key not in OF_EVERY_METHOD)
    details = [
        f"{key}={result.settings.get(key, 'auto')}"
        for key in keys
        if any(other.settings.get(key) != result.settings.get(key) for other in kin)
    ]
    details += [
        f"{key}={value}"
        for key, value in result.settings.items()
        if key in OF_EVERY_METHOD and any(other.settings.get(key, value) != value for other in others)
    ]
    if not result.complete:
        details.append("unfinished")
    return f"{result.method} ({', '.join(details)})" if details else result.method
