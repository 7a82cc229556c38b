"""What a watched run's method recorded, as figures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedhelix.report.diagnostics import IN_OTHER_FIGURES
from fedhelix.report.figures import INSIDE
from fedhelix.report.live import files
from fedhelix.report.live.result import whole_result
from fedhelix.report.live.run import WatchedRun
from fedhelix.report.style import DRAWING
from fedhelix.report.themed import standalone
from fedhelix.store.records import is_number

MOST_KEPT = 32  # figures


def drawable(recorded: Mapping[str, Any]) -> list[dict[str, str]]:
    """The figures that can show the latest entries of the metadata: name, title and caption."""
    numbers = any(is_number(recorded[key]) for key in recorded if key not in IN_OTHER_FIGURES)
    return [
        {"name": name, "title": inside.title, "caption": inside.caption}
        for name, inside in INSIDE.items()
        if (recorded.get(inside.key) if inside.key else numbers)
    ]


def drawn(run: WatchedRun, name: str) -> str | None:
    """A figure as SVG; None where there is no such figure, or nothing to draw."""
    if name not in INSIDE:
        return None
    with DRAWING:  # a page asks for its figures all at once
        return _drawn(run, name, files.stamp(run.path / "metrics.jsonl"))


@lru_cache(maxsize=MOST_KEPT)
def _drawn(run: WatchedRun, name: str, _: files.Stamp) -> str | None:
    """The figure as long as the records stay as they are."""
    figure = INSIDE[name].draw(whole_result(run))
    return None if figure is None else standalone(figure, name)
