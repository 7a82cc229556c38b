"""A study is a table of a paper: the runs that fill its cells, the measures, the paper's numbers.

Every cell consists of ordinary run folders, one per seed, whose names follow from their settings.
Finished runs are not repeated, and tables with common runs share them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import Any, get_args

from fedhelix.core.errors import UserError
from fedhelix.federation.devices import Devices
from fedhelix.papers.cells import Cell, Scale
from fedhelix.papers.measures import Finished, Measure
from fedhelix.papers.options import BenchOptions, are_wanted, wanted_names
from fedhelix.papers.results import Names, SeedResult, cell_values, extend, joined, read_result
from fedhelix.runs.config import PLACES, Config
from fedhelix.runs.jobs import is_finished
from fedhelix.runs.spec import RunSpec, make_spec
from fedhelix.store import RunFolder
from fedhelix.store.records import HOUR, evaluated_records, is_number

# Keys that version 0.1 did not have, and what it did: its runs keep their names.
ADDED = {
    "optimizer": "sgd",
    "client_weights": "samples",
    "server_only": False,
    "eval_trained": False,
    "shift": "none",
    "newcomers_samples": None,
    "standardize": False,
    "sampler": "shuffle",
}
# The same for options of methods.
ADDED_OPTIONS = {
    "sharpen": 1.0,
    "prior": "uniform",
    "warm_epochs": 0,
    "required": True,
    "heads": "common",
    "times": 1.0,
}

CellRuns = list[tuple[Cell, dict[Path, RunSpec]]]  # the runs of every cell by folder


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper: `cells` fills it at a scale, `measures` are its numbers."""

    name: str
    title: str
    cells: Callable[[Scale], Sequence[Cell]]
    measures: Mapping[str, Measure]
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"quick": 1, "gpu": 5, "paper": 5})
    curves: Sequence[str] = ("accuracy",)  # recorded round by round, for the figure
    vectors: Sequence[str] = ()  # recorded client by client, of the last round
    drawn: Sequence[str] = ()  # rows of the figure, where all of them would hide each other
    across: str = ""  # a measure to draw from column to column, instead of curves
    against: tuple[str, Sequence[str]] | None = None  # a cost, and what to draw against it instead
    finish: Callable[[dict[str, Any]], None] | None = None  # adds measures that compare cells

    def names_in(self, scale: Scale) -> list[str]:
        """Its rows and columns at a scale."""
        return [name for cell in self.cells(scale) for name in (cell.row, cell.column)]

    def specs(
        self,
        scale: Scale,
        out: Path,
        overrides: Mapping[str, Any],
        seeds: int | None = None,
        only: Sequence[str] = (),
        first_seed: int = 0,
    ) -> CellRuns:
        """The runs of every cell by folder; `only` limits them to these rows and columns."""
        count = self.seeds[scale] if seeds is None else seeds
        if not 0 <= first_seed < count:
            raise UserError(
                f"the first seed must lie between 0 and {count - 1}, not {first_seed}: "
                f"{self.name} has {count} seed{'s' if count > 1 else ''}."
            )
        cells = self.cells(scale)
        wanted = are_wanted([(cell.row, cell.column) for cell in cells], only)
        return [
            (cell, cell_runs(cell, out, overrides, range(first_seed, count)))
            for cell in itertools.compress(cells, wanted)
        ]

    def report(
        self,
        scale: Scale,
        cells: CellRuns,
        seconds: float | None,
        earlier: Mapping[str, Any] | None = None,
        commit: str = "",
    ) -> dict[str, Any]:
        """The results of all runs that are finished, and those that only an earlier result has.

        `commit` is that of runs which record none.
        """
        paths = [path for _, runs in cells for path in runs]
        done = _finished(paths)
        where = ": ".join(filter(None, (scale, ", ".join(self.data(scale)))))
        report = {
            **origin(done, commit),
            "seconds": seconds,
            "bench": self.name,
            "title": f"{self.title} ({where})",
            "scale": scale,
            "complete": len(done) == len(paths),
            "seeds": sorted({spec.config.seed for _, runs in cells for spec in runs.values()}),
            "measures": list(self.measures),
            "drawn": list(self.drawn),
            "across": self.across,
            **({"against": list(self.against)} if self.against else {}),
            "cells": [self.cell_report(cell, runs, commit) for cell, runs in cells],
        }
        if earlier is not None:
            today = {
                (cell.row, cell.column): {settings_digest(next(iter(runs.values())))}
                for cell, runs in cells
            }
            extend(report, earlier, self.names, today)
        if self.finish is not None:
            self.finish(report)
        return report

    def data(self, scale: Scale) -> list[str]:
        """The data sets that the runs of a scale train on."""
        settings = [cell.settings for cell in self.cells(scale)]
        return list(dict.fromkeys(str(known.get("data", Config.data)) for known in settings))

    @property
    def names(self) -> Names:
        """What is recorded of every run."""
        return Names(list(self.measures), self.vectors, self.curves)

    def cell_report(
        self, cell: Cell, runs: Mapping[Path, RunSpec], commit: str = ""
    ) -> dict[str, Any]:
        """The results of one cell, seed by seed and together."""
        results = {
            spec.config.seed: self._result(cell, spec, RunFolder.open(path), commit)
            for path, spec in runs.items()
            if is_finished(path)
        }
        samples = cell.settings.get("train_samples")
        return {
            "row": cell.row,
            "column": cell.column,
            "method": cell.method,
            **({"train_samples": samples} if samples else {}),
            **cell_values(results, self.names, cell.paper),
        }

    def _result(self, cell: Cell, spec: RunSpec, folder: RunFolder, commit: str) -> SeedResult:
        """What a finished run gave."""
        run = Finished(cell, folder.records(), folder.summary or {})
        versions = folder.config.get("versions", {})
        return SeedResult(
            {name: measure(run) for name, measure in self.measures.items()},
            {name: run.records[-1].get(name) for name in self.vectors},
            {name: _curve(name, run) for name in self.curves},
            settings_digest(spec),
            versions.get("commit", commit or None),
            versions.get("device"),
        )


def run_studies(
    studies: Sequence[Study], scale: Scale, options: BenchOptions, first_seed: int = 0
) -> tuple[list[dict[str, Any]], bool]:
    """Run the cells of studies as far as the time allows; seeds before the first are not run.

    Returns their reports, and whether all runs are finished.
    """
    names = {
        each: [name for study in studies for name in study.names_in(each)]
        for each in get_args(Scale)
    }
    only = wanted_names(options.only, "row or column", scale, names)
    for study in studies:
        _earlier(study, scale, options)  # a file that is no result is refused before any work
    where = options.out, options.overrides, options.seeds
    selected = [study.specs(scale, *where, only, first_seed) for study in studies]
    runs = {path: spec for cells in selected for _, specs in cells for path, spec in specs.items()}
    start, finished_before = monotonic(), len(_finished(list(runs)))
    done = options.session().run_all(runs)
    # The time of several studies cannot be divided among them.
    timed = len(studies) == 1 and len(_finished(list(runs))) > finished_before
    seconds = round(monotonic() - start, 1) if timed else None
    # Reports include earlier runs of rows and columns that were not selected this time.
    reports = [
        study.report(
            scale,
            study.specs(scale, *where),
            seconds,
            _earlier(study, scale, options),
            options.commit,
        )
        for study, cells in zip(studies, selected, strict=True)
        if cells
    ]
    return reports, done


def _earlier(study: Study, scale: Scale, options: BenchOptions) -> dict[str, Any] | None:
    folder = options.results
    return read_result(folder / f"{study.name}-{scale}.json") if folder else None


def origin(folders: Sequence[RunFolder], commit: str = "") -> dict[str, Any]:
    """The device and versions that computed these runs; all of them where they differ."""
    default = {"commit": commit} if commit else {}
    recorded = [default | folder.config.get("versions", {}) for folder in folders]
    versions = {
        key: joined(str(one.get(key, "unknown")) for one in recorded)
        for key in dict.fromkeys(key for one in recorded for key in one)
    }
    return {"device": versions.pop("device", "unknown"), "versions": versions}


def folder_name(spec: RunSpec) -> str:
    """A readable name that differs for runs that differ in anything but where they run."""
    name = f"{spec.method.label}-{spec.config.data}-seed{spec.config.seed}-{_digest(spec)}"
    return name.replace("/", "_")


def settings_digest(spec: RunSpec) -> str:
    """What runs of a cell have in common: the same for all seeds."""
    return _digest(spec, "seed")


def _digest(spec: RunSpec, *without: str) -> str:
    """Ten digits that depend on all settings but these and those of the place."""
    left_out = {*PLACES, "versions", *without}
    left_out |= {name for name, value in ADDED.items() if getattr(spec.config, name) == value}
    if spec.config.devices is None:
        left_out |= {field.name for field in fields(Devices)}  # runs of before keep their names
    settings = {key: value for key, value in spec.as_dict().items() if key not in left_out}
    method = dict(settings["method"])
    if not _has_server_data(spec):
        method.pop("warm_epochs", None)  # it has no effect
    settings["method"] = {
        key: value
        for key, value in method.items()
        if key not in ADDED_OPTIONS or value != ADDED_OPTIONS[key]
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _has_server_data(spec: RunSpec) -> bool:
    resolved = spec.config.resolved(spec.method.capabilities.server_validation)
    return bool(resolved.validation_size)


def cell_runs(
    cell: Cell, out: Path, overrides: Mapping[str, Any], seeds: Iterable[int]
) -> dict[Path, RunSpec]:
    """The runs of a cell by folder, one for each seed."""
    settings = {"checkpoint_every": 25, **cell.settings, **overrides}
    specs = [make_spec(cell.method, {**settings, "seed": seed}) for seed in seeds]
    return {out / folder_name(spec): spec for spec in specs}


def _finished(paths: Sequence[Path]) -> list[RunFolder]:
    return [RunFolder.open(path) for path in paths if is_finished(path)]


def _curve(name: str, run: Finished) -> dict[str, Any]:
    """A value round by round, rounded for the report; None where a model diverged."""
    records = [record for record in evaluated_records(run.records) if name in record]
    curve: dict[str, Any] = {
        "rounds": [record["round"] for record in records],
        "values": [_rounded(record[name]) for record in records],
    }
    if all("clock" in record for record in records):
        curve["hours"] = [_rounded(record["clock"] / HOUR) for record in records]
    return curve


def _rounded(value: Any) -> float | None:
    return round(value, 4) if is_number(value) else None
