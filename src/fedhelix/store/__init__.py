"""Runs on disk."""

from fedhelix.store.folder import COMPARISON, FORMAT, RunFolder
from fedhelix.store.lock import writer_lives

__all__ = ["COMPARISON", "FORMAT", "RunFolder", "writer_lives"]
