"""What every result of the hardening benchmarks says about itself, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

from fedhelix.core.files import write_atomically
from fedhelix.federation.provenance import versions


def origin() -> dict[str, Any]:
    """The command, the commit and the machine behind a result."""
    known = versions()
    script = Path(sys.argv[0])
    return {
        "command": f"python {script.parent.name}/{script.name} {' '.join(sys.argv[1:])}".strip(),
        "commit": known.pop("commit", ""),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": known,
    }


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result, or what there is of it so far."""
    if path is not None:
        write_atomically(path, json.dumps(result, indent=1).encode() + b"\n")


def memory_mib() -> float:
    """The resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


def memory_folder() -> str | None:
    """A folder in memory where there is one, so that a slow disk does not count."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
