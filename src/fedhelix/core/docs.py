"""Docstrings as texts for people."""

from __future__ import annotations

import inspect


def summary(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def details(thing: object) -> list[str]:
    """The other paragraphs, each on one line."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")[1:]
    return [" ".join(paragraph.split()) for paragraph in paragraphs]
