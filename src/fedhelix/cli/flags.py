"""Settings as flags of a command: one for every field of `Config`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhelix.cli.common import OUTPUT
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.registry import is_known
from fedhelix.runs.config import Config, layered
from fedhelix.runs.presets import PRESETS
from fedhelix.runs.spec import groups_of, option_keys

# The panels of a help page, with the flags that are used most first; all others are in the last.
PANELS = {
    "Data": "data clients partition shift standardize model valid data_dir train_samples "
    "test_samples",
    "Federation": "rounds cohort seed participation client_weights newcomers newcomers_after",
    "Training": "epochs batch_size lr lr_decay momentum weight_decay optimizer augment sampler "
    "precision",
    "Engine": "engine device workers address kernels",
    OUTPUT: "eval_every eval_clients eval_trained checkpoint_every client_state",
}
REST = "Advanced"
ORDER = " ".join(PANELS.values()).split()


def _panel(name: str) -> str:
    return next((panel for panel, names in PANELS.items() if name in names.split()), REST)


def _place(field: dataclasses.Field[Any]) -> int:
    return ORDER.index(field.name) if field.name in ORDER else len(ORDER)


def _metavar(kinds: Sequence[Any]) -> str:
    """What stands for the value of a flag in its help: X,... where it may be a list of numbers."""
    word = {int: "N", float: "X"}.get(kinds[0], "TEXT")
    return f"{word}[,...]" if any(typing.get_origin(kind) is tuple for kind in kinds) else word


# Flags for options of methods with differential privacy.
BUDGET = {"epsilon": "method.epsilon", "delta": "method.delta"}
BUDGET_HELP = "Privacy budget of private and dp-sgd: the same as --set {}=X."


def settings(command: Callable[..., None], hidden: Collection[str] = ()) -> Callable[..., None]:
    """Give a command a flag for every field of `Config`, and --config, --preset and --set; it gets
    them as `values`. Those that it refuses can be hidden from its help.
    """
    notes = typing.get_type_hints(command, include_extras=True)
    given = [p for p in inspect.signature(command).parameters.values() if p.name != "values"]
    fixed = [p.replace(annotation=notes[p.name]) for p in given]
    hints = typing.get_type_hints(Config)
    flags = []
    for field in sorted(dataclasses.fields(Config), key=_place):
        default = "auto" if field.default is None else field.default
        meaning = field.metadata["meaning"]
        words = sentence(meaning) + _unnamed(meaning, hints[field.name])
        words += (
            "."
            if "(auto:" in words or "(none:" in words
            else f" (default: {str(default).lower()})."
        )
        name = "--" + field.name.replace("_", "-")
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        # Text: one place alone reads and checks values.
        kind: Any = bool if bool in kinds else str
        both = f"{name}/--no{name[1:]}" if kind is bool else name
        metavar = None if kind is bool else _metavar(kinds)
        note = typer.Option(
            both,
            help=words,
            metavar=metavar,
            show_default=False,
            hidden=field.name in hidden,
            rich_help_panel=_panel(field.name),
        )
        flags.append(_parameter(field.name, kind | None, note))
    extra = [
        _parameter(
            "config",
            Path | None,
            typer.Option(help="Settings from a TOML file, such as a run's config.toml."),
        ),
        _parameter(
            "preset",
            str | None,
            typer.Option(metavar="NAME", help=f"Settings of a paper: {', '.join(PRESETS)}."),
        ),
        _parameter(
            "set",
            list[str] | None,
            typer.Option(metavar="KEY=VALUE", help="Any setting, or a method's: fedprox.mu=0.1."),
        ),
        *(
            _parameter(name, str | None, typer.Option(metavar="X", help=BUDGET_HELP.format(key)))
            for name, key in BUDGET.items()
        ),
    ]
    names = [flag.name for flag in flags]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in names}
        budget = {name: given.pop(name) for name in BUDGET}
        budget = {name: value for name, value in budget.items() if value is not None}
        _check_budget(budget, given.get("methods") or [given["method"]])
        assigned = [f"{BUDGET[name]}={value}" for name, value in budget.items()]
        assigned += given.pop("set") or []
        values = layered(given.pop("preset"), given.pop("config"), chosen, assigned)
        _check_groups(assigned, given.get("methods") or [given["method"]])
        command(**given, values=values)

    # Panels appear in the order of their first flag: settings by use, output before the rest.
    usual = [flag for flag in flags if _panel(flag.name) != REST]
    parameters = [*fixed[:1], *extra, *usual, *fixed[1:], *flags[len(usual) :]]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def sentence(meaning: str) -> str:
    """A meaning with a capital letter, unless it begins with a value such as `cpu`."""
    value = re.match(r"\w+[,:]", meaning)
    return meaning if value else f"{meaning[0].upper()}{meaning[1:]}"


def _unnamed(meaning: str, hint: Any) -> str:
    """The values that a setting may have, unless its meaning names them."""
    kinds = [hint, *typing.get_args(hint)]
    values = [
        str(value)
        for kind in kinds
        if typing.get_origin(kind) is typing.Literal
        for value in typing.get_args(kind)
    ]
    named = all(re.search(rf"\b{re.escape(value)}\b", meaning) for value in values)
    return "" if named else f" ({', '.join(values)})"


def _check_groups(assigned: Sequence[str], specs: Sequence[str]) -> None:
    """Refuse an option that was set by hand for a method that does not run; a preset may hold such
    ones.
    """
    groups = {group for spec in specs for group in groups_of(spec)}
    for text in assigned:
        group, dot, option = text.partition("=")[0].strip().partition(".")
        if dot and is_known(group) and group not in groups:
            names = [key.partition(".")[2] for key in option_keys([group])]
            if option not in names:
                raise unknown(f"option of {group}, which does not run here:", option, names)
            raise UserError(f"--set {text} is an option of {group}, which does not run here.")


def _check_budget(budget: Mapping[str, str], specs: Sequence[str]) -> None:
    """Refuse --epsilon or --delta where some of the methods alone have one, and say which."""
    for name, value in budget.items():
        homes = [key for key in option_keys(specs) if key.partition(".")[2] == name]
        for spec in specs:
            if homes and not set(homes) & set(option_keys([spec])):
                how = " ".join(f"--set {key}={value}" for key in homes)
                raise UserError(f"{spec} has no option {name}; write {how}.")


def _parameter(name: str, kind: Any, note: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, note]
    )
