"""Measures read one number from a finished run; comparisons relate the cells of a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedhelix.papers.cells import Cell
from fedhelix.store.records import HOUR, Record, evaluated_records, is_number


class Finished(NamedTuple):
    """A finished run of a cell."""

    cell: Cell
    records: list[Record]
    summary: dict[str, Any]


Measure = Callable[[Finished], float | None]  # None: the run has no such number


def from_summary(key: str) -> Measure:
    """A value of the summary as it is."""
    return lambda run: run.summary.get(key)


def percent(key: str) -> Measure:
    """A value of the summary in percent."""
    return lambda run: None if run.summary.get(key) is None else 100 * run.summary[key]


def in_units(key: str, unit: int) -> Measure:
    """A value of the summary in a larger unit, such as bytes in MiB."""
    return lambda run: None if run.summary.get(key) is None else run.summary[key] / unit


def last_percent(key: str) -> Measure:
    """A value of the last round in percent."""
    return lambda run: None if run.records[-1].get(key) is None else 100 * run.records[-1][key]


def best_on_test(run: Finished) -> float | None:
    """The best test accuracy of any round in percent.

    Papers print it, although nobody could stop at that round without looking at the test set.
    """
    accuracies = [record["accuracy"] for record in run.records if is_number(record.get("accuracy"))]
    return 100 * max(accuracies) if accuracies else None


def rounds_to(
    target: float | Mapping[str, float], every: int = 1, for_good: bool = False
) -> Measure:
    """The first evaluated round that reaches a test accuracy in percent (one, or one per column).

    `every` considers only multiples of that many rounds: the fewer evaluations, the less a lucky
    round of a noisy curve counts. With `for_good` no later evaluation may fall below the target.
    """

    def measure(run: Finished) -> float | None:
        threshold = target if isinstance(target, int | float) else target[run.cell.column]
        records = [
            record for record in evaluated_records(run.records) if record["round"] % every == 0
        ]
        reached = [_reaches(record.get("accuracy"), threshold) for record in records]
        if for_good:
            reached = [all(reached[start:]) for start in range(len(reached))]
        return next(
            (record["round"] for record, yes in zip(records, reached, strict=True) if yes), None
        )

    return measure


def hours_to(target: float) -> Measure:
    """The simulated hours until the first evaluation that reaches a test accuracy in percent."""

    def measure(run: Finished) -> float | None:
        reached = (record for record in run.records if _reaches(record.get("accuracy"), target))
        first = next(reached, None)
        return None if first is None else first["clock"] / HOUR

    return measure


def _reaches(accuracy: Any, threshold: float) -> bool:
    return is_number(accuracy) and 100 * accuracy >= threshold


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and standard error over seeds.

    Both are None if a seed has no value; the standard error is also None for a single seed.
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known or len(known) < len(values):
        return {"mean": None, "se": None}
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "se": error}


def add_measure(
    report: dict[str, Any],
    name: str,
    is_baseline: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
    compare: Callable[[float, float], float],
    of: str,
    paper: Mapping[tuple[str, str], float] | None = None,
) -> None:
    """Compare the measure `of` every cell with that of its baseline, seed by seed.

    The baseline is the first cell for which `is_baseline(cell, other)` holds. Seeds that it does
    not have are left out of the mean.
    """
    report["measures"].append(name)
    for cell in report["cells"]:
        baseline = next((other for other in report["cells"] if is_baseline(cell, other)), None)
        values = _values_by_seed(cell, of)
        reference = _values_by_seed(baseline, of) if baseline else {}
        pairs = [(value, reference.get(seed)) for seed, value in values.items()]
        by_seed = [
            None if value is None or base is None else compare(value, base) for value, base in pairs
        ]
        both = [value for seed, value in zip(values, by_seed, strict=True) if seed in reference]
        printed = (paper or {}).get((cell["row"], cell["column"]))
        cell[name] = {"by_seed": by_seed, **spread(both), "paper": printed}


def _values_by_seed(cell: Mapping[str, Any], measure: str) -> dict[int, float | None]:
    return dict(zip(cell["seeds"], cell[measure]["by_seed"], strict=False))
