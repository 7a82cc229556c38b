"""A watched run as reports see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.report.live.run import WatchedRun, is_round
from fedhelix.report.live.values import as_text
from fedhelix.report.results import Result, make
from fedhelix.store.records import Record


def kept_result(run: WatchedRun) -> Result:
    """The run with the columns that are kept."""
    run.follow()
    return _made(run, run.kept_records(), {})


def whole_result(run: WatchedRun) -> Result:
    """The run with its clients and full records; of a file that is too large, the last ones."""
    while run.follow():
        pass
    kept = {record["round"]: record for record in run.kept_records()}
    full = {
        number: kept.get(number, {}) | record
        for record in run.records()
        if is_round(number := record.get("round"))
    }
    records = kept | full
    return _made(run, list(records.values()), run.census())


def _made(run: WatchedRun, records: list[Record], census: Mapping[str, Any]) -> Result:
    """A result; a nameless one where the run is damaged."""
    try:
        return make(run.name, run.config, run.summary, records, dict(census))
    except UserError:
        return make(run.name, {"method": as_text(run.name)}, {}, records, dict(census))
