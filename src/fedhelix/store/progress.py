"""The live display of a run; it needs only records, so anything that yields records can use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from time import monotonic
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Display
from rich.progress import track as rich_track
from rich.table import Column
from rich.text import Text

from fedhelix.store import notebook
from fedhelix.store.notebook import CellOutput
from fedhelix.store.records import diverged_since, why_untrained

Item = TypeVar("Item")

# The metrics on the line, with their names there.
SHOWN = {
    "accuracy": "global",
    "score": "global",
    "personal_accuracy": "personal",
    "personal_score": "personal",
}

WIDE = 100
SHORTEST_BAR, LONGEST_TITLE, LEFT, ELAPSED = 4, 20, len("59 min 59 s left"), 8  # columns
ECHO = 2  # columns at the end that stay free for the ^C of a terminal, which would break the line
# What a narrow line goes without, in this order: the time left stays.
BEFORE_TITLE = ("uploads", "clock", "accuracy", "score")
DISPENSABLE = (*BEFORE_TITLE, "refused", "personal_accuracy", "personal_score", "untrained",
               "diverged")  # fmt: skip

# The display of this thread's run, where long work inside a round can show its own bar.
_shown: ContextVar[Progress | None] = ContextVar("shown", default=None)


class Progress:
    """Shows the progress of a run; use it in a `with` statement and give `update` each record.

    On a terminal and in a notebook there is a bar with the latest accuracies, the uploaded bytes
    and the time left. Elsewhere there is nothing, or with `lines` one line of `key=value` pairs per
    evaluated round. `quiet=True` shows nothing anywhere, `quiet=False` something everywhere. A
    resumed run starts at `done` rounds; give `update` its earlier records too, so that the numbers
    continue. `final_work` says that the last round takes longer than the others.
    """

    def __init__(
        self,
        total: int,
        title: str,
        done: int = 0,
        quiet: bool | None = None,
        lines: bool = False,
        console: Console | None = None,
        final_work: bool = False,
    ) -> None:
        # The error stream, so that a command's own output can be piped.
        self._console = console or Console(stderr=True)
        bar = self._console.is_terminal and not quiet
        self._lines = not bar and not quiet and (lines or quiet is False)
        self._total, self._first, self._done = total, done, done
        wide = self._console.width >= WIDE
        self._final_work = (" and the final fit" if wide else " + final fit") * final_work
        self._below: tuple[str, int] | None = None  # title and steps of long work inside a round
        self._latest: dict[str, float] = {}
        self._uploaded = self._refused = 0
        self._once = 0.0  # seconds that later rounds do not take again
        self._clock: float | None = None
        self._records: list[Mapping[str, Any]] = []
        self._diverged: int | None = None
        self._started = monotonic()
        # On a narrow terminal the numbers matter more than the elapsed time; the bar shrinks.
        elapsed = [TimeElapsedColumn(table_column=Column(no_wrap=True))] if wide else []
        self._display = Display(
            TextColumn(
                "[bold]{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=SHORTEST_BAR)),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            *elapsed,
            TextColumn("[dim]{task.fields[left]}", table_column=Column(no_wrap=True)),
            TextColumn("", table_column=Column(width=ECHO - 1)),  # and the gap before it
            console=self._console,
            expand=True,
            disable=not bar,
        )
        self._title = title
        self._cell = CellOutput() if self._console.is_jupyter and not quiet else None
        self._task = self._display.add_task(title, total=total, completed=done, numbers="", left="")

    def __enter__(self) -> Progress:
        self._started = monotonic()
        self._display.start()
        self._outer = _shown.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _shown.reset(self._outer)
        self._display.stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the record of one more round."""
        metrics = {key: float(record[key]) for key in SHOWN if record.get(key) is not None}
        self._latest.update(metrics)
        self._uploaded += record.get("uplink_bytes") or 0
        self._refused += len(record.get("refused") or ())
        self._clock = record.get("clock")
        self._records.append(record)
        self._diverged = diverged_since(self._records)
        is_new = record["round"] > self._first
        self._once += record.get("start_seconds", 0.0) if is_new else 0.0
        self._done = max(self._done, record["round"])
        evaluated = metrics or "unevaluated" in record  # sites may keep all of their scores
        if self._lines and evaluated and is_new:
            self._console.print(
                self._line(record, metrics), markup=False, highlight=False, soft_wrap=True
            )
        self._show()
        if self._cell is not None:
            words = f"{' · '.join(self._numbers().values())} {self._time_left()}"
            plain = Text.from_markup(words).plain
            self._cell.show(notebook.bar(self._title, self._done, self._total, plain))

    def below(self, items: Sequence[Item], title: str) -> Iterator[Item]:
        """Yield the items with a bar below that of the run, which disappears at the end."""
        self._below = (title, len(items))
        self._show()
        task = self._display.add_task(title, total=len(items), numbers="", left="")
        started = monotonic()
        try:
            for done, item in enumerate(items, start=1):
                yield item
                left = (monotonic() - started) / done * (len(items) - done)
                self._display.update(task, advance=1, left=f"{human_seconds(left)} left")
        finally:
            self._display.remove_task(task)
            self._below = None

    def _show(self) -> None:
        """Bring the line up to date, without what it has no room for."""
        # Earlier rounds say nothing about long work inside of one.
        left = "" if self._below else self._time_left()
        title, steps = self._below or ("", 0)
        count = 2 * len(str(max(self._total, steps))) + 1
        taken = [count, SHORTEST_BAR, LEFT if self._below else len(left), ECHO - 1]
        room = self._console.width - sum(taken) - 5  # gaps
        room -= ELAPSED if self._console.width >= WIDE else 0
        numbers = self._numbers()
        for name in DISPENSABLE:
            words = Text.from_markup(" · ".join(numbers.values()))
            # A long title is cut before the line goes without what matters most.
            most = len(self._title) if name in BEFORE_TITLE else LONGEST_TITLE
            if max(min(len(self._title), most), len(title)) + words.cell_len <= room:
                break
            numbers.pop(name, None)
        shown = Text.from_markup(" · ".join(numbers.values())).cell_len
        self._display.update(
            self._task,
            description=_cut(self._title, max(room - shown, 1)),
            completed=self._done,
            numbers=" · ".join(numbers.values()),
            left=left,
        )

    def _numbers(self) -> dict[str, str]:
        """What the line says about the rounds so far."""
        parts = {key: f"{SHOWN[key]} {_number(key, value)}" for key, value in self._latest.items()}
        parts["uploads"] = f"↑ {human_bytes(self._uploaded)}"
        if self._clock is not None:
            parts["clock"] = f"clock {human_seconds(self._clock)}"
        if why_untrained(self._records):
            parts["untrained"] = "[red]nothing learned yet[/red]"
        if self._refused:
            parts["refused"] = f"[yellow]{self._refused} refused[/yellow]"
        if self._diverged:
            parts["diverged"] = f"[red]diverged since round {self._diverged}[/red]"
        return parts

    def _time_left(self) -> str:
        # Averaged over all rounds so far, because rounds with an evaluation take longer.
        spent, now_done = monotonic() - self._started - self._once, self._done - self._first
        seconds = time_left(self._total - self._first, now_done, spent)
        return "" if seconds is None else f"{human_seconds(seconds)}{self._final_work} left"

    def _line(self, record: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
        values = [f"round={record['round']}", f"rounds={self._total}"]
        values += [f"{key}={value:.4f}" for key, value in metrics.items()]
        if self._diverged:
            values.append(f"diverged_since={self._diverged}")
        values += [f"uploaded_bytes={self._uploaded}", f"seconds={monotonic() - self._started:.1f}"]
        return " ".join(values)


def track(items: Iterable[Item], title: str, console: Console | None = None) -> Iterator[Item]:
    """Yield the items with a bar on a terminal that disappears at the end.

    For long work that has no rounds.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        yield from rich_track(items, description=title, console=console, transient=True)
    else:
        yield from items


def below(items: Sequence[Item], title: str) -> Iterator[Item]:
    """Yield the items with a bar below that of the run, which disappears at the end.

    For long work inside a round.
    """
    display = _shown.get()
    yield from items if display is None else display.below(items, title)


def time_left(rounds: Any, done: int, seconds: float) -> float | None:
    """The seconds that the other rounds will take, if they are like those so far; None if unknown
    or over.
    """
    if not isinstance(rounds, int) or not 0 < done < rounds:
        return None
    return seconds / done * (rounds - done)


def human_bytes(count: float) -> str:
    """Bytes as people read them: 1536 is '1.5 KiB'."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1023.95:  # from here on one decimal would print 1024.0
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} PiB"


def human_seconds(seconds: float) -> str:
    """A duration as people read it: 3725 is '1 h 02 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _cut(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _number(key: str, value: float) -> str:
    return f"{100 * value:.1f} %" if key.endswith("accuracy") else f"{value:.4g}"
