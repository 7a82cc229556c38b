"""Whom a run waits for: the server says it in the run's folder, to whoever follows the run."""

from __future__ import annotations

from pathlib import Path

from fedhelix.core.files import remove_leftovers, write_atomically

FILE = "waiting.txt"  # it is there while the run waits


class Waiting:
    """What a server says in the folder of its run; without a folder, nothing."""

    def __init__(self, folder: Path | None = None):
        self.folder, self.words = folder, ""
        if folder is not None:
            forget(folder)

    def say(self, words: str) -> None:
        """Say whom the run waits for."""
        if self.folder is not None and words != self.words:
            write_atomically(self.folder / FILE, words.encode())
        self.words = words

    def end(self) -> None:
        """The run goes on, or stops."""
        if self.folder is not None and self.words:
            (self.folder / FILE).unlink(missing_ok=True)
        self.words = ""


def poll_interval(waited: float) -> float:
    """Seconds until the next look: short at first, then in proportion to the time waited."""
    return min(max(0.2 * waited, 0.05), 1.0)


def read(folder: Path) -> str:
    """What a server says in the folder of its run; empty where it does not wait."""
    try:
        return (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def forget(folder: Path) -> None:
    """Remove what a server has left that was killed."""
    remove_leftovers(folder, FILE)
    (folder / FILE).unlink(missing_ok=True)
