"""`fedhelix methods`, `data` and `models`: what there is."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedhelix import models
from fedhelix.cli.common import Json
from fedhelix.core.docs import details, summary
from fedhelix.core.errors import UserError
from fedhelix.core.options import build
from fedhelix.core.registry import METHODS, is_wrapper, resolve
from fedhelix.data import available
from fedhelix.methods import FedAvg
from fedhelix.report.terminal import console, listing, show_table
from fedhelix.runs.config import Config

FEW_CLASSES = 20  # up to so many, a table shows each
SHOWN_CLASSES = 3  # of more than that


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="One method, or a pair such as genfed+fedau, with all its options."),
    ] = None,
    as_json: Json = False,
) -> None:
    """The methods, each in one line; with NAME one of them, its options and its paper."""
    chosen = {kind.name: kind for kind in resolve(name)} if name else dict(sorted(METHODS.items()))
    facts = {key: _describe(kind) for key, kind in chosen.items()}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    if name is None:
        width = max(map(len, facts))
        for around, title in ((False, "method"), (True, "around a method")):
            table = listing(title.ljust(width), "what it is")
            for key, fact in facts.items():
                if is_wrapper(chosen[key]) is around:
                    table.add_row(key, escape(fact["what"]))
            console.print(table)
            console.print()
        console.print(
            "Those around a method, defences among them, are written NAME+METHOD. "
            "`fedhelix methods NAME` shows the options of one.",
            highlight=False,
        )
        return
    for key, fact in facts.items():
        console.print(f"[bold cyan]{key}[/]  {fact['what']}", highlight=False)
        for paragraph in fact["details"]:
            console.print(escape(paragraph), highlight=False)
        paper = fact["paper"]
        source = "a method of this library" if paper == "fedhelix" else f"paper: {escape(paper)}"
        if paper:
            console.print(f"[dim]{source}[/]", highlight=False)
        table = listing("option and default", "what it is")
        for option, detail in fact["options"].items():
            table.add_row(f"method.{option} = {detail['default']}", escape(detail["meaning"]))
        if table.row_count:
            console.print(table)


def _describe(kind: type) -> dict[str, Any]:
    fields = [field for field in dataclasses.fields(kind) if field.init and field.name != "inner"]
    hints = typing.get_type_hints(kind)
    options = {}
    for field in fields:
        choices = (
            typing.get_args(hints[field.name])
            if typing.get_origin(hints[field.name]) is typing.Literal
            else ()
        )
        meaning = field.metadata.get("meaning", "") + (
            f" ({' | '.join(map(str, choices))})" if choices else ""
        )
        options[field.name] = {
            "default": "auto" if field.default is None else field.default,
            "meaning": meaning,
        }
    return {
        "what": summary(kind),
        "details": details(kind),
        "paper": getattr(kind, "paper", ""),
        "options": options,
    }


def data(
    name: Annotated[
        str | None, typer.Argument(help="Show what each client gets of this data set or FILE.npz.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Look in this folder first.")] = None,
    partition: Annotated[str | None, typer.Option(help="Who owns what, as in a run.")] = None,
    shift: Annotated[str | None, typer.Option(help="How groups of clients differ.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients.")] = None,
    seed: Annotated[int | None, typer.Option(help="As in a run.")] = None,
    as_json: Json = False,
) -> None:
    """Which data sets are here, and how to get the others.

    With NAME: who gets what of one of them.
    """
    given = {"partition": partition, "shift": shift, "clients": clients, "seed": seed}
    chosen = {key: value for key, value in given.items() if value is not None}
    if name is not None:
        _show_clients({"data": name, "data_dir": data_dir and str(data_dir), **chosen}, as_json)
        return
    if chosen:
        raise UserError(f"--{next(iter(chosen))} needs the name of a data set, such as digits.")
    data_sets = available(data_dir)
    if as_json:
        rows = [dataclasses.asdict(item) for item in data_sets]
        print(json.dumps(rows, indent=2, default=str))
        return
    table = listing("data set", "here", "where, or how to get it")
    for item in data_sets:
        table.add_row(
            item.name,
            "[green]yes[/]" if item.found else "[yellow]no[/]",
            escape(str(item.found or item.how)),
        )
    console.print(table)


def _show_clients(settings: dict[str, Any], as_json: bool) -> None:
    """The clients of a federation with these settings: their samples, classes and shifts."""
    config = build(Config, settings | {"engine": "serial", "kernels": "native"}, "a federation")
    census = config.federation(FedAvg()).census()
    if as_json:
        print(json.dumps(census, indent=2))
        return
    columns = {
        "client": census.get("names", range(len(census["samples"]))),
        "training samples": census["samples"],
        **_class_columns(census.get("classes", ()), census.get("class_names", ())),
        "shift": census.get("shift", ()),
    }
    shown = {title: column for title, column in columns.items() if len(column)}
    rows = zip(*shown.values(), strict=True)
    show_table(list(shown), [[str(value) for value in row] for row in rows])


def _class_columns(counts: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, list[str]]:
    """What clients have of each class; of many classes how many they have, and the largest."""
    called = dict(enumerate(names))
    if names and len(names) <= FEW_CLASSES:
        titled = [zip(names, row, strict=True) for row in counts]
        return {"of each class": [", ".join(f"{k}: {n}" for k, n in row) for row in titled]}
    if not counts or len(counts[0]) <= FEW_CLASSES:
        return {"of each class": [" ".join(map(str, row)) for row in counts]}
    held = [[(-size, place) for place, size in enumerate(row) if size] for row in counts]
    largest = [sorted(row)[:SHOWN_CLASSES] for row in held]
    return {
        "classes": [f"{len(row)} of {len(counts[0])}" for row in held],
        "largest classes (class: samples)": [
            ", ".join(f"{called.get(place, place)}: {-size}" for size, place in row)
            for row in largest
        ],
    }


def show_models() -> None:
    """The networks by name."""
    table = listing("model", "what it is")
    for name, words in models.describe().items():
        table.add_row(name, words)
    console.print(table)
