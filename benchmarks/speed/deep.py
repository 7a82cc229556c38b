"""ResNet-18 on a GPU in GENE-FL's setting: the batched engine against a plain per-client loop.

    PYTHONPATH=src python benchmarks/speed/deep.py --data-dir DIR

All images of CIFAR-10, four classes per client, ten of 50 clients in a round, ten epochs, batches
of 64. One process runs everything in turn, so run it on a GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from workloads import PlainLoop, wait

from fedhelix import Federation
from fedhelix.federation.provenance import versions
from fedhelix.papers.gene_fl.settings import column
from fedhelix.runs.spec import make_spec

ROUNDS = 4


def federation(method: str, precision: str, data_dir: str | None, **more: Any) -> Federation:
    """GENE-FL's setting at the paper's scale."""
    settings = column("paper", "C10 s=4").settings
    mine = {key: value for key, value in settings.items() if key.split(".")[0] in (method, key)}
    run = {"device": "cuda", "engine": "batched", "precision": precision, "data_dir": data_dir}
    spec = make_spec(method, {**mine, **run, "eval_trained": False, **more})
    return spec.config.federation(spec.method)


def timed(fed: Federation, evaluate: bool) -> dict[str, Any]:
    """Seconds per round, per client step, and of an evaluation of all clients."""
    seconds: list[float] = []
    results = fed.run_rounds(ROUNDS, None, ROUNDS if evaluate else ROUNDS + 1)
    for _ in range(ROUNDS if evaluate else ROUNDS - 1):
        wait(fed.device)
        began = time.perf_counter()
        next(results)
        wait(fed.device)
        seconds.append(time.perf_counter() - began)
    plain = statistics.median(seconds[1 : ROUNDS - 1])
    steps = fed.engine.scheduler.steps_needed / (ROUNDS - 1) if not evaluate else None
    return {
        "seconds_per_round": seconds,
        **({"ms_per_client_step": 1000 * plain / steps} if steps else {}),
        **({"evaluation_seconds": seconds[-1] - plain} if evaluate else {}),
    }


def main() -> None:
    """Run everything and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed-deep.json"))
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/speed/deep.py",
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
    }
    loop, seconds = PlainLoop(federation("fedavg", "float32", args.data_dir, engine="serial")), []
    for t in range(2):
        began = time.perf_counter()
        loop.round(t)
        wait(loop.setup.device)
        seconds.append(time.perf_counter() - began)
    report["plain loop"] = {"seconds_per_round": seconds}
    print("plain loop", report["plain loop"], flush=True)
    for method, precision, evaluate, more in (
        ("fedavg", "float32", False, {}),
        ("fedavg", "bfloat16", False, {}),
        ("gene-fl", "bfloat16", False, {}),
        ("fedavg-ft", "bfloat16", True, {"fedavg-ft.ft_epochs": 1}),
        ("helix", "bfloat16", False, {}),
    ):
        name = f"{method} {precision}"
        report[name] = timed(federation(method, precision, args.data_dir, **more), evaluate)
        print(name, report[name], flush=True)
        torch.cuda.empty_cache()
    report["against the plain loop"] = {
        precision: seconds[-1]
        / statistics.median(report[f"fedavg {precision}"]["seconds_per_round"][1:])
        for precision in ("float32", "bfloat16")
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
