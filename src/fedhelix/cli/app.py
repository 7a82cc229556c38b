"""The command `fedhelix`: all its commands, and what becomes of errors."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import click
import typer

from fedhelix.cli.commands import COMMANDS, LazyGroup
from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.version import __version__

DEBUG = "FEDHELIX_DEBUG"  # set: exceptions in a method's hooks come with their traceback

NO_SPACE = (
    "there is no space left on the device; no complete round is lost: free some space, then go on "
    "with `fedhelix resume FOLDER`, or repeat the command if it is a sweep or a bench."
)

# Commands without a flag for every setting, and where theirs are.
SETTINGS = {
    "fedhelix resume": "write --set {0}=VALUE",
    "fedhelix sweep": "FILE has the {0} in its table [settings]",
    "fedhelix tune": "FILE has the {0} in its table [settings]",
}

app = typer.Typer(
    name="fedhelix",
    help="Federated learning on clients whose data differ: train, compare and understand.",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, entry in COMMANDS.items():
    app.command(name, help=entry.summary)(lambda: None)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Print the version when asked."""
    if version:
        print(f"fedhelix {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line: mistakes of the user end with one sentence and exit code 2."""
    warnings.showwarning = _said_once()
    try:
        code = app(prog_name="fedhelix", standalone_mode=False)
    except UserError as problem:
        _stop(str(problem), 2)
    except click.UsageError as problem:
        # Click and typer both add the hint to an unknown command.
        words = re.sub(r"( Did you mean .*?\?)\1", r"\1", problem.format_message())
        words = re.sub(r" \(Did you mean one of: .*\)", "", words)
        if not words:
            sys.exit(2)  # a bare command, whose help is on the screen already
        where = problem.ctx.command_path if problem.ctx else "fedhelix"
        if isinstance(problem, click.NoSuchOption):
            words = _no_option(problem)
        joint = " See" if words.endswith("?") else "; see"
        _stop(f"{words.rstrip('.')}{joint} `{where} --help`.", 2)
    except (KeyboardInterrupt, click.Abort):
        _stop("stopped.", 130)
    except Exception as problem:
        from fedhelix.engines.blame import culprit, described

        if _is_full(problem) and not os.environ.get(DEBUG):
            _stop(NO_SPACE, 1)
        if os.environ.get(DEBUG) or not (
            culprit(problem) or isinstance(problem, EngineFailure | OSError)
        ):
            raise  # a mistake of ours, or somebody looks for one
        sentence, _, trace = str(problem).partition("\n")
        sentence = sentence if isinstance(problem, EngineFailure) else described(problem)
        hidden = trace or not isinstance(problem, EngineFailure)
        _stop(f"{sentence} (set {DEBUG}=1 for the traceback)" if hidden else sentence, 1)
    else:
        if code == 130:  # typer returns it for Ctrl-C before a command has begun
            _stop("stopped.", 130)
        sys.exit(code if isinstance(code, int) else 0)


def _said_once() -> Callable[..., None]:
    """Prints warnings, each sentence once, however many runs of a comparison it is true of."""
    said: set[str] = set()

    def show(words: object, *_: object, **__: object) -> None:
        if str(words) not in said:
            said.add(str(words))
            print(f"fedhelix: {words}", file=sys.stderr)

    return show


def _no_option(problem: click.NoSuchOption) -> str:
    """An unknown option, with the nearest one or with what other libraries' name for it is here."""
    from fedhelix.core.registry import METHODS, option_names
    from fedhelix.federation.keywords import elsewhere
    from fedhelix.runs.config import Config

    name = problem.option_name.lstrip("-")
    key = name.replace("-", "_")
    known = {flag.lstrip("-"): flag for flag in problem.possibilities or ()}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.62)
    words = f"No such option '{problem.option_name}'"
    where = SETTINGS.get(problem.ctx.command_path, "") if problem.ctx else ""
    if how := where.format(key) if key in Config.names else elsewhere(key):
        return f"{words}; {how}"
    if not close and (
        homes := [name for name, kind in METHODS.items() if key in option_names(kind)]
    ):
        return f"{words}; options of methods are written --set {homes[0]}.{key}=VALUE"
    return f"{words}. Did you mean '{known[close[0]]}'?" if close else words


def _is_full(problem: Exception) -> bool:
    """Whether a file could not be written because there is no space left."""
    return isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)


def _stop(sentence: str, code: int) -> None:
    from fedhelix.deploy.logs import write

    write(sentence, "error")
    sys.exit(code)
