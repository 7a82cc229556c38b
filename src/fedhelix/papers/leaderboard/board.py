"""Runs the leaderboard: a search of equal size for each method, then the final runs.

All of it is ordinary runs that are kept: a search is seed 0 with several settings, and the final
runs are all seeds with those whose validation accuracy was best. Test samples decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.papers.cells import Cell, Column
from fedhelix.papers.leaderboard.ranks import ranking
from fedhelix.papers.leaderboard.settings import (
    SEEDS,
    TRIALS,
    BoardScale,
    Entrant,
    columns,
    entrants,
)
from fedhelix.papers.measures import Finished, Measure, percent
from fedhelix.papers.options import BenchOptions, wanted_names
from fedhelix.papers.results import extend, is_complete, read_result
from fedhelix.papers.study import CellRuns, Study, cell_runs, settings_digest
from fedhelix.runs.jobs import Session, is_finished
from fedhelix.store import RunFolder
from fedhelix.store.records import best_record, is_number

MIB = 2**20
SCORE = "accuracy"


def _at_best(key: str) -> Measure:
    """A value in percent of the round that is best on validation samples."""

    def measure(run: Finished) -> float | None:
        value = (best_record(run.records) or {}).get(key)
        return 100 * value if is_number(value) else None

    return measure


def _traffic(run: Finished) -> float:
    """Everything that is sent in either direction."""
    return float(sum(run.summary[f"{way}_bytes"] for way in ("uplink", "downlink", "other"))) / MIB


MEASURES: dict[str, Measure] = {
    SCORE: percent("personal_accuracy_at_best"),
    "10th percentile": _at_best("personal_p10"),
    "traffic in MiB": _traffic,
    "seconds": lambda run: run.summary["seconds"],
}


@dataclass(frozen=True)
class Board:
    """A leaderboard in the making: who tries what, and where the runs are."""

    scale: BoardScale
    out: Path
    overrides: Mapping[str, Any]
    seeds: int

    def search(self, entrant: Entrant, column: Column) -> CellRuns:
        """What a method tries in a setting, with seed 0."""
        trials = entrant.trials(column, TRIALS[self.scale])
        return [(cell, cell_runs(cell, self.out, self.overrides, [0])) for cell in trials]

    def chosen(self, entrant: Entrant, column: Column) -> Cell | None:
        """The trial with the best validation accuracy; None before all are finished."""
        scores = [(_validation(path), cell) for cell, (path, *_) in self.search(entrant, column)]
        if any(score is None for score, _ in scores):
            return None
        return max(scores, key=lambda scored: scored[0] or 0.0)[1]

    def final(self, entrants: Sequence[Entrant], column: Column) -> CellRuns:
        """The runs that count, of the methods whose search is finished."""
        cells = [self.chosen(entrant, column) for entrant in entrants]
        return [
            (cell, cell_runs(cell, self.out, self.overrides, range(self.seeds)))
            for cell in cells
            if cell is not None
        ]

    def run(self, session: Session, entrants: Sequence[Entrant], columns: Sequence[Column]) -> bool:
        """Run setting after setting, so that a budget which is too small leaves whole ones."""
        for column in columns:
            searches = [run for one in entrants for _, run in self.search(one, column)]
            if not session.run_all({path: run[path] for run in searches for path in run}):
                return False
            finals = [run for _, run in self.final(entrants, column)]
            if not session.run_all({path: run[path] for run in finals for path in run}):
                return False
        return True

    def report(self, earlier: Mapping[str, Any] | None = None, commit: str = "") -> dict[str, Any]:
        """All results that there are, with those that only an earlier result has, and the ranks
        over the settings that are complete.
        """
        rows, settings = entrants(self.scale), columns(self.scale)
        cells = [runs for column in settings for runs in self.final(rows, column)]
        study = Study("leaderboard", "Leaderboard", lambda _: [], MEASURES, curves=())
        report = study.report(self.scale, cells, None, commit=commit)
        report["seeds"] = list(range(self.seeds))
        report["trials"] = TRIALS[self.scale]
        by_name = {(e.row, c.name): (e, c) for c in settings for e in rows}
        for (cell, _), made in zip(cells, report["cells"], strict=True):
            entrant, column = by_name[cell.row, cell.column]
            made["chosen"] = entrant.tried(cell)
            made["search"] = [
                {**entrant.tried(trial), "validation": _validation(path)}
                for trial, (path, *_) in self.search(entrant, column)
            ]
        report["complete"] = is_complete(report, len(by_name))
        if earlier is not None:
            today = {place: self.digests(*both) for place, both in by_name.items()}
            extend(report, earlier, study.names, today)
        report["ranking"] = ranks_of(report, [entrant.row for entrant in rows])
        return report

    def digests(self, entrant: Entrant, column: Column) -> set[str]:
        """Those of all settings that a method tries."""
        return {
            settings_digest(spec)
            for _, runs in self.search(entrant, column)
            for spec in runs.values()
        }


def ranks_of(report: Mapping[str, Any], rows: Sequence[str]) -> dict[str, Any] | None:
    """Ranks over the settings in which every method has every seed; None if there is none."""
    seeds, by_column = len(report["seeds"]), dict[str, dict[str, list[float]]]()
    for cell in report["cells"]:
        values = cell[SCORE]["by_seed"]
        if len(values) == seeds and None not in values:
            by_column.setdefault(cell["column"], {})[cell["row"]] = values
    complete = [by_row for by_row in by_column.values() if by_row.keys() == set(rows)]
    if not complete:
        return None
    return ranking({row: np.array([by_row[row] for by_row in complete]) for row in rows})


def _validation(path: Path) -> float | None:
    """A finished run's accuracy on validation samples, in its best round; none is as bad as a
    diverged one.
    """
    if not is_finished(path):
        return None
    value = (best_record(RunFolder.open(path).records()) or {}).get("valid_accuracy")
    return float(value) if is_number(value) and math.isfinite(value) else 0.0


def run_leaderboard(scale: BoardScale, options: BenchOptions) -> tuple[dict[str, Any], bool]:
    """Search and run as far as the time allows.

    Returns the report on all runs that there are, and whether those asked for are finished.
    """
    rows, settings = entrants(scale), columns(scale)
    names = {
        each: [one.row for one in entrants(each)] + [one.name for one in columns(each)]
        for each in get_args(BoardScale)
    }
    only = wanted_names(options.only, "method or setting", scale, names)
    seeds = SEEDS[scale] if options.seeds is None else options.seeds
    if seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    board = Board(scale, options.out, options.overrides, seeds)
    path = options.results / f"leaderboard-{scale}.json" if options.results else None
    read_result(path)  # a file that is no result is refused before any work
    chosen_rows = [one for one in rows if one.row in only] or rows
    chosen_settings = [one for one in settings if one.name in only] or settings
    done = board.run(options.session(), chosen_rows, chosen_settings)
    return board.report(read_result(path), options.commit), done
