"""What produced a run: versions, the commit, and the device."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import torch

from fedhelix.core.version import __version__
from fedhelix.federation.inputs import device_of

COMMIT_VARIABLE = "FEDHELIX_COMMIT"  # for a copy of the source tree without its history


def versions() -> dict[str, str]:
    """What produced a run: package versions, and the commit when this is a source checkout."""
    named = {
        "fedhelix": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if commit := os.environ.get(COMMIT_VARIABLE) or _checked_out():
        named["commit"] = commit
    return named


def _checked_out() -> str:
    """The commit of a source checkout, and whether it was changed since."""
    commit = _git("rev-parse", "HEAD")
    changed = commit and _git("status", "--porcelain", "--", "src")
    return f"{commit}+changes" if changed else commit


def device_name(device: str) -> str:
    """What computes a run: the GPU's name, or CPU."""
    return torch.cuda.get_device_name() if device_of(device).type == "cuda" else "CPU"


@cache
def _git(*words: str) -> str:
    # Only a checkout of this project counts, not whatever repository an installed package happens
    # to lie in.
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
