"""Time, memory and machine: common measurements of the races and the cost curves."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    pids = [pid]
    for one in pids:  # grows during the loop
        pids += children.get(one, [])
    return pids


def processor_seconds(pids: Iterable[int]) -> float:
    """What some processes and their ended children have used so far."""
    ticks = 0
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, words[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(pids: Iterable[int]) -> dict[str, float]:
    """MiB of some processes together: shared pages counted once (pss), or in each process (rss)."""
    total = {"pss": 0.0, "rss": 0.0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name = line.partition(":")[0].lower()
            if name in total:
                total[name] += int(line.split()[1]) / 1024
    return total


@contextmanager
def peak_memory(pid: int, every: float = 0.05) -> Iterator[dict[str, float]]:
    """The peak memory of a process and its descendants in MiB, complete when the block ends."""
    most, over = {"pss": 0.0, "rss": 0.0}, threading.Event()

    def watch() -> None:
        while not over.wait(every):
            for kind, size in memory(family(pid)).items():
                most[kind] = max(most[kind], size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the range of the middle eighty percent."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def machine() -> dict[str, Any]:
    """The machine on which the race took place."""
    lines = subprocess.run(
        ["lscpu"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    facts = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processor": " ".join(filter(None, (facts.get("Vendor ID"), facts.get("Model name"))))
        or platform.processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(memory_kib / 2**20, 1),
        "system": platform.system(),
        "load_average_before": os.getloadavg(),
    }
