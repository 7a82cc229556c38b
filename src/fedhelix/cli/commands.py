"""All commands by name. Their modules import PyTorch, so each is imported when its command runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from threading import Event
from typing import Any, NamedTuple

import click
import typer
from typer.core import TyperGroup

from fedhelix.cli.pages import App
from fedhelix.core.compiler import compile_ahead
from fedhelix.core.options import convert


class Entry(NamedTuple):
    """Where a command is, and the first sentence of its help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "run": Entry("train", "run", "Train one method and keep everything in a run folder."),
    "resume": Entry(
        "train",
        "resume",
        "Continue a run or a comparison that was stopped; the result is the same as without the "
        "stop.",
    ),
    "compare": Entry(
        "train",
        "compare",
        "Train several methods on the same clients and cohorts, and show them side by side.",
    ),
    "sweep": Entry(
        "train",
        "sweep",
        "Run every combination of some settings, with several seeds, and show all of them side by "
        "side.",
    ),
    "tune": Entry(
        "train",
        "tune",
        "Search for the settings with which each method is best on validation data, with Optuna.",
    ),
    "bench": Entry(
        "bench", "bench", "Run a paper's experiment and print our figures beside the paper's."
    ),
    "leaderboard": Entry(
        "leaderboard",
        "leaderboard",
        "Rank methods over data sets and kinds of heterogeneity.",
    ),
    "audit": Entry(
        "audit",
        "audit",
        "What an attacker can learn from uploads and models; or check an audit log.",
    ),
    "methods": Entry(
        "catalog",
        "methods",
        "The methods, each in one line; with NAME one of them, its options and its paper.",
    ),
    "data": Entry("catalog", "data", "Which data sets are here, and how to get the others."),
    "models": Entry("catalog", "show_models", "The networks by name."),
    "doctor": Entry(
        "doctor",
        "doctor",
        "What is installed, which engine and kernels run here, and which data are at hand.",
    ),
    "up": Entry(
        "deploy",
        "up",
        "Start a server and some sites on this machine, with TLS and keys; Ctrl-C stops "
        "everything.",
    ),
    "site": Entry(
        "site",
        "sites",
        "Run one site with its own data, for as long as the server has work for it.",
    ),
    "plot": Entry("report", "plot", "Draw every figure that the runs allow."),
    "report": Entry(
        "report",
        "report",
        "Write a report: one HTML file that opens without a network, or Markdown or a LaTeX table "
        "for papers.",
    ),
    "export": Entry(
        "report",
        "export",
        "Write the records of runs as one flat table, a row per round, for other programs.",
    ),
    "serve": Entry(
        "report", "serve", "Show runs in the browser and follow those that are going on."
    ),
    "deploy": Entry("deploy", "commands", "Train across real machines, on Flower."),
}

# What people try, and the command that does it.
OTHER_NAMES = {"dashboard": "serve", "ui": "serve", "train": "run", "continue": "resume"}

# Settings that are numbers: a word in their place is refused before PyTorch is imported.
NUMBERS: dict[Any, str] = {
    int: "epochs batch_size newcomers rounds eval_every checkpoint_every seed",
    int | None: "clients cohort eval_clients train_samples test_samples newcomers_after "
    "newcomers_samples workers",
    float: "lr momentum weight_decay supplement_size supplement_below participation_alpha "
    "newcomers_classes device_speed device_upload device_download availability over_select "
    "attack_share valid",
    float | None: "validation_size deadline target attack_scale",
}
WITH_SETTINGS = (["run"], ["compare"], ["deploy", "run"])
TRAINING = {"run", "resume", "compare", "sweep", "tune", "bench", "leaderboard"}


class LazyGroup(TyperGroup):
    """A group whose help needs names and sentences alone; what runs is loaded."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The loaded command that the arguments name."""
        if (meant := OTHER_NAMES.get(args[0])) is not None:
            raise click.UsageError(f"No such command '{args[0]}'. Did you mean '{meant}'?", ctx)
        name, named, rest = super().resolve_command(ctx, args)
        if any([name, *rest][: len(words)] == words for words in WITH_SETTINGS):
            check_numbers(rest)
        if name in TRAINING and rest and not {"-h", "--help"} & set(rest):
            compile_ahead()
        return name, load(name) if name in COMMANDS else named, rest


def check_numbers(arguments: list[str]) -> None:
    """Raise UserError where a setting that is a number has another value."""
    for given, following in zip_longest(arguments, arguments[1:]):
        flag, is_one, value = given.partition("=")
        for kind, names in NUMBERS.items():
            setting = flag.removeprefix("--").replace("-", "_")
            text = value if is_one else following
            if flag.startswith("--") and setting in names.split() and text is not None:
                convert(setting, text, kind)


def load(name: str) -> click.Command:
    """The command or group of that name, from its module."""
    entry = COMMANDS[name]
    with _deferred_ctrl_c():
        module = import_module(f"fedhelix.cli.{entry.module}")
    found = getattr(module, entry.function)
    if not isinstance(found, typer.Typer):
        alone = App(add_completion=False, rich_markup_mode="rich")
        alone.command(name)(found)
        found = alone
    return typer.main.get_command(found)


@contextmanager
def _deferred_ctrl_c() -> Iterator[None]:
    """Ctrl-C takes effect at the end: in the middle of its import PyTorch may abort."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = Event()
    signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed.is_set():
        raise KeyboardInterrupt
