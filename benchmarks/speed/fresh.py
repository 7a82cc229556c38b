"""Twelve rounds of W1 in a fresh process, first round included: the batched engine on a machine
that has or has not run it before, against a plain loop.

    PYTHONPATH=src python benchmarks/speed/fresh.py --data-dir DIR --out FILE.json

Each contestant is a process of its own; its clock runs from the loaded data set to the last round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedhelix.federation.provenance import device_name, versions

ROUNDS = 12
FAR = 0.02  # accuracies that differ by more are no rounding
CONTESTANTS = ("plain", "first process", "second process", "third process")


def run(contestant: str, data_dir: str | None, device: str, rounds: int) -> dict[str, Any]:
    """Seconds of every round, the set-up in the first one."""
    from workloads import W1, PlainLoop, federation, wait

    from fedhelix import load

    plain, data = contestant == "plain", load("fashion-mnist", data_dir)
    seconds, began = [], time.perf_counter()
    engine = "serial" if plain or device == "cpu" else "batched"
    fed = federation(data, W1, device=device, engine=engine)
    loop, results = PlainLoop(fed) if plain else None, fed.run_rounds(rounds)
    for t in range(rounds):
        accuracy = loop.round(t) if loop else next(results)[0]["accuracy"]
        wait(fed.device)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return {"seconds": seconds, "total": sum(seconds), "accuracy_after": accuracy}


def main() -> None:
    """Run all contestants and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed-fresh.json"))
    parser.add_argument("--run", choices=CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args.run, args.data_dir, args.device, args.rounds)))
        return
    report: dict[str, Any] = {
        "command": "python benchmarks/speed/fresh.py",
        "device": device_name(args.device),
        "versions": versions(),
        "rounds": args.rounds,
    }
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        for name in CONTESTANTS:
            command = [sys.executable, *sys.argv, "--run", name]
            output = subprocess.run(command, env=environment, capture_output=True, text=True)
            if output.returncode:
                sys.exit(output.stderr)
            report[name] = json.loads(output.stdout.splitlines()[-1])
            print(name, round(report[name]["total"], 2), flush=True)
    accuracies = {name: report[name]["accuracy_after"] for name in CONTESTANTS}
    if max(accuracies.values()) - min(accuracies.values()) > FAR:
        sys.exit(f"they do not learn the same, so their times say nothing: {accuracies}")
    report["ratio"] = {
        name: report["plain"]["total"] / report[name]["total"] for name in CONTESTANTS[1:]
    }
    print(report["ratio"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
