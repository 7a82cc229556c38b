"""A study's report as a table that people can read: ours, and the paper's number beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def grid(report: Mapping[str, Any], measure: str) -> tuple[list[str], list[list[str]]]:
    """Headers and rows for one measure; `ours ± standard error (paper)`."""
    columns = list(dict.fromkeys(cell["column"] for cell in report["cells"]))
    rows = list(dict.fromkeys(cell["row"] for cell in report["cells"]))
    at = {(cell["row"], cell["column"]): cell for cell in report["cells"]}
    texts = [
        [
            row,
            *(_text(at[row, column], measure) if (row, column) in at else "" for column in columns),
        ]
        for row in rows
    ]
    return ["", *columns], texts


def has_paper(report: Mapping[str, Any], measures: Sequence[str]) -> bool:
    """Whether the paper has any figure for these measures at this scale."""
    return any(
        cell[measure]["paper"] is not None for cell in report["cells"] for measure in measures
    )


def _text(cell: Mapping[str, Any], measure: str) -> str:
    found = cell[measure]
    paper = "" if found["paper"] is None else f" ({_number(found['paper'])})"
    if not cell["runs"]:
        return f"–{paper}"
    if found["mean"] is None:
        reached = [value for value in found["by_seed"] if value is not None]
        nothing = "never" if measure.startswith("rounds") and found["by_seed"] else ""
        share = f"{len(reached)} of {cell['runs']} seeds" if reached else nothing
        return f"{share}{paper}"
    error = "" if found["se"] is None else f" ± {_number(found['se'])}"
    return f"{_number(found['mean'])}{error}{paper}"


def _number(value: float) -> str:
    return (
        f"{value:.0f}"
        if float(value).is_integer()
        else f"{value:.2f}"
        if abs(value) < 10
        else f"{value:.1f}"
    )


def markdown(report: Mapping[str, Any], measure: str) -> str:
    """For documents."""
    headers, rows = grid(report, measure)
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(report: Mapping[str, Any], measure: str) -> Table:
    """For the terminal."""
    headers, rows = grid(report, measure)
    whose = ", ours (paper)" if has_paper(report, [measure]) else ""
    table = Table(title=f"{report['title']}: {measure}{whose}", show_edge=False, pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table
