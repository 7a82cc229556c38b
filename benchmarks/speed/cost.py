"""The cost of a round: seconds and memory by cohort, clients in the federation, and model size.

    python benchmarks/speed/cost.py

Linux only, on the CPU, with synthetic data. Every point is a process of its own, so that its peak
of memory (from its start to its end, with all worker processes, shared pages counted once) is its
own too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, peak_memory, spread
from plot import draw_cost

from fedhelix import Dataset, Federation, partition
from fedhelix.federation.provenance import versions

ROOT = Path(__file__).parents[2]
GRAY, COLOUR, TABLE = (1, 28, 28), (3, 32, 32), (32,)  # shapes of a sample
BASE = {"clients": 1000, "cohort": 10, "samples": 20, "shape": GRAY, "model": "w1-cnn"}
MODELS = ("small-cnn", "lenet", "fedpac-cnn", "genfed-cnn", "resnet18")
CURVES: dict[str, list[dict[str, Any]]] = {
    "cohort": [{**BASE, "cohort": cohort} for cohort in (10, 30, 100, 300, 1000)],
    # Small samples, so that the number of clients dominates.
    "clients": [
        {**BASE, "clients": clients, "samples": 10, "shape": TABLE, "model": "mlp"}
        for clients in (100, 1000, 10_000, 100_000)
    ],
    "parameters": [
        {**BASE, "clients": 100, "cohort": 4, "shape": COLOUR, "model": model} for model in MODELS
    ],
}
LIMIT = 1024  # MiB that 100,000 clients may need more than 100


def synthetic(count: int, shape: tuple[int, ...], test: int = 200) -> Dataset:
    """Noise with ten classes: images of bytes, or tables of floats."""
    generator = torch.Generator().manual_seed(0)

    def noise(number: int) -> torch.Tensor:
        if len(shape) == 3:
            return torch.randint(0, 256, (number, *shape), generator=generator, dtype=torch.uint8)
        return torch.randn(number, *shape, generator=generator)

    labels = (torch.randint(0, 10, (number,), generator=generator) for number in (count, test))
    return Dataset("synthetic", noise(count), next(labels), noise(test), next(labels), 10)


def run_rounds(point: dict[str, Any]) -> dict[str, Any]:
    """The rounds of one point, in this process."""
    data = synthetic(point["clients"] * point["samples"], tuple(point["shape"]))
    fed = Federation(
        data,
        partition.iid(clients=point["clients"], valid=0.0),
        model=point["model"],
        cohort=point["cohort"],
        engine=point["engine"],
        device="cpu",
        eval_clients=0,
        epochs=1,
        batch_size=10,
        lr=0.01,
        momentum=0.0,
    )
    seconds, clock = [], time.perf_counter()
    for _ in fed.run_rounds(point["rounds"] + 1):
        seconds.append(time.perf_counter() - clock)
        clock = time.perf_counter()
    return {
        "parameters": sum(value.numel() for value in fed.initial.values()),
        "seconds": spread(seconds[1:]),
        "all_seconds": seconds,
    }


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own, watched from here."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--point", json.dumps(point)], stdout=subprocess.PIPE, text=True
    )
    with peak_memory(process.pid) as most:
        output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"the point {point} has failed")
    result = {**point, **json.loads(output), "peak_memory_MiB": most}
    name = f"{point['engine']} {point['model']} {point['clients']} clients"
    seconds = result["seconds"]["median"]
    print(
        f"{name}, {point['cohort']} per round: {seconds:.3f} s, {most['pss']:.0f} MiB", flush=True
    )
    return result


def main() -> None:
    """Measure every point, write the numbers and the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cost.json")
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds of a point, after one to warm up"
    )
    parser.add_argument("--engines", nargs="+", default=["serial", "parallel"])
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(run_rounds(json.loads(args.point))))
        return
    report: dict[str, Any] = {
        "command": "python benchmarks/speed/cost.py",
        "machine": machine(),
        "versions": versions(),
        "curves": {},
    }
    for curve in args.curves:
        report["curves"][curve] = [
            measure({**point, "engine": engine, "rounds": args.rounds})
            for engine in args.engines
            for point in CURVES[curve]
        ]
    few_and_many = {}
    for engine in args.engines if "clients" in args.curves else []:
        sizes = [
            point["peak_memory_MiB"]["pss"]
            for point in report["curves"]["clients"]
            if point["engine"] == engine
        ]
        few_and_many[engine] = sizes[-1] - sizes[0]
        more = f"{few_and_many[engine]:.0f} MiB more than 100"
        print(f"{engine}: 100,000 clients need {more} (limit: {LIMIT})")
    report["more_MiB_for_100000_clients_than_for_100"] = few_and_many
    report["under_1_GiB"] = all(more < LIMIT for more in few_and_many.values())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    draw_cost(report, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
