"""`fedhelix leaderboard`: methods, settings and seeds, with a search of equal size for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console

from fedhelix.cli.bench import (
    Commit,
    DataDir,
    DeviceName,
    RunsFolder,
    Save,
    Seeds,
    checked_options,
    repetitions,
    write_report,
)
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
from fedhelix.core.errors import unknown
from fedhelix.report.columns import screen, tabulate

if TYPE_CHECKING:
    from fedhelix.papers.leaderboard.settings import BoardScale


def leaderboard(  # noqa: PLR0913 - one for every flag
    *,
    scale: Annotated[str, typer.Option(help="quick (a CPU, an hour) or gpu.")] = "quick",
    seeds: Seeds = None,
    minutes: Minutes = None,
    jobs: Jobs = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this method or setting. May be repeated: these methods in these settings."
        ),
    ] = None,
    out: RunsFolder = Path("runs/leaderboard"),
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
    """Rank methods over data sets and kinds of heterogeneity.

    Every method tries equally many settings, which validation samples compare; the best are run
    with all seeds. Runs are kept, so the same command goes on where it stopped:

      fedhelix leaderboard --scale quick --minutes 30
    """
    from fedhelix.papers.leaderboard import SEEDS, draw, run_leaderboard
    from fedhelix.report import style

    chosen = _checked_scale(scale)
    where = places(
        device=device, data_dir=data_dir, engine=engine, address=address, workers=workers
    )
    file = f"leaderboard-{scale}.json"
    options = checked_options(
        out, save, where, seeds, commit, files=[file], only=only, minutes=minutes, jobs=jobs,
        quiet=quiet,
    )  # fmt: skip
    try:
        report, done = run_leaderboard(chosen, options)
    except KeyboardInterrupt:
        print(f"stopped; {AGAIN}", file=sys.stderr)
        raise SystemExit(130) from None
    usual = None if seeds else SEEDS[chosen]
    command = f"fedhelix leaderboard --scale {scale}{repetitions(report, usual)}"
    report = {"command": command, **report}
    path = (save or out) / file
    write_report(report, path)
    for name, drawing in draw(report).items():
        style.save(drawing, path.with_name(f"{path.stem}-{name}.png"))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, screen())
    if not done:
        print(f"fedhelix: the time is up; {AGAIN}", file=sys.stderr)


def _checked_scale(scale: str) -> BoardScale:
    from fedhelix.papers.leaderboard.settings import BoardScale

    for known in get_args(BoardScale):
        if scale == known:
            return known
    raise unknown("scale", scale, get_args(BoardScale))


def _print(report: Mapping[str, Any], console: Console) -> None:
    from fedhelix.papers.tables import render

    console.print(render(report, "accuracy", console.width))
    if report["ranking"] is None:
        console.print("No ranks yet: no setting is complete.")
        return
    rows = []
    ranked = report["ranking"]["rows"].items()
    for name, row in sorted(ranked, key=lambda known: known[1]["rank"]):
        low, high = row["interval"]
        rows.append([name, f"{row['rank']:.2f}", f"{low:.2f} to {high:.2f}"])
    console.print()
    console.print(tabulate(["method", "mean rank", "95 % interval"], rows, console.width))
