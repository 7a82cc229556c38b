"""`fedhelix bench`: the papers' experiments."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console

from fedhelix.cli.common import (
    AGAIN,
    Address,
    EngineName,
    Jobs,
    Json,
    Minutes,
    Quiet,
    Workers,
    places,
)
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.files import remove_leftovers, writable_file, write_atomically
from fedhelix.report.columns import screen
from fedhelix.report.terminal import listing
from fedhelix.runs.comparison import check_seeds
from fedhelix.runs.jobs import is_begun

if TYPE_CHECKING:
    from fedhelix.papers import Scale
    from fedhelix.papers.options import BenchOptions
    from fedhelix.papers.study import Study

Seeds = Annotated[
    int | None, typer.Option(help="Repetitions (default: the usual number at this scale).")
]
RunsFolder = Annotated[
    Path, typer.Option("--out", "-o", help="Where the runs are; finished ones are not run again.")
]
Save = Annotated[
    Path | None,
    typer.Option(
        help="Folder for NAME-SCALE.json (default: the one of the runs). A file that is there "
        "keeps its cells and seeds; new runs are added to it."
    ),
]
DataDir = Annotated[str | None, typer.Option(help="Folder with the data sets.")]
DeviceName = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Commit = Annotated[str, typer.Option(help="The commit to record where git is not installed.")]


def bench(  # noqa: PLR0913 - one for every flag
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Tables and figures to run; without any, a list of all."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="quick (a CPU, minutes, on the small data set digits instead of the paper's), gpu "
            "(smaller than the paper) or paper."
        ),
    ] = "quick",
    seeds: Seeds = None,
    first_seed: Annotated[
        int, typer.Option(help="Run only this seed and later ones, to extend a result.")
    ] = 0,
    minutes: Minutes = None,
    jobs: Jobs = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this row or column. May be repeated: these rows in these columns."),
    ] = None,
    out: RunsFolder = Path("runs/bench"),
    save: Save = None,
    data_dir: DataDir = None,
    device: DeviceName = "auto",
    engine: EngineName = None,
    address: Address = None,
    workers: Workers = None,
    commit: Commit = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's experiment and print our figures beside the paper's.

    NAME is a table or figure; `fedhelix bench` lists them. Runs are kept, so the same command goes
    on where it stopped, and tables with common runs share them:

      fedhelix bench genfed-table2 --scale quick
    """
    from fedhelix.papers import STUDIES
    from fedhelix.papers.figures import figure
    from fedhelix.papers.study import run_studies
    from fedhelix.report import style

    console = screen()
    if not names:
        _list_studies(console)
        return
    chosen = _checked_scale(scale)
    for name in names:
        if name not in STUDIES:
            raise unknown("study", name, STUDIES)
    studies = [STUDIES[name] for name in dict.fromkeys(names)]
    where = places(
        device=device, data_dir=data_dir, engine=engine, address=address, workers=workers
    )
    files = [f"{study.name}-{scale}.json" for study in studies]
    options = checked_options(
        out, save, where, seeds, commit, files=files, only=only, minutes=minutes, jobs=jobs,
        quiet=quiet,
    )  # fmt: skip
    try:
        reports, done = run_studies(studies, chosen, options, first_seed)
    except KeyboardInterrupt:
        print(f"stopped; {AGAIN}", file=sys.stderr)
        raise SystemExit(130) from None
    for number, report in enumerate(reports):
        name = report["bench"]
        usual = None if seeds else STUDIES[name].seeds[chosen]
        command = f"fedhelix bench {name} --scale {scale}{repetitions(report, usual)}"
        reports[number] = report = {"command": command, **report}
        path = (save or out) / f"{name}-{scale}.json"
        write_report(report, path)
        if (drawing := figure(report)) is not None:
            style.save(drawing, path.with_suffix(".png"))
        if not as_json:
            _print(report, only or [], console)
            if why := _why_no_paper(STUDIES[name], chosen):
                console.print(f"{why}\n", soft_wrap=True)
    if as_json:
        print(json.dumps(reports if len(reports) > 1 else reports[0], indent=2))
    if not done:
        print(f"fedhelix: the time is up; {AGAIN}", file=sys.stderr)


def _list_studies(console: Console) -> None:
    from fedhelix.papers import STUDIES

    table = listing("study", "what it is")
    for study in STUDIES.values():
        table.add_row(study.name, study.title)
    console.print(table)


def _checked_scale(scale: str) -> Scale:
    from fedhelix.papers import Scale

    for known in get_args(Scale):
        if scale == known:
            return known
    raise unknown("scale", scale, get_args(Scale))


def checked_options(
    out: Path,
    save: Path | None,
    where: Mapping[str, str],
    seeds: int | None,
    commit: str,
    *,
    files: Sequence[str],
    only: Sequence[str] | None,
    quiet: bool,
    **more: Any,
) -> BenchOptions:
    """The options of a bench or leaderboard; refuses seeds, a commit, a folder or result `files`
    that cannot be meant.
    """
    from fedhelix.papers.options import BenchOptions

    if seeds is not None:
        check_seeds(seeds)
    if commit and not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise UserError(f"--commit takes seven to forty hexadecimal digits, not '{commit}'.")
    if is_begun(out):
        raise UserError(f"'{out}' is a run itself; choose a folder for the runs of a bench.")
    results = save or out
    writable_file(*(results / file for file in files))
    return BenchOptions(
        out=out,
        overrides=where,
        seeds=seeds,
        only=only or (),
        quiet=quiet or None,
        results=results,
        commit=commit,
        **more,
    )


def repetitions(report: Mapping[str, Any], usual: int | None) -> str:
    """The option that makes all seeds of a report, unless they are as many as usual."""
    count = max(report["seeds"]) + 1
    return "" if count == usual else f" --seeds {count}"


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a result file."""
    remove_leftovers(path.parent, path.name, f"{path.stem}.png")
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())


def _why_no_paper(study: Study, scale: Scale) -> str:
    """Why the table of a scale has no numbers of a paper; empty where it may have some."""
    ours, theirs = study.data(scale), study.data("paper")
    if set(ours) & set(theirs):
        return ""
    return (
        f"Scale {scale} trains on {', '.join(ours)}, scale paper on {', '.join(theirs)}; so no "
        "numbers of a paper stand beside ours."
    )


def _print(report: Mapping[str, Any], only: list[str], console: Console) -> None:
    from fedhelix.papers.options import are_wanted
    from fedhelix.papers.tables import render

    places = [(cell["row"].lower(), cell["column"].lower()) for cell in report["cells"]]
    wanted = are_wanted(places, {name.lower() for name in only})
    cells = list(itertools.compress(report["cells"], wanted))
    for measure in report["measures"]:
        console.print(render({**report, "cells": cells}, measure, console.width))
        console.print()
