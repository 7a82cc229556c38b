"""Bad messages to the server and to a site: how many are refused, and whether one does harm.

    python benchmarks/fuzz.py [--messages 10000] [--minutes N] [--out FILE.json] [--corpus FOLDER]

Messages are mutations of honest ones (`tests/fuzz/mutations.py`), of several methods in turn; the
server aggregates what it accepts with the uploads of three honest sites. A message is a crash if
it raises an exception or is blamed on another site; its bytes then go to the corpus. Seconds are
those of the processor, so that other programs do not count. Memory is measured after each turn of
one method; in the first turn of each its modules are imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from fedhelix.runs.provenance import versions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz.mutations import mutated
from fuzz.targets import METHODS, ServerTarget, SiteTarget

ROOT = Path(__file__).parents[1]
TARGETS = {"server": ServerTarget, "site": SiteTarget}
SLOW = 0.1  # seconds; a message that takes longer is sent again
TURN = 2000  # messages before the next method


def memory_mib() -> float:
    """The resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def attack(name: str, messages: int, seconds: float, corpus: Path) -> dict:
    """Send bad messages to one target until one of the limits is reached."""
    counts, crashes, unexpected = Counter[str](), Counter[str](), Counter[str]()
    slowest, memory, begun = 0.0, list[float](), time.monotonic()
    number = turn = over = 0
    while number < messages and time.monotonic() - begun < seconds:
        with tempfile.TemporaryDirectory() as folder:
            target = TARGETS[name](Path(folder), METHODS[turn % len(METHODS)])
            turn += 1
            kinds = [*target.honest, *["train"] * 3]
            for _ in range(min(TURN, messages - number)):
                draw = random.Random(number)
                kind = draw.choice(kinds)
                content = mutated(target.example(kind), draw)
                number += 1
                try:
                    accepted, took = timed(target, kind, content)
                    if took > SLOW:  # Python's collector may have run meanwhile
                        took = min(took, timed(target, kind, content)[1])
                    counts["accepted" if accepted else "refused"] += 1
                    slowest, over = max(slowest, took), over + (took > 1)
                except Exception as problem:
                    crashes[f"{type(problem).__name__}: {problem}"[:200]] += 1
                    keep(corpus, name, kind, content)
            unexpected.update(target.unexpected)
            memory.append(memory_mib())
    return {
        "messages": number,
        **counts,
        "crashes": dict(crashes),
        "without_a_sentence": sum(unexpected.values()),
        "slowest_seconds": round(slowest, 4),
        "over_one_second": over,
        "memory_mib_by_turn": [round(size) for size in memory],
        "wall_seconds": round(time.monotonic() - begun, 1),
    }


def timed(target: ServerTarget | SiteTarget, kind: str, content: bytes) -> tuple[bool, float]:
    """Whether a message is accepted, and the processor's seconds for it."""
    started = time.thread_time()
    accepted = target.send(kind, content)
    return accepted, time.thread_time() - started


def keep(corpus: Path, target: str, kind: str, content: bytes) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(content).hexdigest()[:16]
    (corpus / f"{target}-{kind}-{name}.bin").write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000, help="to each of the two")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each of the two")
    parser.add_argument("--out", type=Path, help="FILE.json")
    parser.add_argument("--corpus", type=Path, default=ROOT / "tests" / "fuzz" / "corpus")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    result = {
        "command": f"python benchmarks/fuzz.py {' '.join(sys.argv[1:])}",
        "commit": commit,
        "machine": platform.machine(),
        "versions": versions(),
        "methods": list(METHODS),
    }
    for name in TARGETS:
        result[name] = attack(name, arguments.messages, 60 * arguments.minutes, arguments.corpus)
        print(name, json.dumps(result[name]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
