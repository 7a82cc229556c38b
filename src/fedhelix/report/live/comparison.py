"""Watched runs side by side: by their data, and with the seeds of a method as one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.report.live.result import kept_result
from fedhelix.report.live.run import WatchedRun
from fedhelix.report.live.values import as_text
from fedhelix.report.results import Result, by_setting, grouped
from fedhelix.report.sections import series
from fedhelix.report.spread import explanation


def compared(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """A section for each setting: the runs' rows and lines, and the means of their seeds."""
    by_name = {run.name: run for run in runs}
    sections = []
    for words, results in by_setting([kept_result(run) for run in runs]).items():
        members = [by_name[result.name] for result in results]
        groups = _groups(results)
        sections.append(
            {
                "words": as_text(words),
                "rows": [run.overview() for run in members],
                "lines": [run.line() | {"place": place} for place, run in enumerate(members)],
                "means": series(groups),
                "bands": explanation([len(seeds) for seeds in groups.values()]),
            }
        )
    return sections


def _groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The seeds of every method; where two runs are the same, each run by itself."""
    try:
        groups = grouped(results)
    except UserError:
        groups = {result.name: [result] for result in results}
    return {
        as_text(label if len(seeds) == 1 else f"{label}, {len(seeds)} seeds"): seeds
        for label, seeds in groups.items()
    }
