"""Runs on disk."""

from fedhelix.store.folder import COMPARISON, FORMAT, RUNS, RunFolder
from fedhelix.store.lock import writer_lives

__all__ = ["COMPARISON", "FORMAT", "RUNS", "RunFolder", "writer_lives"]
