"""Folders of the user's that are not part of any run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where downloads and timed choices are kept: ~/.cache/fedhelix, or the same in XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedhelix"
