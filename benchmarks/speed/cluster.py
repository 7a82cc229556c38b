"""The ray engine against the parallel engine on one machine, and with 100,000 clients.

    python benchmarks/speed/cluster.py --out benchmarks/results/cluster.json

Linux only. Both engines have as many processes as there are cores and train the same clients; they
take turns, round by round, so that other load of the machine falls on both. A ratio is the
parallel engine's seconds divided by the ray engine's in the same round; above 1, ray is faster.
Memory is the peak of this process and of all that it has started, shared pages counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, peak_memory, spread

from fedhelix import Dataset, Federation
from fedhelix.engines.parallel.pool import cores
from fedhelix.federation.provenance import versions

SHORT = {"clients": 100, "cohort": 20, "epochs": 5, "model": "digits-cnn", "batch_size": 16}
LONG = SHORT | {"epochs": 25}
FEATURES, PER_CLIENT = 32, 8


def crowd(clients: int) -> dict[str, Any]:
    """Many clients with a few samples each, of which a thousand train in a round."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * PER_CLIENT, FEATURES, generator=draw)
    y = (x[:, :4].sum(1) > 0).long()
    owners = np.repeat(np.arange(clients), PER_CLIENT)
    data = Dataset("crowd", x, y, x[:1000], y[:1000], 2, owners=owners)
    return {"data": data, "partition": "natural", "cohort": 1000, "model": "mlp", "batch_size": 4}


def rounds(settings: dict[str, Any], engine: str, count: int) -> Iterator[float]:
    """The seconds of every round; the server's model is evaluated after the last one."""
    more = {"eval_clients": 0, "workers": cores(), "device": "cpu"} | settings
    fed = Federation(**more, engine=engine)
    for record, _ in fed.run_rounds(count, eval_every=count):
        yield record["seconds"]
    fed.close()


def race(settings: dict[str, Any], count: int, warm_up: int) -> dict[str, Any]:
    """Rounds of both engines in turn; the one that begins changes."""
    total = count + warm_up + 1  # the last round evaluates
    running = {name: rounds(settings, name, total) for name in ("parallel", "ray")}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for t in range(count + warm_up):
        for name in sorted(running, reverse=bool(t % 2)):
            seconds[name].append(next(running[name]))
    timed = {name: values[warm_up:] for name, values in seconds.items()}
    ratios = [one / other for one, other in zip(timed["parallel"], timed["ray"], strict=True)]
    for one in running.values():
        list(one)  # to its end
    return {"seconds": timed, "ratio": spread(ratios)}


def memory_of(settings: dict[str, Any]) -> dict[str, float]:
    """The peak memory of two rounds on Ray."""
    with peak_memory(os.getpid(), every=0.5) as peak:
        list(rounds(settings, "ray", 2))
    return peak


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cluster.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/speed/cluster.py",
        "machine": machine(),
        "versions": versions(),
    }
    for name, settings in {"short": SHORT, "long": LONG}.items():
        races = [race(settings, args.rounds, args.warm_up) for _ in range(args.repetitions)]
        middle = statistics.median(one["ratio"]["median"] for one in races)
        result[name] = {"settings": settings, "ratio": middle, "repetitions": races}
        print(name, middle, [one["ratio"] for one in races], flush=True)
    many = crowd(args.clients)
    result["many"] = {"clients": args.clients, "ratio": race(many, 3, 1)["ratio"]["median"]}
    result["many"] |= {"peak_memory_MiB": memory_of(many)}
    print("many", result["many"], flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
