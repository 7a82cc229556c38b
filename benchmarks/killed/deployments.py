"""A deployment of real processes with TLS and keys, whose parts are killed while a run goes on.

    python -m killed.deployments FOLDER [--kills 4] [--seed 0] [--seconds N]

Killed are the server app, the SuperLink, a site, and a site's worker; or the network between a site
and the SuperLink is cut. What has died is started again, as `fedhelix up` does. Prints one line of
JSON with what was killed and checksums of the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy import submit
from fedhelix.deploy.localhost import LocalDeployment, descendants, free_port
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from killed.jobs import UNEQUAL, leftovers
from killed.proxy import Proxy

SITES, POLICY = 2, ["deadline=300", "patience=300", "grace=300"]
SMALL = {"epochs": 1, "batch_size": 256, "kernels": "onednn", "model": "mlp", "train_samples": 200}
PARTS = ("site", "SuperLink", "network", "worker", "server app")
SHARES = (3, 2, 3, 3, 1)  # Flower takes a minute to find that a server app is gone
CUT_SECONDS = (0.0, 3.0)
PATIENCE = 400.0  # seconds for a run with its kills


class Deployment(LocalDeployment):
    """Its sites reach the SuperLink through a network that can be cut."""

    def __init__(self, folder: Path):
        port = free_port()
        self.network = Proxy(port)
        super().__init__(folder, SITES, port=port)

    def site_command(self, name: str) -> list[str]:
        """The command that starts one site, on the other side of the network."""
        return [self.network.address if word == self.address else word
                for word in super().site_command(name)]  # fmt: skip

    def kill(self, part: str, draw: random.Random) -> bool:
        """Kill a part; whether it was there."""
        if part == "network":
            return self.network.cut(draw.uniform(*CUT_SECONDS))
        site = self.sites[draw.choice(self.names)].running
        if site is None or self.superlink.running is None:
            return False
        owner = self.superlink.running.pid
        victims = {
            "site": [site.pid],
            "SuperLink": [owner],
            "worker": descendants(site.pid)[:1],
            "server app": [pid for pid in descendants(owner) if is_server_app(pid)],
        }[part]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return bool(victims)


def is_server_app(pid: int) -> bool:
    try:
        return b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def supervised(local: LocalDeployment) -> Iterator[None]:
    """Start dead processes again, as `fedhelix up` does while it waits."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            local.revive()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def strike(
    local: Deployment, folder: RunFolder, kills: int, draw: random.Random, seconds: float
) -> list[str]:
    """Kill one part after the other, each after a round more; what was killed."""
    done, seen, until = [], 0, time.monotonic() + seconds
    while len(done) < kills and time.monotonic() < until and folder.summary is None:
        if len(folder.records()) <= seen:
            time.sleep(0.05)
            continue
        time.sleep(draw.uniform(0, 0.5))
        (part,) = draw.choices(PARTS, SHARES)
        seen = len(folder.records())
        if local.kill(part, draw):
            done.append(part)
    return done


def follow(local: Deployment, folder: RunFolder) -> None:
    """Follow a run as its owner would: the command is given again where the SuperLink was away."""
    until = time.monotonic() + PATIENCE
    while folder.summary is None:
        try:
            with local.control() as control:
                submit.follow(control, folder, quiet=True)
        except (UserError, EngineFailure) as problem:
            print(f"fedhelix: {problem}", file=sys.stderr)
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def result(folder: RunFolder, sites: Path) -> dict[str, str]:
    """Checksums of every round's record, the server's state and what the sites keep."""
    found = {}
    for record in folder.records():
        line = {key: record[key] for key in record if key not in (*UNEQUAL, "troubles")}
        text = json.dumps(line, sort_keys=True)
        found[f"round {record['round']}"] = hashlib.sha256(text.encode()).hexdigest()
    manifest = json.loads((folder.path / "checkpoint" / "manifest.json").read_text())
    found["server"] = manifest["server"]["sha256"]
    for path in sorted(sites.glob("*/*/own-*.safetensors")):
        name = f"{path.parent.name}/{path.name}"
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def absences(folder: RunFolder) -> dict[str, str]:
    """Who was missing in which round or its evaluation, and why."""
    missing = {
        f"round {record['round']}": {**record["missing"], **record.get("unevaluated", {})}
        for record in folder.records()
    }
    return {name: "; ".join(why.values()) for name, why in missing.items() if why}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=PATIENCE)
    arguments = parser.parse_args()
    draw, killed = random.Random(arguments.seed), list[str]()
    spec = make_spec("fedper", {**SMALL, "clients": SITES, "rounds": arguments.rounds})
    with Deployment(arguments.folder / "deployment") as local, supervised(local):
        folder = submit.create(spec, arguments.folder / "run", POLICY)
        words = (local, folder, arguments.kills, draw, arguments.seconds)
        striker = threading.Thread(target=lambda: killed.extend(strike(*words)), daemon=True)
        striker.start()
        follow(local, folder)
        striker.join()
        found = result(folder, arguments.folder / "deployment" / "sites")
    left = leftovers(folder.path) + leftovers(arguments.folder / "deployment" / "sites")
    said = {"killed": killed, "result": found, "missing": absences(folder), "leftovers": left}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
