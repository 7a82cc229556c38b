"""Docstrings as texts for people."""

from __future__ import annotations

import inspect


def summary(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
