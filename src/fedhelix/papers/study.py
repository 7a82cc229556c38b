"""A study is a table of a paper as a value: which runs fill its cells, what is measured, and what
the paper says.

Every cell is made of ordinary run folders, one for each seed, whose names follow from their
settings: what is there already is not run again, and tables that have runs in common share them.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

from fedhelix.core.errors import unknown
from fedhelix.runs.config import PLACES
from fedhelix.runs.jobs import Session, is_finished
from fedhelix.runs.spec import RunSpec, make_spec
from fedhelix.store import RunFolder
from fedhelix.store.records import Record, evaluated_records, is_number

Scale = Literal["quick", "gpu", "paper"]


@dataclass(frozen=True)
class Cell:
    """One place of a table: a method under some settings, and the paper's figures by measure."""

    row: str
    column: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)


class Finished(NamedTuple):
    """A run of a cell that is over."""

    cell: Cell
    records: list[Record]
    summary: dict[str, Any]


Measure = Callable[[Finished], float | None]  # None: the run never got there
Plans = list[
    tuple[Cell, dict[Path, RunSpec]]
]  # the runs of every cell, with the folders that they belong in


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper. `cells` says what fills it at a scale; `measures` are its kinds
    of figures.
    """

    name: str
    title: str
    cells: Callable[[Scale], Sequence[Cell]]
    measures: Mapping[str, Measure]
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"quick": 1, "gpu": 2, "paper": 5})
    curves: Sequence[str] = ("accuracy",)  # kept round by round, for pictures
    vectors: Sequence[str] = ()  # kept client by client, of the last round
    drawn: Sequence[str] = ()  # the rows in its picture, where all of them would hide each other
    across: str = ""  # a measure to draw from column to column, instead of curves
    finish: Callable[[dict[str, Any]], None] | None = (
        None  # adds measures that compare cells with each other
    )

    def specs(
        self,
        scale: Scale,
        out: Path,
        more: Mapping[str, Any],
        seeds: int | None = None,
        only: Sequence[str] = (),
    ) -> Plans:
        """The runs of every cell (or only of those rows and columns), with the folders that they
        belong in.
        """
        found = []
        for cell in self.cells(scale):
            if only and cell.row not in only and cell.column not in only:
                continue
            specs = [
                make_spec(
                    cell.method, {"checkpoint_every": 25, **cell.settings, **more, "seed": seed}
                )
                for seed in range(self.seeds[scale] if seeds is None else seeds)
            ]
            found.append((cell, {out / folder_name(spec): spec for spec in specs}))
        return found

    def report(self, scale: Scale, specs: Plans, seconds: float | None) -> dict[str, Any]:
        """What its runs, as far as they are finished, say together."""
        paths = [path for _, runs in specs for path in runs]
        done = _finished(paths)
        report = {
            **origin(done),
            "seconds": seconds,
            "bench": self.name,
            "title": self.title,
            "scale": scale,
            "complete": len(done) == len(paths),
            "seeds": sorted({spec.config.seed for _, runs in specs for spec in runs.values()}),
            "measures": list(self.measures),
            "drawn": list(self.drawn),
            "across": self.across,
            "cells": [self.figures(cell, list(runs)) for cell, runs in specs],
        }
        if self.finish is not None:
            self.finish(report)
        return report

    def figures(self, cell: Cell, paths: Sequence[Path]) -> dict[str, Any]:
        """The figures of one cell, seed by seed and together."""
        folders = _finished(paths)
        done = [
            Finished(cell, folder.records(), folder.summary) for folder in folders if folder.summary
        ]
        found: dict[str, Any] = {
            "row": cell.row,
            "column": cell.column,
            "method": cell.method,
            "runs": len(done),
        }
        found["seeds"] = [folder.config["seed"] for folder in folders]
        if cell.settings.get("train_samples"):
            found["train_samples"] = cell.settings["train_samples"]
        for name, measure in self.measures.items():
            by_seed = [measure(run) for run in done]
            found[name] = {"by_seed": by_seed, **spread(by_seed), "paper": cell.paper.get(name)}
        for name in self.vectors:
            found[name] = [run.records[-1].get(name) for run in done]
        for name in self.curves if done else ():
            points = [
                [record for record in evaluated_records(run.records) if name in record]
                for run in done
            ]
            found[f"{name}_curve"] = {
                "rounds": [record["round"] for record in points[0]],
                "by_seed": [[_rounded(record[name]) for record in run] for run in points],
            }
        return found


def run_studies(
    studies: Sequence[Study],
    scale: Scale,
    out: Path,
    more: Mapping[str, Any],
    seeds: int | None = None,
    minutes: float | None = None,
    only: Sequence[str] = (),
    quiet: bool | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Fill the cells of studies as far as the time allows, all at once: what is known now, and
    whether all is done.
    """
    names = dict.fromkeys(
        name for study in studies for cell in study.cells(scale) for name in (cell.row, cell.column)
    )
    for name in only:
        if name not in names:
            raise unknown("row or column", name, names)
    requested = [study.specs(scale, out, more, seeds, only) for study in studies]
    every = {path: spec for cells in requested for _, runs in cells for path, spec in runs.items()}
    began, there = monotonic(), len(_finished(list(every)))
    done = Session.limited(minutes, quiet).run_all(every)
    worked = len(studies) == 1 and len(_finished(list(every))) > there
    seconds = (
        round(monotonic() - began, 1) if worked else None
    )  # of several studies nobody knows whose they are
    # What was run before, with other rows and columns, is reported too.
    reports = [
        study.report(scale, study.specs(scale, out, more, seeds), seconds)
        for study, cells in zip(studies, requested, strict=True)
        if cells
    ]
    return reports, done


def origin(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """What computed these runs, and with which versions: all of them where they differ."""
    found = [folder.config.get("versions", {}) for folder in folders]
    versions = {
        key: ", ".join(sorted({str(one.get(key, "unknown")) for one in found}))
        for key in dict.fromkeys(key for one in found for key in one)
    }
    return {"device": versions.pop("device", "unknown"), "versions": versions}


def folder_name(spec: RunSpec) -> str:
    """Readable, and different for runs that differ in anything but where they run."""
    left_out = {*PLACES, "versions"}
    if spec.config.optimizer == "sgd":
        left_out.add("optimizer")  # version 0.1 had no other, and its runs are to be found again
    requested = {key: value for key, value in spec.as_dict().items() if key not in left_out}
    digest = hashlib.sha256(
        json.dumps(requested, sort_keys=True, default=str).encode()
    ).hexdigest()[:10]
    return f"{spec.method.label}-{spec.config.data}-seed{spec.config.seed}-{digest}".replace(
        "/", "_"
    )


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and standard error; both are missing when a run did not get there, the error also for a
    single run.
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known or len(known) < len(values):
        return {"mean": None, "se": None}
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "se": error}


def _rounded(value: Any) -> float | None:
    """Short enough for a report; None is what a diverged model left."""
    return round(value, 4) if is_number(value) else None


def _finished(paths: Sequence[Path]) -> list[RunFolder]:
    return [RunFolder.open(path) for path in paths if is_finished(path)]


def add_measure(
    report: dict[str, Any],
    name: str,
    base: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
    compare: Callable[[float, float], float],
    of: str,
    paper: Mapping[tuple[str, str], float] | None = None,
) -> None:
    """A measure of every cell against another one, seed by seed: the first for which `base(cell,
    other)` is true.

    What it is a measure `of` may be missing altogether (no seeds), but not for some of the seeds.
    """
    report["measures"].append(name)
    for cell in report["cells"]:
        other = next((other for other in report["cells"] if base(cell, other)), None)
        mine, its = (
            dict(zip(one["seeds"], one[of]["by_seed"], strict=False)) if one else {}
            for one in (cell, other)
        )
        by_seed = [
            None if value is None or its.get(seed) is None else compare(value, its[seed])
            for seed, value in mine.items()
        ]
        both = [value for seed, value in zip(mine, by_seed, strict=True) if seed in its]
        known = (paper or {}).get((cell["row"], cell["column"]))
        cell[name] = {"by_seed": by_seed, **spread(both), "paper": known}


# Measures that several papers use
# -------------------------------------------------------------------------------


def percent(key: str) -> Measure:
    """A figure of the summary in percent."""
    return lambda run: None if run.summary.get(key) is None else 100 * run.summary[key]


def best_on_test(run: Finished) -> float | None:
    """The largest test accuracy of any round: what papers print, and what nobody could have known
    to choose.
    """
    found = [record["accuracy"] for record in run.records if is_number(record.get("accuracy"))]
    return 100 * max(found) if found else None


def rounds_to(
    target: float | Mapping[str, float], every: int = 1, for_good: bool = False
) -> Measure:
    """The first evaluated round with that test accuracy (in percent), which may differ from column
    to column.

    `every` looks only at multiples of so many rounds: the less often one looks, the less luck a
    noisy curve has. `for_good` leaves luck nothing: from that round on no evaluation is below the
    target.
    """

    def measure(run: Finished) -> float | None:
        wanted = target if isinstance(target, int | float) else target[run.cell.column]
        seen = [
            (record["round"], record.get("accuracy")) for record in evaluated_records(run.records)
        ]
        seen = [(round, accuracy) for round, accuracy in seen if round % every == 0]
        met = [is_number(accuracy) and 100 * accuracy >= wanted for _, accuracy in seen]
        if for_good:
            met = [all(met[place:]) for place in range(len(met))]
        return next((round for (round, _), there in zip(seen, met, strict=True) if there), None)

    return measure
