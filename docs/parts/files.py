"""What all parts share: the committed measurements and Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Columns hold numbers, except the first and those whose header ends in a
    space.
    """
    rule = [
        "---" if not place or header.endswith(" ") else "---:"
        for place, header in enumerate(headers)
    ]
    lines = [[header.strip() for header in headers], rule, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def exists(name: str) -> bool:
    """Whether a measurement has been committed."""
    return (RESULTS / f"{name}.json").exists()


def result(name: str) -> dict[str, Any]:
    """A committed measurement."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def percent(row: dict[str, Any], key: str) -> str:
    """A share with its standard error, in percent."""
    return f"{100 * row[key]:.1f} ± {100 * row[f'{key}_se']:.1f}"


def fashion() -> dict[str, dict[str, float]]:
    """pFedGPA's Table 1 on Fashion-MNIST with 20 clients, by method: mean, standard error, and the
    paper's value.
    """
    first: dict[str, dict[str, float]] = {}  # a method's first row counts
    for cell in result("pfedgpa-table1-gpu")["cells"]:
        if cell["column"] == "Fashion-MNIST 20" and cell["runs"] and cell["accuracy"]["paper"]:
            first.setdefault(cell["method"], cell["accuracy"])
    return first
