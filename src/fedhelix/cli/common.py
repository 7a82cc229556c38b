"""What several commands share: options, and how they end on Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhelix.store import COMPARISON

OUTPUT = "Output"  # the panel of help pages with what becomes of results

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress display.", rich_help_panel=OUTPUT)
]
Track = Annotated[
    str | None,
    typer.Option(
        help="Write every round there too: tensorboard, mlflow or wandb.", rich_help_panel=OUTPUT
    ),
]
Minutes = Annotated[
    float | None, typer.Option(help="Stop after this time; the same command goes on later.")
]
Jobs = Annotated[
    int,
    typer.Option(
        metavar="N", help="Runs at once, each in a process of its own; they may share a GPU."
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", help="What computes the clients: auto, serial, parallel, batched or ray."
    ),
]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster of the ray engine: HOST:PORT, or auto.")
]
Workers = Annotated[
    str | None, typer.Option(metavar="N", help="Processes of the parallel or ray engine.")
]


def out_option(help: str) -> Any:
    """The option that names the folder of the results."""
    return typer.Option("--out", "-o", help=help, rich_help_panel=OUTPUT)


Out = Annotated[Path | None, out_option("The run folder itself (default: a new one in runs/).")]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="PATH", help="Folder with the data set's files.")
]
LogFormat = Annotated[
    str, typer.Option("--log-format", help="Log lines: text, or json, one object each.")
]
Code = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.py",
        help="A network's or method's file, the same as the server's; can be given repeatedly.",
    ),
]


UNTOUCHED = "nothing was written yet."
AGAIN = "the same command goes on where it stopped."


class resumable:
    """Ctrl-C ends a command with one line on how to go on, by a `command` with `options`; a `new`
    folder in which nothing began goes away again.

    Where something lies in the folder before, it may be another run, which is refused only later:
    then the line is `older`, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        command: str = "resume",
        options: str = "",
        new: bool = False,
        older: str = "",
    ):
        self.folder, self.new, self.older = folder, new, older
        self.command = f"fedhelix {command} {shlex.quote(str(folder))}{options}"

    def __enter__(self) -> None:
        if not self._is_begun():
            self.older = ""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.new:
            with suppress(OSError):  # something lies in it
                self.folder.rmdir()
                self.folder.parent.rmdir()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            how = f"continue with: {self.command}" if self._is_begun() else UNTOUCHED
            print(f"stopped; {self.older or how}", file=sys.stderr)
            raise SystemExit(130)

    def _is_begun(self) -> bool:
        return any((self.folder / name).exists() for name in ("config.toml", COMPARISON))


def places(**given: str | None) -> dict[str, str]:
    """The settings that were given, of those that say where a run is computed."""
    return {key: value for key, value in given.items() if value is not None}
