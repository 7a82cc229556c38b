"""The cost of a round of Helix relative to one of FedAvg, by engine, in processor time.

    FEDHELIX_DATA=DIR python benchmarks/speed/helix.py

Rounds of both take turns, without evaluation: 10 of 100 clients with unequal classes (W1) on
Fashion-MNIST, with five local epochs or one, and with some images of the server's own or none.
The cull scores as many models however long clients train, so short rounds are the hard case.
Processor time counts every process of the engine, so that the machine need not
be idle. A GPU's work is no processor time: there, `--clock wall` on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from measure import family, machine, processor_seconds, spread
from workloads import W1, federation, wait

from fedhelix import Dataset, Federation, load
from fedhelix.core.files import write_atomically
from fedhelix.core.registry import make
from fedhelix.federation.provenance import versions

ROOT = Path(__file__).parents[2]
METHODS = ("fedavg", "helix")
LIMIT = 1.25  # times FedAvg's round: what Helix may cost

Seconds = dict[str, list[float]]  # of every round, by method


def used(fed: Federation, clock: str) -> float:
    """Seconds so far, on the wall or of all processes of this one."""
    if clock == "wall":
        wait(fed.device)
        return time.perf_counter()
    children = [pid for pid in family(os.getpid()) if pid != os.getpid()]
    return time.process_time() + processor_seconds(children)


def timed(data: Dataset, settings: dict[str, Any], args: argparse.Namespace) -> Seconds:
    """Seconds of every round of both methods, which take turns."""
    feds = {
        name: federation(data, settings, method=make(name), device=args.device, seed=args.seed)
        for name in METHODS
    }
    # The last round would be evaluated, so it is not run.
    count = args.rounds + args.warm + 1
    runs = {name: fed.run_rounds(count, eval_every=count) for name, fed in feds.items()}
    seconds: Seconds = {name: [] for name in feds}
    for _ in range(args.rounds + args.warm):
        for name, run in runs.items():
            began = used(feds[name], args.clock)
            next(run)
            seconds[name].append(used(feds[name], args.clock) - began)
    for fed in feds.values():
        fed.close()
    return seconds


def compared(
    data: Dataset, engine: str, epochs: int, validation: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The same rounds several times; the fastest of each, which other programs disturbed least."""
    more = {"epochs": epochs, "engine": engine, "validation_size": validation}
    seconds = [timed(data, {**W1, **more}, args) for _ in range(args.repeats)]
    best = {
        name: [min(times) for times in zip(*(one[name] for one in seconds), strict=True)]
        for name in METHODS
    }
    counted = {name: values[args.warm :] for name, values in best.items()}
    return {
        **more,
        "seconds": {name: spread(values) for name, values in counted.items()},
        "ratio": sum(counted["helix"]) / sum(counted["fedavg"]),
        "all_seconds": seconds,
    }


def main() -> None:
    """Measure every combination and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["serial", "parallel", "batched"])
    parser.add_argument("--epochs", nargs="+", type=int, default=[5, 1])
    parser.add_argument("--validation", nargs="+", type=int, default=[1000, 0])
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each method")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest time of a round counts")
    parser.add_argument("--warm", type=int, default=1, help="rounds before, which do not count")
    parser.add_argument("--clock", choices=["processor", "wall"], default="processor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/helix-cost.json")
    args = parser.parse_args()
    data, rows = load(args.data), []
    for engine, epochs, images in itertools.product(args.engines, args.epochs, args.validation):
        rows.append(row := compared(data, engine, epochs, images, args))
        print(
            f"{engine}, {epochs} epochs, {images} images: {row['ratio']:.3f} times FedAvg",
            flush=True,
        )
    report = {
        "command": " ".join(["python benchmarks/speed/helix.py", *sys.argv[1:]]),
        "clock": args.clock,
        "data": args.data,
        "seeds": [args.seed],
        "rounds": args.rounds,
        "device": args.device,
        "machine": machine(),
        "versions": versions(),
        "runs": rows,
        "limit": LIMIT,
        "within_limit": all(row["ratio"] <= LIMIT for row in rows),
    }
    write_atomically(args.out, json.dumps(report, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
