"""The help pages: prose without stray line breaks, examples as they are, arguments with their
meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import click
import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo

OPPOSITES = "--no-SWITCH, such as {}, switches off what --config or --preset switched on."


class Command(TyperCommand):
    """A command whose help page can be read, and copied from."""

    def __init__(self, name: str | None, **settings: Any):
        super().__init__(name, **settings)
        self.help = _flowing(self.help or "")
        meanings = _meanings(self.callback) if self.callback else {}
        for param in self.params:
            if isinstance(param, TyperArgument):  # click 8.5 and later drop what typer gave them
                param.help = escape(param.help or meanings.get(param.name or "", ""))

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Leaves out the opposites of switches, whose column would squeeze all others."""
        switches = [param for param in self.params if param.secondary_opts]
        if not switches:
            return super().format_help(ctx, formatter)
        hidden = [(param, param.secondary_opts) for param in switches]
        self.epilog = OPPOSITES.format(hidden[0][1][0])
        for param, _ in hidden:
            param.secondary_opts = []
        try:
            super().format_help(ctx, formatter)
        finally:
            for param, opposites in hidden:
                param.secondary_opts = opposites


class App(typer.Typer):
    """A command line that consists of such commands."""

    def command(  # type: ignore[override]
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a command."""
        return super().command(name, **{"cls": Command, **settings})


def _flowing(text: str) -> str:
    """Paragraphs in one line each; what is indented stays as it is."""
    paragraphs = [
        part if part.startswith("  ") else part.replace("\n", " ")
        for part in inspect.cleandoc(text).split("\n\n")
    ]
    return escape("\n\n".join(paragraphs))


def _meanings(command: Callable[..., Any]) -> dict[str, str]:
    """The help of the arguments of a command."""
    notes = {
        name: [*getattr(parameter.annotation, "__metadata__", ()), parameter.default]
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
    }
    return {
        name: note.help
        for name, found in notes.items()
        for note in found
        if isinstance(note, ArgumentInfo) and note.help
    }
