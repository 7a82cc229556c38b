"""Progress and results as HTML, for the cells of a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any


class CellOutput:
    """One output of the running cell, which every call of `show` replaces."""

    def __init__(self) -> None:
        self._output: Any = None

    def show(self, html: str) -> None:
        """Show this HTML from now on; without IPython nothing happens."""
        try:
            from IPython.display import HTML, display  # there is none outside of notebooks
        except ImportError:
            return
        if self._output is None:
            self._output = display(HTML(html), display_id=True)
        else:
            self._output.update(HTML(html))


def bar(title: str, done: int, total: int, words: str) -> str:
    """A bar with a title before it and the latest numbers after it."""
    return (
        f"<b>{escape(title)}</b> <progress value='{done}' max='{total}'></progress> "
        f"{done}/{total} {escape(words)}"
    )


def table(title: str, rows: Mapping[str, str]) -> str:
    """Names and values, one pair in a row."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:right'>{escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption><b>{escape(title)}</b></caption>{cells}</table>"
