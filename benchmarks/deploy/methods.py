"""Methods on real processes, with TLS and keys, compared with the simulation of the same seed.

    python benchmarks/deploy/methods.py [METHOD ...]

GENE-FL has a newcomer, whose site is started after the second round. Writes
benchmarks/results/deploy-methods.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from fedhelix.core.tree import flatten
from fedhelix.deploy import submit
from fedhelix.deploy.localhost import LocalDeployment
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

RESULT = Path(__file__).parent.parent / "results" / "deploy-methods.json"
SITES, ROUNDS = 3, 4
SETTINGS: dict[str, dict] = {
    "fedavg": {},
    "fedper": {},
    "fedbn": {"model": "digits-bn-cnn"},
    "genfed": {},
    "gene-fl": {"method.clusters": 2, "newcomers": 1, "newcomers_after": 2},
    "pfedgpa": {
        "method.mode": "online",
        "method.warmup": 1,
        "method.fit_steps": 50,
        "method.online_steps": 50,
    },
}


def start_later(local: LocalDeployment, name: str, folder: RunFolder) -> None:
    """A site that connects when two rounds are done."""
    while len(folder.records()) < 2:
        time.sleep(0.2)
    local.sites[name].start()


def measure(local: LocalDeployment, name: str, out: Path) -> dict:
    spec = make_spec(name, {"clients": SITES, "rounds": ROUNDS, **SETTINGS[name]})
    folder = submit.create(spec, out / "sites", ["deadline=300"])
    newcomer = f"site-{SITES}"
    if spec.config.newcomers:
        threading.Thread(target=start_later, args=(local, newcomer, folder), daemon=True).start()
    with local.control() as control:
        submit.follow(control, folder, quiet=True)
    if spec.config.newcomers:
        local.sites[newcomer].stop()
    here = spec.config.federation(spec.method, engine="serial").fit(
        ROUNDS, out=out / "here", quiet=True
    )
    _, server, _ = folder.restore() or (0, {}, {})
    folder.close()
    one, other = flatten(server), flatten(here.state.server)
    assert one.keys() == other.keys()
    gaps = [
        float((value.double() - other[key].double()).abs().max())
        for key, value in one.items()
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    last, same = folder.records()[-1], here.records[-1]
    return {
        "method": name,
        "rounds": len(here.records),
        "missing": sum(len(record["missing"]) for record in folder.records()),
        "largest_difference_of_server_states": max(gaps),
        "personal_accuracy_sites": last["personal_accuracy"],
        "personal_accuracy_simulation": same["personal_accuracy"],
        "arrival_accuracy": [
            run[2].get("arrival_accuracy") for run in (folder.records(), here.records)
        ],
    }


def main(*wanted: str) -> None:
    rows = {row["method"]: row for row in json.loads(RESULT.read_text())} if RESULT.exists() else {}
    folder = Path(tempfile.mkdtemp(prefix="fedhelix-methods-"))
    try:
        local = LocalDeployment(folder / "deployment", sites=SITES + 1)
        # The newcomer's key is admitted, but its site does not start yet.
        newcomer = local.sites.pop(f"site-{SITES}")
        with local:
            local.sites[newcomer.name] = newcomer
            for name in wanted or SETTINGS:
                rows[name] = measure(local, name, folder / name)
                print(json.dumps(rows[name]), flush=True)
                RESULT.write_text(
                    json.dumps([rows[key] for key in SETTINGS if key in rows], indent=1) + "\n"
                )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
