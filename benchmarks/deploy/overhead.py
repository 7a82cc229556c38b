"""The overhead of a round across processes: three sites on loopback, TLS and keys, a small model.

    python benchmarks/deploy/overhead.py [warm] [flower]

`warm` is `fedhelix site`, `flower` is Flower's own SuperNode with the same answers. Overhead is the
round's time less the time that the slowest site needs to train and to evaluate. Writes
benchmarks/results/deploy-overhead.json.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from fedhelix.deploy import submit
from fedhelix.deploy.localhost import LocalDeployment, Process, free_port
from fedhelix.federation.provenance import versions
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

RESULT = Path(__file__).parent.parent / "results" / "deploy-overhead.json"
ROUNDS = {"warm": 12, "flower": 4}
SITES = 3


def with_flowers_nodes(local: LocalDeployment) -> None:
    """Flower's own SuperNode in place of ours."""
    for name in local.names:
        place = f'site="{name}" data="digits" folder="{local.folder / "sites"}"'
        command = [
            "flower-supernode",
            "--superlink",
            local.address,
            "--root-certificates",
            str(local.certificate),
        ]
        command += ["--auth-supernode-private-key", str(local.folder / "keys" / f"{name}.key")]
        command += ["--port", str(free_port()), "--node-config", place]
        local.sites[name] = Process(name, command, local.folder / "logs" / f"{name}.log", local.env)


def processor_seconds(pid: int) -> float:
    """The processor time that a process has used so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Meter(threading.Thread):
    """Processor time of the SuperLink and of a site's connection from the end of round 1 on."""

    def __init__(self, local: LocalDeployment, run: RunFolder):
        super().__init__(daemon=True)
        self.run_folder, self.pids = run, {"superlink": local.superlink.running.pid}
        self.pids["site"] = next(iter(local.sites.values())).running.pid
        self.before: dict[str, float] = {}

    def run(self) -> None:
        while not self.run_folder.records():
            time.sleep(0.05)
        self.before = {name: processor_seconds(pid) for name, pid in self.pids.items()}

    def per_round(self, rounds: int) -> dict[str, float]:
        """Seconds for each of the rounds since."""
        return {
            name: round((processor_seconds(pid) - self.before[name]) / rounds, 3)
            for name, pid in self.pids.items()
        }


def measure(way: str) -> dict:
    folder, load = Path(tempfile.mkdtemp(prefix="fedhelix-overhead-")), []
    try:
        local = LocalDeployment(folder / "deployment", sites=SITES)
        if way == "flower":
            with_flowers_nodes(local)
        with local:
            spec = make_spec("fedavg", {"clients": SITES, "rounds": ROUNDS[way]})
            load.append(os.getloadavg()[0])
            run = submit.create(spec, folder / "run")
            meter = Meter(local, run)
            meter.start()
            with local.control() as control:
                summary = submit.follow(control, run, quiet=True)
            used = meter.per_round(ROUNDS[way] - 1)
            load.append(os.getloadavg()[0])
        records = run.records()[1:]  # the first one sets everything up
        overhead = [record["seconds"] - record["wire"]["site_seconds"] for record in records]
        return {
            "way": way,
            "parameters": summary["parameters"],
            "rounds_measured": len(records),
            "seconds_per_round": statistics.median(record["seconds"] for record in records),
            "overhead_median": statistics.median(overhead),
            "overhead_all": [round(value, 3) for value in overhead],
            "processor_seconds_per_round": used,
            "load_average_before_and_after": [round(value, 1) for value in load],
        }
    finally:
        shutil.rmtree(folder)


def main(*ways: str) -> None:
    known = (
        {row["way"]: row for row in json.loads(RESULT.read_text())["rows"]}
        if RESULT.exists()
        else {}
    )
    for way in ways or ROUNDS:
        known[way] = measure(way)
        print(json.dumps(known[way]), flush=True)
    facts = {"sites": SITES, "cores": os.cpu_count(), "versions": versions()}
    RESULT.write_text(json.dumps({**facts, "rows": list(known.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
