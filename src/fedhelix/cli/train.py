"""`fedhelix run`, `resume`, `compare`, `sweep` and `tune`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhelix.cli.common import (
    AGAIN,
    UNTOUCHED,
    Address,
    EngineName,
    Jobs,
    Json,
    Minutes,
    Out,
    Quiet,
    Track,
    Workers,
    out_option,
    places,
    resumable,
)
from fedhelix.cli.flags import settings
from fedhelix.core.errors import UserError
from fedhelix.report.terminal import show_comparison, show_run, show_table
from fedhelix.report.wording import percent
from fedhelix.runs import comparison, jobs
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import make_spec, make_specs
from fedhelix.runs.sweep import command_of, read_search, read_sweep
from fedhelix.runs.tune import best, tune_all
from fedhelix.store import RUNS
from fedhelix.store.mistakes import longer, runs_in


@settings
def run(
    *,
    method: Annotated[
        str,
        typer.Argument(
            help="A name from `fedhelix methods`, a pair such as genfed+fedau, or your own FILE.py."
        ),
    ],
    out: Out = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
    values: Any,
) -> None:
    """Train one method and keep everything in a run folder.

    METHOD is a name from `fedhelix methods`, or FILE.py with one of your own. Without options it
    trains on scikit-learn's handwritten digits, spread unevenly over 20 clients, in well under a
    minute.
    """
    spec = make_spec(method, values)
    folder = out or jobs.free_folder(
        f"{spec.label}-{Path(spec.config.data).stem}-seed{spec.config.seed}"
    )
    with resumable(folder, new=out is None, older=UNTOUCHED):
        done = jobs.start(spec, folder, quiet=quiet or None, track=track)
    show_run(folder, done.summary, as_json)


def resume(
    folder: Annotated[
        Path, typer.Argument(help="A run folder, or a folder made by `fedhelix compare`.")
    ],
    address: Address = None,
    track: Track = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change the number of rounds (rounds=100), evaluation, or where it runs.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run or a comparison that was stopped; the result is the same as without the stop.

    FOLDER is what `fedhelix run` or `fedhelix compare` made.
    """
    with resumable(folder):
        _check_one_piece(folder)
        if changes and comparison.is_comparison(folder):
            raise UserError("--set changes a single run; start a comparison with other settings.")
        before = _rounds(folder)
        if comparison.is_comparison(folder):
            session = Session(quiet or None, track)
            folders = comparison.resume_comparison(folder, session, places(address=address))
            _note_finished(folder, before, "a longer comparison needs a folder of its own")
            show_comparison(folder, folders, as_json)
            return
        done = jobs.resume(folder, quiet or None, track, address, changes or ())
    how = f"fedhelix resume {shlex.quote(str(folder))} --set rounds={2 * done.state.round}"
    _note_finished(folder, before, longer(done.records, how, done.federation.clients))
    show_run(folder, done.summary, as_json)


def _rounds(folder: Path) -> int:
    """How many rounds of a run, or of all runs of a comparison, are there."""
    names = runs_in(folder) if comparison.is_comparison(folder) else ["."]
    return sum(jobs.rounds_of(folder / name) for name in names)


def _note_finished(folder: Path, before: int, more: str) -> None:
    """Say so where all rounds were there before."""
    if before and _rounds(folder) == before:
        words = f"'{folder}' was finished already, so nothing was trained; {more}"
        print(f"fedhelix: {words}", file=sys.stderr)


def _check_one_piece(folder: Path) -> None:
    """Refuse a folder of trials or of a bench: one of its runs alone is not what was stopped."""
    names, out = runs_in(folder), shlex.quote(str(folder))
    commands = {
        r".*-trial\d+": f"`fedhelix tune FILE --out {out}`",
        r".*-seed\d+-[0-9a-f]{10}": f"`fedhelix bench NAME --out {out}` or `fedhelix leaderboard "
        f"--out {out}`",
    }
    for ending, command in commands.items():
        if names and all(re.fullmatch(ending, name) for name in names):
            raise UserError(
                f"the runs in '{folder}' belong together; continue all of them with the command "
                f"that began them: {command}."
            )


@settings
def compare(
    *,
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="The methods to compare.")
    ],
    seeds: Annotated[int, typer.Option(help="Repetitions, with seeds counted up from --seed.")] = 1,
    out: Out = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
    values: Any,
) -> None:
    """Train several methods on the same clients and cohorts, and show them side by side.

    METHOD is a name from `fedhelix methods`, or FILE.py with one of your own. Options of one method
    are set by its name:

      fedhelix compare fedavg fedprox --set fedprox.mu=0.1 --seeds 3

    METHOD@KEY=VALUE,... is a variant with settings of its own:

      fedhelix compare fedavg fedavg@lr=0.01,epochs=5
    """
    folder = out or jobs.free_folder(
        comparison.name_of([spec.label for spec in make_specs(methods, values)])
    )
    with resumable(folder, new=out is None, older=AGAIN):
        folders = comparison.compare(methods, values, seeds, folder, Session(quiet or None, track))
    show_comparison(folder, folders, as_json)


def sweep(
    file: Annotated[
        Path, typer.Argument(help="A TOML file with methods, seeds, [settings] and [grid].")
    ],
    minutes: Minutes = None,
    jobs: Jobs = 1,
    engine: EngineName = None,
    address: Address = None,
    workers: Workers = None,
    out: Annotated[
        Path | None,
        out_option("The runs' folder (default: runs/sweep-FILE, where the same file goes on)."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every combination of some settings, with several seeds, and show all of them side by
    side.

    FILE says what to run, for example:

      methods = ["fedavg", "genfed"]
      seeds = 3
      [settings]
      rounds = 20
      [grid]
      lr = [0.05, 0.1]
      "genfed.rho_max" = [3, 5]

    The same command goes on where it was stopped, and leaves out what is finished.
    """
    grid, folder = read_sweep(file), out or RUNS / f"sweep-{file.stem}"
    with resumable(folder, older=AGAIN):
        session = Session.limited(minutes, quiet or None, jobs)
        values = grid.settings | places(engine=engine, address=address, workers=workers)
        folders = comparison.compare(grid.methods, values, grid.seeds, folder, session)
    if len([one for one in folders if one.summary]) < len(grid.methods) * grid.seeds:
        print(f"fedhelix: the time is up; {AGAIN}", file=sys.stderr)
    if folders:
        show_comparison(folder, folders, as_json)


def tune(
    file: Annotated[
        Path, typer.Argument(help="A TOML file with methods, trials, [settings], [grid], [range].")
    ],
    minutes: Minutes = None,
    engine: EngineName = None,
    out: Annotated[
        Path | None,
        out_option("The runs' folder (default: runs/tune-FILE, where the same file goes on)."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for the settings with which each method is best on validation data, with Optuna.

    FILE says what to try, for example:

      methods = ["fedavg", "fedprox"]
      trials = 20
      [settings]
      rounds = 20
      [grid]
      epochs = [1, 2, 5]
      [range]
      lr = { low = 0.001, high = 1.0, log = true }
      "fedprox.mu" = { low = 0.0, high = 1.0 }

    Every method has equally many trials; lists alone are tried once each. A trial that is worse
    than most others were at the same round ends early. The same command goes on where it was
    stopped.
    """
    search, folder = read_search(file), out or RUNS / f"tune-{file.stem}"
    search = replace(search, settings=search.settings | places(engine=engine))
    try:
        trials = tune_all(search, folder, Session.limited(minutes, quiet or None))
    except KeyboardInterrupt:
        print(f"stopped; {AGAIN}", file=sys.stderr)
        raise SystemExit(130) from None
    if len(trials) < sum(map(search.trials_of, search.methods)):
        print(f"fedhelix: the time is up; {AGAIN}", file=sys.stderr)
    found = best(trials)
    if as_json:
        rows = [
            {"spec": one.spec, "valid": one.best, **vars(one)}
            | {"command": command_of([one.spec], search.settings)}
            for one in found.values()
        ]
        print(json.dumps(rows, indent=2))
        return
    cells = [
        [
            method,
            str(sum(t.method == method for t in trials)),
            percent(one.best) if one.metric == "accuracy" else f"{one.best:.4f}",
            str(one.best_round),
        ]
        for method, one in found.items()
    ]
    show_table(["method", "trials", "validation", "in round"], cells)
    # Plain `print`, so that a setting stays whole and can be copied.
    if found:
        print("\nThe best setting of each, with all that was set for the search:")
        print(command_of([one.spec for one in found.values()], search.settings))
    print(f"\ntrials: {folder}")
