"""A long deployment with faults in every round: does it end right, and does it stay small?

    python benchmarks/soak.py [--sites 20] [--rounds 2000] [--restart-every 50] [--out FILE.json]

In each round 30 % of the sites drop out: they hang, or answer too late. Others are slow, or answer
twice. The server and all sites start anew every so many rounds, from what they have on disk. The
result must equal, to the bit, that of a simulation without faults whose clients are absent in the
same rounds. Sites and server share one process, with Flower's messages between them; files lie in
memory where that is possible.
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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured import memory_folder, memory_mib, origin, write

from fedhelix.core.tree import Tree, flatten
from fedhelix.deploy import messages
from fedhelix.deploy.site import Site
from fedhelix.engines.local import ClientResult, ClientTask
from fedhelix.engines.serial import Serial
from fedhelix.runs.spec import RunSpec, make_spec
from fedhelix.store import RunFolder

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from in_process import InProcessDeployment, InProcessGrid, Late, Slow, small_images

SMALL = {"epochs": 1, "batch_size": 256, "kernels": "onednn", "model": "linear"}
SAMPLES = 400
DROP, SLOW, TWICE = 0.3, 0.1, 0.1  # shares of the answers
DEADLINE = 0.05  # seconds


def absent(round: int, client: int) -> bool:
    """Whether a client drops out of a round, deployed or simulated."""
    return random.Random(f"{round} {client}").random() < DROP


class Troubled(InProcessDeployment):
    """Sites that hang, answer late, slowly or twice."""

    def __init__(self, folder: Path, sites: int, data: str):
        super().__init__(folder, sites, data, common=True, deadline=DEADLINE, grace=0.0)
        self.grid = TroubledGrid(*(partial(answer, site) for site in self.sites))


def answer(site: Site, content: bytes) -> bytes | None:
    """What a site says to a message, and when."""
    header = messages.read(content).header
    if header["kind"] != "train":
        return site.answer(content)
    gone, hangs = absent(header["round"], header["client"]), random.random() < 0.5
    if gone and hangs:  # it never works on the request
        return None
    said = site.answer(content)
    if gone:
        return Late(said)
    return Slow(said) if random.random() < SLOW else said


class Undisturbed(Serial):
    """Simulated clients that are absent in the same rounds."""

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of those who are present."""
        return super().run_clients([task for task in tasks if not absent(task.round, task.client)])


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


def deploy(folder: Path, spec: RunSpec, every: int) -> tuple[Tree, list[dict[str, float]]]:
    """The server's state after all rounds, with a new server and new sites after every so many."""
    quieten()
    run, sizes = folder / "run", []
    last, sites = spec.config.rounds, spec.config.clients
    for until in [*range(every, last, every), last]:
        federation = Troubled(folder, sites, spec.config.data).federation(spec)
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


def simulate(folder: Path, spec: RunSpec) -> Tree:
    """The server's state after all rounds of a simulation."""
    quieten()
    federation = spec.config.federation(spec.method, engine=Undisturbed)
    rounds = spec.config.rounds
    federation.fit(rounds, out=folder, config=spec.as_dict(), eval_every=rounds, quiet=True)
    return RunFolder.open(folder).state()[1]


def quieten() -> None:
    """One thread, and no logs of sites."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    os.close(silent)


def stop(record: dict[str, Any], until: int) -> None:
    if record["round"] >= until:
        raise KeyboardInterrupt


def equal(left: Tree, right: Tree) -> bool:
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
        deployed = pool.submit(deploy, place / "deployed", spec, every)
        simulated = pool.submit(simulate, place / "simulated", spec)
        (server, sizes), right = deployed.result(), simulated.result()
    records = RunFolder.open(place / "deployed" / "run").records()
    shutil.rmtree(place)
    report = {
        **origin(),
        "sites": arguments.sites,
        "rounds": len(records),
        "answers_missing": sum(len(record["missing"]) for record in records),
        "answers_late_or_twice": sum(len(record.get("troubles", {})) for record in records),
        "restarts": len(sizes) - 1,
        "equal_to_the_simulation": equal(server, right),
        "sizes": sizes,
        "wall_seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps({key: value for key, value in report.items() if key != "versions"}))
    write(arguments.out, report)


if __name__ == "__main__":
    main()
