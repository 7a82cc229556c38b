"""The command line. Commands that look at runs come from `report`, those for real machines from `deploy`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
import typing
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.markup import escape
from rich.table import Table

from fedhelix import METHODS, __version__, models
from fedhelix.blame import culprit, described
from fedhelix.data import available
from fedhelix.deploy import commands as sites
from fedhelix.deploy import submit
from fedhelix.errors import BadInput, EngineFailure
from fedhelix.registry import layers
from fedhelix.report import commands as views
from fedhelix.report.terminal import console, show_comparison, show_run
from fedhelix.runs import jobs
from fedhelix.runs.config import make_plan, make_plans
from fedhelix.runs.flags import settings
from fedhelix.runs.sweep import read_sweep
from fedhelix.store import RUNS, RunFolder

app = typer.Typer(
    name="fedhelix",
    help="Federated learning on clients whose data differ: train, compare and understand.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEBUG = "FEDHELIX_DEBUG"  # set: exceptions in a method's hooks come with their traceback

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]
Track = Annotated[str | None, typer.Option(help="Write every round there too: tensorboard or mlflow.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run folder itself (default: a new one in runs/).")]


@app.command()
@settings
def run(
    *,
    method: Annotated[
        str, typer.Argument(help="A name from `fedhelix methods`, a pair such as genfed+fedau, or your own FILE.py.")
    ],
    out: Out = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
    values: Any,
) -> None:
    """Train one method and keep everything in a run folder.

    METHOD is a name from `fedhelix methods`, or FILE.py with one of your own. Without options it trains on
    scikit-learn's handwritten digits, spread unevenly over 20 clients, in well under a minute.
    """
    plan = make_plan(method, values)
    folder = out or jobs.free_folder(f"{plan.label}-{Path(plan.config.data).stem}-seed{plan.config.seed}")
    with resumable(folder, new=out is None):
        done = jobs.start(plan, folder, quiet=quiet or None, track=track)
    show_run(folder, done.summary, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder made by `fedhelix compare`.")],
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run or a comparison that was stopped; the result is the same as without the stop.

    FOLDER is what `fedhelix run` or `fedhelix compare` made.
    """
    with resumable(folder):
        if jobs.is_comparison(folder):
            show_comparison(folder, jobs.resume_comparison(folder, quiet or None, track), as_json)
            return
        if RunFolder.open(folder).rounds_saved == 0:
            print("fedhelix: there is no checkpoint; the run starts again from its first round.", file=sys.stderr)
        done = jobs.resume(folder, quiet=quiet or None, track=track)
    show_run(folder, done.summary, as_json)


@app.command()
@settings
def compare(
    *,
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Two or more methods.")],
    seeds: Annotated[int, typer.Option(help="Repetitions, with seeds counted up from --seed.")] = 1,
    out: Out = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
    values: Any,
) -> None:
    """Train several methods on the same clients and cohorts, and show them side by side.

    METHOD is a name from `fedhelix methods`, or FILE.py with one of your own. Options of one method are set by its
    name:  fedhelix compare fedavg fedprox --set fedprox.mu=0.1 --seeds 3

    METHOD@KEY=VALUE,... is a variant with settings of its own:  fedhelix compare fedavg fedavg@lr=0.01,epochs=5
    """
    folder = out or jobs.free_folder("compare-" + "-".join(plan.label for plan in make_plans(methods, values))[:60])
    with resumable(folder, new=out is None):
        folders = jobs.compare(methods, values, seeds, folder, quiet or None, track=track)
    show_comparison(folder, folders, as_json)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with methods, seeds, [settings] and [grid].")],
    minutes: Annotated[float | None, typer.Option(help="Stop after this time; the same command goes on later.")] = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every combination of some settings, with several seeds, and show all of them side by side.

    FILE says what to run. The same command goes on where it was stopped, and leaves out what is finished:

      methods = ["fedavg", "genfed"]
      seeds = 3
      [settings]
      rounds = 20
      [grid]
      lr = [0.05, 0.1]
      "genfed.rho_max" = [3, 5]
    """
    asked, folder = read_sweep(file), out or RUNS / f"sweep-{file.stem}"
    with resumable(folder):
        folders = jobs.compare(asked.methods, asked.settings, asked.seeds, folder, quiet or None, minutes)
    if len([one for one in folders if one.summary]) < len(asked.methods) * asked.seeds:
        print("fedhelix: the time is up; the same command goes on where it stopped.", file=sys.stderr)
    if folders:
        show_comparison(folder, folders, as_json)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Studies; without any, a list.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="quick (a CPU, minutes), gpu (smaller than the paper) or paper.")
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(help="Repetitions (default: the study's own number).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after this time; the same command goes on later.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this row or column (may be repeated).")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where the runs are; finished ones are not run again.")
    ] = Path("runs/bench"),
    save: Annotated[
        Path | None, typer.Option(help="Folder for NAME-SCALE.json (default: the one of the runs).")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the data sets.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    commit: Annotated[str, typer.Option(help="The commit to note where git is not at hand.")] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's experiment and print our figures beside the paper's.

    NAME is a table or figure; `fedhelix bench` lists them. Runs are kept, so that a bench that was stopped goes on
    where it was, and tables with common runs share them:  fedhelix bench genfed-table2 --scale quick
    """
    from fedhelix.papers import commands

    commands.bench(
        names or [], scale, seeds, minutes, only or [], out, save or out, data_dir, device, commit, as_json, quiet
    )


@app.command()
def audit(
    attack: Annotated[str, typer.Argument(help="The attack: idlg, which rebuilds pictures from gradients.")],
    specs: Annotated[list[str], typer.Argument(metavar="METHOD|RUN...", help="Methods, or run folders.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="data, model, images, restarts, steps, ...")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture; the figures lie beside it as JSON.")] = Path(
        "audit.png"
    ),
    as_json: Json = False,
) -> None:
    """What an attacker can rebuild of a client's pictures from what a method uploads.

    For example:  fedhelix audit idlg fedavg fedlg partialfed gene-fl --set images=4 --set model=lenet-sigmoid
    """
    from fedhelix.privacy import commands

    commands.audit(attack, specs, assignments or [], out, as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with all its options.")] = None,
    as_json: Json = False,
) -> None:
    """What each method is, its options with defaults and meaning, and its paper.

    NAME shows one method alone, or a pair such as genfed+fedau.
    """
    chosen = {kind.name: kind for kind in layers(name)} if name else dict(sorted(METHODS.items()))
    facts = {key: _describe(kind) for key, kind in chosen.items()}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for key, fact in facts.items():
        console.print(f"[bold cyan]{key}[/]  {fact['what']}", highlight=False)
        console.print(f"    [dim]{fact['paper']}[/]", highlight=False)
        for option, detail in fact["options"].items():
            console.print(f"    method.{option} = {detail['default']}  [dim]{detail['meaning']}[/]", highlight=False)


def _describe(kind: type) -> dict[str, Any]:
    fields = [field for field in dataclasses.fields(kind) if field.init and field.name != "inner"]
    hints = typing.get_type_hints(kind)
    options = {}
    for field in fields:
        choices = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is typing.Literal else ()
        meaning = field.metadata.get("meaning", "") + (f" ({' | '.join(choices)})" if choices else "")
        options[field.name] = {"default": "auto" if field.default is None else field.default, "meaning": meaning}
    return {"what": (kind.__doc__ or "").partition("\n")[0], "paper": getattr(kind, "paper", ""), "options": options}


@app.command()
def data(
    data_dir: Annotated[Path | None, typer.Option(help="Look in this folder first.")] = None, as_json: Json = False
) -> None:
    """Which data sets are here, and how to get the others."""
    found = available(data_dir)
    if as_json:
        print(json.dumps([{**dataclasses.asdict(item)} for item in found], indent=2, default=str))
        return
    table = Table("data set", "here", "where, or how to get it", box=None, padding=(0, 2))
    for item in found:
        table.add_row(
            item.name, "[green]yes[/]" if item.found else "[yellow]no[/]", escape(str(item.found or item.how))
        )
    console.print(table)


@app.command("models")
def show_models() -> None:
    """The networks by name."""
    table = Table("model", "what it is", box=None, padding=(0, 2))
    for name, words in models.describe().items():
        table.add_row(name, words)
    console.print(table)


app.command()(sites.up)
app.command()(sites.site)
deploy = typer.Typer(help="Train across real machines, on Flower.", no_args_is_help=True)
deploy.command()(sites.keys)
deploy.command()(sites.admit)
deploy.command()(sites.expel)
deploy.command()(sites.serve)
app.add_typer(deploy, name="deploy")


@deploy.command("run")
@settings
def deploy_run(
    *,
    method: Annotated[str, typer.Argument(help="A name from `fedhelix methods`, or a pair such as genfed+fedau.")],
    out: Out = None,
    term: sites.Term = None,
    superlink: sites.Superlink = None,
    folder: sites.Folder = sites.FOLDER,
    as_json: Json = False,
    quiet: Quiet = False,
    values: Any,
) -> None:
    """Train one method across the sites of a deployment, into a run folder like any other.

    The number of clients is the number of sites that `fedhelix up` started, or --clients.
    """
    control, note = sites.deployment(superlink, folder)
    plan = make_plan(method, {**note, **values})
    control.connected()  # without a SuperLink it ends here, before a folder is made
    place = out or jobs.free_folder(f"{plan.method.label}-{Path(plan.config.data).stem}-deployed")
    with resumable(place, "deploy resume", new=out is None):
        done = submit.play(control, submit.create(plan, place, term or []), quiet or None)
    show_run(place, done, as_json)


@deploy.command("resume")
def deploy_resume(
    run: Annotated[Path, typer.Argument(help="A run folder that `fedhelix deploy run` made.")],
    superlink: sites.Superlink = None,
    folder: sites.Folder = sites.FOLDER,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run across sites that was stopped, from its last finished round."""
    control, _ = sites.deployment(superlink, folder)
    with resumable(run, "deploy resume"):
        done = submit.play(control, RunFolder.open(run), quiet or None)
    show_run(run, done, as_json)


class resumable:
    """Ctrl-C ends a command with one line on how to go on; a `new` folder in which nothing began goes away again."""

    def __init__(self, folder: Path, command: str = "resume", new: bool = False):
        self.folder, self.command, self.new = folder, command, new

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.new:
            with suppress(OSError):  # something lies in it
                self.folder.rmdir()
                self.folder.parent.rmdir()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            begun = any((self.folder / name).exists() for name in ("config.toml", jobs.COMPARISON))
            how = (
                f"continue with: fedhelix {self.command} {shlex.quote(str(self.folder))}"
                if begun
                else "nothing was written yet."
            )
            print(f"stopped; {how}", file=sys.stderr)
            raise SystemExit(130)


for command in views.COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Print the version when asked."""
    if version:
        print(f"fedhelix {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line: mistakes of the user end with one sentence and exit code 2."""
    warnings.showwarning = lambda words, *_, **__: print(f"fedhelix: {words}", file=sys.stderr)
    try:
        code = app(prog_name="fedhelix", standalone_mode=False)
    except BadInput as problem:
        _stop(str(problem), 2)
    except click.UsageError as problem:
        # Click and typer both add the hint to an unknown command.
        words = re.sub(r"( Did you mean .*?\?)\1", r"\1", problem.format_message())
        if not words:
            sys.exit(2)  # a bare command, whose help is on the screen already
        where = problem.ctx.command_path if problem.ctx else "fedhelix"
        _stop(f"{words.rstrip('.')}; see `{where} --help`.", 2)
    except (KeyboardInterrupt, click.Abort):
        _stop("stopped.", 130)
    except Exception as problem:
        if os.environ.get(DEBUG) or not (culprit(problem) or isinstance(problem, EngineFailure | OSError)):
            raise  # a mistake of ours, or somebody looks for one
        sentence, _, trace = str(problem).partition("\n")
        sentence = sentence if isinstance(problem, EngineFailure) else described(problem)
        hidden = trace or not isinstance(problem, EngineFailure)
        _stop(f"{sentence} (set {DEBUG}=1 for the traceback)" if hidden else sentence, 1)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _stop(sentence: str, code: int) -> None:
    print(f"fedhelix: {sentence}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
