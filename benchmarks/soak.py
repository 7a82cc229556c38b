"""A long deployment with faults in every round: does it end right, and does it stay small?

    python benchmarks/soak.py [--sites 20] [--rounds 2000] [--restart-every 50] [--out FILE.json]

In each round 30 % of the sites drop out: they hang, or answer too late. Others answer twice. The
server and all sites start anew every so many rounds, from what they have on disk. The result must
equal, to the bit, that of a deployment whose sites are absent in the same rounds and that is left
in peace otherwise. Sites and server share one process, with Flower's messages between them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch

from fedhelix.core.tree import flatten
from fedhelix.deploy import messages
from fedhelix.runs.provenance import versions
from fedhelix.runs.spec import RunSpec, make_spec
from fedhelix.store import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import contextlib

from in_process import InProcessDeployment, InProcessGrid, Late

SMALL = {"epochs": 1, "batch_size": 256, "kernels": "onednn", "model": "linear"}
DROP, TWICE = 0.3, 0.1  # shares of the answers


class Troubled(InProcessDeployment):
    """Sites that drop out, with faults or (`calm`) with a plain refusal at once."""

    def __init__(self, folder: Path, sites: int, calm: bool):
        super().__init__(folder, sites, deadline=0.05, grace=0.0)
        self.grid = TwiceGrid(*self.grid.answers.values()) if not calm else self.grid
        for number, (node, honest) in enumerate(list(self.grid.answers.items())):
            self.grid.answers[node] = self._answer(number, honest, calm)

    def _answer(self, number: int, honest, calm: bool):
        def answer(content: bytes):
            header = messages.read(content).header
            if header["kind"] != "train":
                return honest(content)
            draw = random.Random(f"{header['round']} {number}")
            if draw.random() >= DROP:
                return honest(content)
            if draw.random() < 0.5:  # it hangs, and never works on the request
                return RuntimeError("absent") if calm else None
            late = honest(content)
            return RuntimeError("absent") if calm else Late(late)

        return answer


class TwiceGrid(InProcessGrid):
    """Some answers come twice, late ones with the next round."""

    def push_messages(self, messages):
        self.deliver()
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        pulled = super().pull_messages(message_ids)
        return pulled + [one for one in pulled if random.random() < TWICE]


def measure(folder: Path) -> dict[str, float]:
    """What a leak would let grow."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "memory_mib": round(pages * resource.getpagesize() / 2**20, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count(),
        "files": len(files),
        "kib_without_records": sum(
            path.stat().st_size for path in files if path.name != "metrics.jsonl"
        )
        // 1024,
    }


def play(folder: Path, spec: RunSpec, sites: int, calm: bool, every: int) -> tuple[dict, list]:
    """All rounds, with a new server and new sites after every so many."""
    run, sizes = folder / "run", []
    last = spec.config.rounds
    for until in [*range(every, last, every), last]:
        deployment = Troubled(folder, sites, calm)
        federation = deployment.federation(spec)
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


def stop(record: dict, until: int) -> None:
    if record["round"] >= until:
        raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--restart-every", type=int, default=50)
    parser.add_argument("--out", type=Path, help="FILE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings = {**SMALL, "clients": arguments.sites, "cohort": arguments.sites}
    spec = make_spec("scaffold", {**settings, "rounds": arguments.rounds})
    place, begun = Path(tempfile.mkdtemp()), time.monotonic()
    troubled, sizes = play(
        place / "troubled", spec, arguments.sites, False, arguments.restart_every
    )
    records = RunFolder.open(place / "troubled" / "run").records()
    calm, _ = play(place / "calm", spec, arguments.sites, True, arguments.rounds)
    left, right = flatten(troubled), flatten(calm)
    equal = left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    shutil.rmtree(place)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
        "command": f"python benchmarks/soak.py {' '.join(sys.argv[1:])}",
        "commit": commit,
        "machine": platform.machine(),
        "versions": versions(),
        "rounds": len(records),
        "answers_missing": sum(len(record["missing"]) for record in records),
        "answers_late_or_twice": sum(len(record.get("troubles", {})) for record in records),
        "restarts": len(sizes) - 1,
        "equal_to_the_calm_deployment": equal,
        "sizes": sizes,
        "wall_seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps({key: value for key, value in report.items() if key != "versions"}))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
