"""The GPU races: the batched engine against a plain per-client loop on the same GPU.

    PYTHONPATH=src python benchmarks/speed/gpu.py --data-dir DIR --out FILE.json

Needs nothing but PyTorch and this source tree. The plain loop is a lower bound for any simulator
that trains one client after the other, since it has none of their bookkeeping.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from workloads import RESNET, W1, PlainLoop, federation, race, wait

from fedhelix import Dataset, Federation, load
from fedhelix.engines.batched.multirun import run_together
from fedhelix.federation.provenance import versions


def busy_share(fed: Federation) -> float:
    """The share of the slots' steps that tasks needed."""
    scheduler = fed.engine.scheduler
    return scheduler.steps_needed / scheduler.steps_taken


def sweep(data: Dataset, seeds: int, rates: list[float], rounds: int) -> dict[str, Any]:
    """Seeds x learning rates as one program, against as many plain loops, of which one is timed."""
    clock: list[float] = []

    def one(seed: int, lr: float, maker: Any) -> float:
        fed = federation(data, W1, seed=seed, lr=lr, device="cuda", engine=maker)
        for number, (record, _) in enumerate(fed.run_rounds(rounds)):
            if seed == 0 and lr == rates[0]:
                wait(fed.device)
                clock.append(time.perf_counter())
            if number == rounds - 1:
                return record["accuracy"]
        raise AssertionError

    runs = [partial(one, seed, lr) for seed in range(seeds) for lr in rates]
    accuracies = run_together(runs)
    ours = statistics.median([after - before for before, after in itertools.pairwise(clock[1:])])
    alone = federation(data, W1, device="cuda", engine="batched")
    loop = PlainLoop(alone)
    times = []
    for t in range(4):
        wait(alone.device)
        began = time.perf_counter()
        loop.round(t)
        wait(alone.device)
        times.append(time.perf_counter() - began)
    plain = len(runs) * statistics.median(times[1:])
    return {
        "runs": len(runs),
        "rounds": rounds,
        "seconds_per_round": {"ours": ours, "plain": plain},
        "ratio": plain / ours,
        "accuracy_after": accuracies,
    }


def main() -> None:
    """Run the races and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed-gpu.json"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    fashion, cifar = load("fashion-mnist", args.data_dir), load("cifar10", args.data_dir)
    report: dict[str, Any] = {
        "command": "python benchmarks/speed/gpu.py",
        "device": torch.cuda.get_device_name(),
        "versions": {**versions(), **({"commit": args.commit} if args.commit else {})},
    }
    for name, cohort, rounds, every in (
        ("w1", 10, args.rounds, 1),
        ("w1-100-clients", 100, args.rounds, 4),
    ):
        ours = federation(fashion, W1, cohort=cohort, device="cuda", engine="batched")
        report[name] = race(
            ours,
            federation(fashion, W1, cohort=cohort, device="cuda", engine="serial"),
            rounds,
            every,
        )
        report[name]["useful_share_of_steps"] = busy_share(ours)
        print(name, round(report[name]["ratio"], 1), report[name]["seconds_per_round"], flush=True)
    report["sweep"] = sweep(fashion, 5, [0.003, 0.005, 0.01, 0.02, 0.03, 0.05], args.rounds)
    print(
        "sweep",
        round(report["sweep"]["ratio"], 1),
        report["sweep"]["seconds_per_round"],
        flush=True,
    )
    for precision in ("float32", "bfloat16"):
        ours = federation(cifar, RESNET, device="cuda", engine="batched", precision=precision)
        plain = federation(cifar, RESNET, device="cuda", engine="serial")
        result = race(ours, plain, args.rounds)
        report[f"resnet18-{precision}"] = result
        ratio, accuracy = round(result["ratio"], 2), result["accuracy_after"]
        print("resnet18", precision, ratio, result["seconds_per_round"], accuracy, flush=True)
    report["peak_memory_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
