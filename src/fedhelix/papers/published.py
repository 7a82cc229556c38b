"""The numbers that the papers print, read from the TOML files in `numbers/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhelix.core import toml

NUMBERS = Path(__file__).with_name("numbers")


@dataclass(frozen=True)
class PaperTable:
    """A printed table: for each measure, a number by row and column."""

    rows: Sequence[str]
    columns: Sequence[str]
    numbers: Mapping[str, Mapping[tuple[str, str], float]]

    def at(self, row: str, column: str) -> dict[str, float]:
        """The numbers of one cell by measure; empty if the paper has no such cell."""
        return {
            measure: values[row, column]
            for measure, values in self.numbers.items()
            if (row, column) in values
        }


def load(paper: str) -> dict[str, PaperTable]:
    """All tables of a paper by name."""
    return {name: _table(content) for name, content in toml.read(NUMBERS / f"{paper}.toml").items()}


def _table(content: Mapping[str, Any]) -> PaperTable:
    columns = content["columns"]
    measures = {name: rows for name, rows in content.items() if name != "columns"}
    numbers = {
        name: {
            (row, column): float(number)
            for row, printed in rows.items()
            for column, number in zip(columns, _per_column(printed, len(columns)), strict=True)
        }
        for name, rows in measures.items()
    }
    names = dict.fromkeys(row for rows in measures.values() for row in rows)
    return PaperTable(tuple(names), tuple(columns), numbers)


def _per_column(printed: float | list[float], count: int) -> list[float]:
    """A row's numbers, one per column; a single number holds for all of them."""
    return printed if isinstance(printed, list) else [printed] * count
