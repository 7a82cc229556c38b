"""Bad messages to the server and to a site: how many are refused, and whether one does harm.

    python benchmarks/fuzz.py [--messages 10000] [--workers 1] [--minutes N] [--out FILE.json]
                              [--corpus FOLDER]

Messages are mutations of honest ones (`tests/fuzz/mutations.py`), of several methods in turn; the
server aggregates what it accepts with the uploads of three honest sites. Workers share the turns;
a message is a function of its number. It is a crash if it raises an exception, is blamed on another
site or takes ten seconds; its bytes then go to the corpus. Seconds are those of the processor, so
that other programs do not count. The memory of a worker is measured after each of its turns; in the
first turn of a method its modules are imported.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measured import memory_folder, memory_mib, origin, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz.mutations import mutated
from fuzz.targets import METHODS, ServerTarget, SiteTarget

CORPUS = Path(__file__).parents[1] / "tests" / "fuzz" / "corpus"
TARGETS = {"server": ServerTarget, "site": SiteTarget}
SLOW = 0.1  # seconds; a message that takes longer is sent again
HANGS = 10.0  # seconds after which a message is stopped
TURN = 2000  # messages before the next method
SHOWN = 12  # measurements of a worker's memory


class Turn(NamedTuple):
    """Some messages of one method to one target."""

    target: str
    method: str
    first: int
    messages: int
    corpus: Path


class Found(NamedTuple):
    """What came of a turn."""

    counts: Counter[str]
    crashes: Counter[str]
    slowest: float
    seconds: float  # of the processor, messages' mutations included
    worker: int
    memory_mib: float


def attack(turn: Turn) -> Found:
    """Send bad messages to a new target."""
    counts, crashes, slowest, begun = Counter[str](), Counter[str](), 0.0, time.process_time()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        target = TARGETS[turn.target](Path(folder), turn.method)
        kinds = [*target.honest, *["train"] * 3]
        for number in range(turn.first, turn.first + turn.messages):
            draw = random.Random(number)
            kind = draw.choice(kinds)
            content = mutated(target.example(kind), draw)
            counts["messages"] += 1
            try:
                accepted, took = timed(target, kind, content)
                if took > SLOW:  # Python's collector may have run meanwhile
                    took = min(took, timed(target, kind, content)[1])
                counts["accepted" if accepted else "refused"] += 1
                counts["over_one_second"] += took > 1
                slowest = max(slowest, took)
            except Exception as problem:
                crashes[f"{type(problem).__name__}: {problem}"[:200]] += 1
                keep(turn.corpus, turn.target, kind, content)
        counts["found_by_no_check"] = len(target.unexpected)
    del target
    gc.collect()
    seconds = time.process_time() - begun
    return Found(counts, crashes, slowest, seconds, os.getpid(), memory_mib())


def timed(target: ServerTarget | SiteTarget, kind: str, content: bytes) -> tuple[bool, float]:
    """Whether a message is accepted, and the processor's seconds for it."""
    signal.setitimer(signal.ITIMER_PROF, HANGS)
    started = time.thread_time()
    try:
        accepted = target.send(kind, content)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return accepted, time.thread_time() - started


def keep(corpus: Path, target: str, kind: str, content: bytes) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(content).hexdigest()[:16]
    (corpus / f"{target}-{kind}-{name}.bin").write_bytes(content)


def hang(*_: object) -> None:
    raise TimeoutError(f"no answer within {HANGS:g} s")


def prepare() -> None:
    """A worker computes on one core, and sites' logs are not shown."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, hang)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def turns(target: str, messages: int, corpus: Path) -> list[Turn]:
    return [
        Turn(target, METHODS[n % len(METHODS)], first, min(TURN, messages - first), corpus)
        for n, first in enumerate(range(0, messages, TURN))
    ]


class Total:
    """The sum of all turns of a target so far."""

    def __init__(self) -> None:
        self.counts, self.crashes = Counter[str](), Counter[str]()
        self.slowest = self.seconds = 0.0
        self.memory: dict[int, list[float]] = {}
        self.begun = time.monotonic()

    def add(self, found: Found) -> None:
        self.counts += found.counts
        self.crashes += found.crashes
        self.slowest = max(self.slowest, found.slowest)
        self.seconds += found.seconds
        self.memory.setdefault(found.worker, []).append(found.memory_mib)

    def as_dict(self) -> dict[str, Any]:
        names = ("messages", "accepted", "refused", "found_by_no_check", "over_one_second")
        return {
            **{name: self.counts[name] for name in names},
            "crashes": dict(self.crashes),
            "slowest_seconds": round(self.slowest, 4),
            "milliseconds_per_message": round(1e3 * self.seconds / self.counts["messages"], 3),
            "memory_mib_by_worker": [thinned(sizes) for sizes in self.memory.values()],
            "wall_seconds": round(time.monotonic() - self.begun, 1),
        }


def thinned(sizes: list[float]) -> list[float]:
    """A few of many measurements, the first and the last included."""
    last = len(sizes) - 1
    places = {round(n * last / (SHOWN - 1)) for n in range(SHOWN)}
    return [sizes[place] for place in sorted(places)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000, help="to each of the two")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each of the two")
    parser.add_argument("--out", type=Path, help="FILE.json, written as results come")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    arguments = parser.parse_args()
    result = {**origin(), "workers": arguments.workers, "methods": list(METHODS)}
    for name in TARGETS:
        total = Total()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.workers, spawn, prepare) as pool:
            ahead = turns(name, arguments.messages, arguments.corpus.resolve())
            for done in as_completed([pool.submit(attack, turn) for turn in ahead]):
                total.add(done.result())
                write(arguments.out, {**result, name: total.as_dict()})
                if time.monotonic() - total.begun > 60 * arguments.minutes:
                    pool.shutdown(cancel_futures=True)
                    break
        result[name] = total.as_dict()
        print(name, json.dumps(result[name]), flush=True)
    write(arguments.out, result)


if __name__ == "__main__":
    main()
