"""`fedhelix bench`: studies on the command line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.table import Table

from fedhelix.errors import BadInput, unknown
from fedhelix.papers import STUDIES, Scale
from fedhelix.papers.pictures import picture
from fedhelix.papers.study import run_studies
from fedhelix.papers.tables import render
from fedhelix.report import style
from fedhelix.runs.forks import is_begun
from fedhelix.runs.jobs import check_seeds
from fedhelix.tree import writable, write_atomically


def bench(
    names: Sequence[str],
    scale: str,
    seeds: int | None,
    minutes: float | None,
    only: Sequence[str],
    out: Path,
    save: Path,
    data_dir: str | None,
    device: str,
    commit: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run studies as one, and write and print what came out."""
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if not names:
        table = Table("study", "what it is", box=None, padding=(0, 2))
        for study in STUDIES.values():
            table.add_row(study.name, study.title)
        console.print(table)
        return
    if scale not in get_args(Scale):
        raise unknown("scale", scale, get_args(Scale))
    for name in names:
        if name not in STUDIES:
            raise unknown("study", name, STUDIES)
    if seeds is not None:
        check_seeds(seeds)
    if commit and not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise BadInput(f"--commit takes seven to forty hexadecimal digits, not '{commit}'.")
    if is_begun(out):
        raise BadInput(f"'{out}' is a run itself; choose a folder for the runs of a bench.")
    writable(save)
    more = {"device": device} | ({"data_dir": data_dir} if data_dir else {})
    studies = [STUDIES[name] for name in dict.fromkeys(names)]
    try:
        reports, done = run_studies(studies, cast(Scale, scale), out, more, seeds, minutes, only, quiet or None)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was.", file=sys.stderr)
        raise SystemExit(130) from None
    told = []
    for report in reports:
        name = report["bench"]
        report["versions"] |= {"commit": commit} if commit else {}
        command = f"fedhelix bench {name} --scale {scale}" + (f" --seeds {seeds}" if seeds else "")
        report = {"command": command, **report}
        told.append(report)
        place = save / f"{name}-{scale}.json"
        if (known := _runs_in(place)) > _runs_of(report):
            words = f"'{place}' was made of {known} runs, more than there are in '{out}'; it stays as it is."
            print(f"fedhelix: {words}", file=sys.stderr)
        else:
            write_atomically(place, (json.dumps(report, indent=1) + "\n").encode())
            if (figure := picture(report)) is not None:
                style.save(figure, place.with_suffix(".png"))
        asked = [cell for cell in report["cells"] if not only or cell["row"] in only or cell["column"] in only]
        for measure in report["measures"] if not as_json else ():
            console.print(render({**report, "cells": asked}, measure))
            console.print()
    if as_json:
        print(json.dumps(told if len(told) > 1 else told[0], indent=2))
    if not done:
        print("fedhelix: the time is up; the same command goes on where it stopped.", file=sys.stderr)


def _runs_of(report: Mapping[str, Any]) -> int:
    return sum(cell["runs"] for cell in report["cells"])


def _runs_in(path: Path) -> int:
    """How many runs an earlier result was made of; a file that is no result counts for nothing."""
    try:
        return _runs_of(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return 0
