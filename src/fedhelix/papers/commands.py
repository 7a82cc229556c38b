"""`fedhelix bench`: studies on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from rich.console import Console
from rich.table import Table

from fedhelix.errors import BadInput, unknown
from fedhelix.papers import STUDIES, Scale
from fedhelix.papers.pictures import picture
from fedhelix.papers.study import run_studies
from fedhelix.papers.tables import render
from fedhelix.report import style
from fedhelix.tree import write_atomically


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
    if seeds is not None and seeds < 1:
        raise BadInput(f"seeds must be at least 1, not {seeds}.")
    more = {"device": device} | ({"data_dir": data_dir} if data_dir else {})
    studies = [STUDIES[name] for name in dict.fromkeys(names)]
    try:
        reports = run_studies(studies, cast(Scale, scale), out, more, seeds, minutes, only, quiet or None)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was.", file=sys.stderr)
        raise SystemExit(130) from None
    for report in reports:
        name = report["bench"]
        report["versions"] |= {"commit": commit} if commit else {}
        command = f"fedhelix bench {name} --scale {scale}" + (f" --seeds {seeds}" if seeds else "")
        report = {"command": command, **report}
        save.mkdir(parents=True, exist_ok=True)
        write_atomically(save / f"{name}-{scale}.json", (json.dumps(report, indent=1) + "\n").encode())
        if (figure := picture(report)) is not None:
            style.save(figure, save / f"{name}-{scale}.png")
        if as_json:
            print(json.dumps(report, indent=2))
            continue
        for measure in report["measures"]:
            console.print(render(report, measure))
            console.print()
    if not all(report["complete"] for report in reports):
        print("fedhelix: the time is up; the same command goes on where it stopped.", file=sys.stderr)
