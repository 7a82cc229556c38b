"""Figures for web pages: SVG with real text, in the colours of the page, light or dark."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedhelix.report.style import COLOURS, DRAWING, GREY, PALE

TOKENS = Path(__file__).parent / "static" / "tokens.css"
WIDE = 7.0  # inches; a wider figure spans the page
COLUMN = 4.2  # inches: the text of such a figure is legible on a phone
GRIDS = ("#e6e6e6", "#eeeeee")

# The colours of figures, and the names of the page's colours in tokens.css that stand for them.
NAMES = {
    **{colour.lower(): f"--k{place}" for place, colour in enumerate(COLOURS)},
    "#000000": "--ink",
    "#ffffff": "--card",
    GREY: "--soft",
    PALE: "--pale",
    **dict.fromkeys(GRIDS, "--rule"),
}
COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")
LEFT_OUT = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|(?<=<g) id=\"[^\"]*\"", re.DOTALL)
NAMESPACES = re.compile(r" xmlns(?::\w+)?=\"[^\"]*\"")
OPENING = re.compile(r"<svg [^>]*>")


def is_wide(figure: Figure) -> bool:
    """Whether a figure needs the whole width of a page."""
    return bool(figure.get_figwidth() > WIDE)


def inline(figure: Figure, name: str, words: str) -> str:
    """A figure as part of a page, with words for those who cannot see it.

    Its title is left to the page. No two figures of a page may have one name.
    """
    svg = _drawn(figure, name)
    svg = NAMESPACES.sub("", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(words)}" ', 1)


def standalone(figure: Figure, name: str) -> str:
    """The same as an image of its own, which brings the colours along."""
    style = f"<style>{TOKENS.read_text(encoding='utf-8')}text {{ fill: var(--ink); }}</style>"
    return OPENING.sub(lambda opening: opening[0] + style, _drawn(figure, name), count=1)


def _drawn(figure: Figure, name: str) -> str:
    for axes in figure.axes:
        axes.set_title("", loc="left")
    if not is_wide(figure):
        figure.set_figwidth(COLUMN)
    stream = io.StringIO()
    # The salt keeps the marks and clips of several figures of one page apart.
    with DRAWING, matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = LEFT_OUT.sub("", svg[svg.index("<svg ") :])
    return COLOUR.sub(_named, svg)


def _named(match: re.Match[str]) -> str:
    what, colour = match[1], match[2]
    return f"{what}: var({NAMES[colour]})" if colour in NAMES else match[0]
