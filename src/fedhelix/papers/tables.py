"""A study's report as a table: our number, and the paper's beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from fedhelix.report.columns import tabulate

NONE = "–"  # where there is no number


def grid(report: Mapping[str, Any], measure: str) -> tuple[list[str], list[list[str]]]:
    """Headers and rows for one measure; `ours ± standard error (paper)`."""
    columns = list(dict.fromkeys(cell["column"] for cell in report["cells"]))
    rows = list(dict.fromkeys(cell["row"] for cell in report["cells"]))
    run = [cell[measure] for cell in report["cells"] if cell["runs"]]
    ours = _are_whole([values[key] for values in run for key in ("mean", "se")])
    papers = _are_whole([cell[measure]["paper"] for cell in report["cells"]])
    texts = {
        (cell["row"], cell["column"]): _text(cell, measure, ours, papers)
        for cell in report["cells"]
    }
    body = [[row, *(texts.get((row, column), NONE) for column in columns)] for row in rows]
    return ["", *columns], body


def has_paper(report: Mapping[str, Any], measures: Sequence[str]) -> bool:
    """Whether the paper has any number for these measures at this scale."""
    return any(
        cell[measure]["paper"] is not None for cell in report["cells"] for measure in measures
    )


def _text(cell: Mapping[str, Any], measure: str, ours: bool, papers: bool) -> str:
    """A cell; `ours` and `papers`: whether all numbers of the table are whole ones."""
    values = cell[measure]
    paper = "" if values["paper"] is None else f" ({_number(values['paper'], papers)})"
    if not cell["runs"]:
        return f"{NONE}{paper}"
    if values["mean"] is None:
        return f"{_incomplete(values['by_seed'], measure, cell['runs'])}{paper}"
    error = "" if values["se"] is None else f" ± {_number(values['se'], ours)}"
    return f"{_number(values['mean'], ours)}{error}{paper}"


def _incomplete(by_seed: Sequence[float | None], measure: str, runs: int) -> str:
    """In place of a mean: how many seeds have a value."""
    known = sum(value is not None for value in by_seed)
    if known:
        return f"{known} of {runs} seeds"
    return "never" if by_seed and measure.startswith(("rounds", "hours")) else NONE


def _are_whole(values: Sequence[float | None]) -> bool:
    return all(value is None or float(value).is_integer() for value in values)


def _number(value: float, whole: bool) -> str:
    """A number with decimals, unless all are whole; nothing at all is a plain 0."""
    if whole or not value:
        return f"{value:.0f}"
    return f"{value:z.2f}" if abs(value) < 10 else f"{value:.1f}"


def markdown(report: Mapping[str, Any], measure: str) -> str:
    """The table of one measure in Markdown."""
    headers, rows = grid(report, measure)
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(report: Mapping[str, Any], measure: str, width: int) -> Group:
    """The table of one measure for a terminal of this width."""
    headers, rows = grid(report, measure)
    whose = ", ours (paper)" if has_paper(report, [measure]) else ""
    title = Text(f"{report['title']}: {measure}{whose}", "table.title")
    lines: list[Text | Group] = [title, tabulate(headers, rows, width)]
    if any(text.startswith(NONE) for row in rows for text in row[1:]):
        lines.append(Text(f"{NONE} means not run yet, or not measured"))
    return Group(*lines)
