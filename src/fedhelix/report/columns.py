"""Tables on a terminal: columns that do not fit beside the others stand below them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

GAP = 2  # between two columns
PAGE = 200  # characters of a line that no terminal shows


def screen() -> Console:
    """Where tables go: the terminal, or wide lines for a file or a program unless COLUMNS says
    how wide.
    """
    console = Console()
    wide = console.is_terminal or "COLUMNS" in os.environ
    return console if wide else Console(width=PAGE)


def tabulate(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Group:
    """A table whose first column names the rows; nothing in it is cut at this width."""
    lines: list[Text | Table] = []
    for block in _blocks(headers, rows, width):
        if lines:
            lines.append(Text())
        table = Table(
            box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False,
            padding=(0, GAP - 1, 0, 0),
        )  # fmt: skip
        for place, size in block.items():
            table.add_column(
                Text(headers[place]),
                justify="right" if place else "left",
                overflow="fold",
                vertical="bottom",
                width=size,
            )
        for row in rows:
            # Text, because brackets in a name are not markup
            table.add_row(*(Text(row[place]) for place in block))
        lines.append(table)
    return Group(*lines)


def _blocks(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[dict[int, int]]:
    """The columns of each table that fits the width, and how wide they are: numbers stay whole,
    headers and names of rows are wrapped between words, and within a word only where it alone is
    too long.
    """
    columns = list(zip(headers, *rows, strict=True))
    whole = [max(map(len, column)) for column in columns]
    if sum(whole) + GAP * (len(whole) - 1) <= width:
        return [dict(enumerate(whole))]
    sizes = [max(map(len, (*header.split(), *cells))) for header, *cells in columns[1:]]
    longest = max(map(len, " ".join(columns[0]).split()), default=0)
    names = max(longest, min(whole[0], width // 4))
    names = max(min(names, width - GAP - max(sizes)), min(names, width // 4))
    blocks: list[dict[int, int]] = []
    for place, size in enumerate(sizes, start=1):
        if not blocks or _width(blocks[-1]) + GAP + size > width:
            blocks.append({0: names})
        blocks[-1][place] = min(size, width - GAP - names)
    spare = width - max(map(_width, blocks))
    return [{**block, 0: min(whole[0], names + spare)} for block in blocks]


def _width(block: dict[int, int]) -> int:
    return sum(block.values()) + GAP * (len(block) - 1)
