"""The cells of a study: rows times columns, each with the numbers that the paper prints there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedhelix.papers.published import PaperTable

Scale = Literal["quick", "gpu", "paper"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a method, its settings, and the paper's numbers by measure."""

    row: str
    column: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A method and the settings that it adds to those of a column."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """What all rows have in common there: usually a data set and how it is partitioned."""

    name: str
    settings: Mapping[str, Any]


def cross(
    rows: Iterable[Row],
    columns: Sequence[Column],
    published: PaperTable | None = None,
    by_row: bool = False,
) -> list[Cell]:
    """Every row in every column, with the published numbers where the paper has such a cell.

    A row's settings override those of the column. Cells run in the order of this list: column
    after column, or row after row with `by_row`.
    """
    rows = list(rows)
    pairs = (
        [(row, column) for row in rows for column in columns]
        if by_row
        else [(row, column) for column in columns for row in rows]
    )
    return [
        Cell(
            row.name,
            column.name,
            row.method,
            {**column.settings, **row.settings},
            published.at(row.name, column.name) if published else {},
        )
        for row, column in pairs
    ]
