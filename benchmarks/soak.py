"""A long deployment with faults in every round: does it end right, and does it stay small?

    python benchmarks/soak.py [--sites 20] [--rounds 2000] [--restart-every 50] [--out FILE.json]

In each round 30 % of the sites drop out: they hang, or answer too late. Others are slow, or answer
twice. The server and all sites start anew every so many rounds, from what they have on disk. The
result must equal, to the bit, that of a deployment whose sites are absent in the same rounds and
that is left in peace otherwise, which another process computes meanwhile. Sites and server share
one process, with Flower's messages between them; files lie in memory where that is possible.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measured import memory_folder, memory_mib, origin, write

from fedhelix.core.tree import flatten
from fedhelix.deploy import messages
from fedhelix.runs.spec import RunSpec, make_spec
from fedhelix.store import RunFolder

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from in_process import InProcessDeployment, InProcessGrid, Late, Slow, small_images

SMALL = {"epochs": 1, "batch_size": 256, "kernels": "onednn", "model": "linear"}
SAMPLES = 400
DROP, SLOW, TWICE = 0.3, 0.1, 0.1  # shares of the answers
DEADLINE = 0.05  # seconds


class Troubled(InProcessDeployment):
    """Sites that drop out, with faults or (`calm`) with a plain refusal at once."""

    def __init__(self, folder: Path, sites: int, data: str, calm: bool):
        super().__init__(folder, sites, data, common=True, deadline=DEADLINE, grace=0.0)
        self.grid = self.grid if calm else TroubledGrid(*self.grid.answers.values())
        for number, (node, honest) in enumerate(list(self.grid.answers.items())):
            self.grid.answers[node] = self._answer(number, honest, calm)

    def _answer(self, number: int, honest: Callable[[bytes], bytes], calm: bool) -> Any:
        def answer(content: bytes) -> bytes | Exception | None:
            header = messages.read(content).header
            if header["kind"] != "train":
                return honest(content)
            draw = random.Random(f"{header['round']} {number}")
            absent, hung, slow = (draw.random() < share for share in (DROP, 0.5, SLOW))
            if absent and hung:  # it never works on the request
                return RuntimeError("absent") if calm else None
            said = honest(content)
            if absent:
                return RuntimeError("absent") if calm else Late(said)
            return Slow(said) if slow and not calm else said

        return answer


class TroubledGrid(InProcessGrid):
    """Some answers come twice, late ones with the next round; nodes work before the first look, and
    the deadline runs from then on.
    """

    def __init__(self, *answers: Any):
        super().__init__(*answers)
        self.requests: list[Any] = []

    def push_messages(self, messages: Any) -> list[str]:
        self.deliver()
        return super().push_messages(messages)

    def ask(self, message: Any) -> None:
        self.requests.append(message)

    def pull_messages(self, message_ids: Any) -> list[Any]:
        requests, self.requests = self.requests, []
        for message in requests:
            super().ask(message)
        pulled = super().pull_messages(message_ids)
        return pulled + [one for one in pulled if random.random() < TWICE]


def measure(folder: Path) -> dict[str, float]:
    """What a leak would let grow."""
    gc.collect()
    files = [path for path in folder.rglob("*") if path.is_file()]
    large = [path.stat().st_size for path in files if path.name != "metrics.jsonl"]
    return {
        "memory_mib": memory_mib(),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count(),
        "files": len(files),
        "kib_without_records": sum(large) // 1024,
    }


def play(folder: Path, spec: RunSpec, calm: bool, every: int) -> tuple[dict[str, Any], list[Any]]:
    """All rounds, with a new server and new sites after every so many."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # the sites' logs
    os.close(silent)
    run, sizes = folder / "run", []
    last, sites = spec.config.rounds, spec.config.clients
    for until in [*range(every, last, every), last]:
        federation = Troubled(folder, sites, spec.config.data, calm).federation(spec)
        with contextlib.suppress(KeyboardInterrupt):
            federation.fit(
                last,
                out=run,
                resume=(run / "config.toml").exists(),
                config=spec.as_dict(),
                eval_every=last,
                quiet=True,
                watch=lambda record, until=until: stop(record, until),
            )
        federation.close()
        sizes.append({"round": until, **measure(folder)})
    return RunFolder.open(run).state()[1], sizes


def stop(record: dict[str, Any], until: int) -> None:
    if record["round"] >= until:
        raise KeyboardInterrupt


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    one, other = flatten(left), flatten(right)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--restart-every", type=int, default=50)
    parser.add_argument("--out", type=Path, help="FILE.json")
    arguments = parser.parse_args()
    place, begun = Path(tempfile.mkdtemp(dir=memory_folder())), time.monotonic()
    settings = {**SMALL, "clients": arguments.sites, "cohort": arguments.sites}
    settings |= {"rounds": arguments.rounds, "partition": "iid"}
    spec = make_spec("scaffold", {**settings, "data": small_images(place, SAMPLES)})
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        every = arguments.restart_every
        troubled = pool.submit(play, place / "troubled", spec, False, every)
        calm = pool.submit(play, place / "calm", spec, True, arguments.rounds)
        (server, sizes), (right, _) = troubled.result(), calm.result()
    records = RunFolder.open(place / "troubled" / "run").records()
    shutil.rmtree(place)
    report = {
        **origin(),
        "sites": arguments.sites,
        "rounds": len(records),
        "answers_missing": sum(len(record["missing"]) for record in records),
        "answers_late_or_twice": sum(len(record.get("troubles", {})) for record in records),
        "restarts": len(sizes) - 1,
        "equal_to_the_calm_deployment": equal(server, right),
        "sizes": sizes,
        "wall_seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps({key: value for key, value in report.items() if key != "versions"}))
    write(arguments.out, report)


if __name__ == "__main__":
    main()
