"""The ray engine with one and with two actors on one GPU, against `serial` and `batched`.

    NVIDIA_TF32_OVERRIDE=0 PYTHONPATH=src python benchmarks/speed/shared_gpu.py --data-dir DIR \\
        --out benchmarks/results/ray-gpu.json

Ray is told that the machine has two GPUs, and both actors see the one that there is. Every run is
two rounds on a part of Fashion-MNIST from the same seed. What is compared are the metrics of all
rounds and the parameters after the last one; without TF32, engines differ only in the order of
sums. Training magnifies that, so steps are short and few, and a second run of `serial` shows how
far a GPU differs from itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from fedhelix import Federation, load
from fedhelix.federation.provenance import device_name, versions

METHODS = ("fedavg", "fedavg-ft", "scaffold", "ditto", "helix")
ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"engine": "serial"},
    "serial again": {"engine": "serial"},
    "batched": {"engine": "batched"},
    "ray, one actor": {"engine": "ray", "workers": 1},
    "ray, two actors": {"engine": "ray", "workers": 2},
}
SETTINGS = {
    "partition": "dirichlet:0.3", "clients": 20, "cohort": 10, "epochs": 1, "batch_size": 32,
    "lr": 0.01, "model": "cnn",
}  # fmt: skip
MEASURES = ("accuracy", "personal_accuracy", "train_loss")
ROUNDS = 2
IMAGES = 12_800, 2_000  # for training and test


def run(data: Any, method: str, more: dict[str, Any]) -> dict[str, Any]:
    """Metrics and seconds of every round, and the server's parameters at the end."""
    fed = Federation(data, method=method, **SETTINGS, **more)
    records, seconds = [], []
    began = time.perf_counter()
    for record, state in fed.run_rounds(ROUNDS):
        records.append({name: record[name] for name in MEASURES if name in record})
        seconds.append(time.perf_counter() - began)
        server = state.server["model"]
        began = time.perf_counter()
    model = torch.cat([value.double().flatten().cpu() for value in server.values()])
    fed.close()
    return {"records": records, "seconds": seconds, "model": model}


def distance(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest difference of a metric in any round, and of the parameters, relative to them."""
    pairs = zip(one["records"], other["records"], strict=True)
    model, reference = one["model"], other["model"]
    return {
        "metrics": max(abs(mine[name] - theirs[name]) for mine, theirs in pairs for name in mine),
        "parameters": float((model - reference).norm() / reference.norm()),
    }


def main() -> None:
    """Run everything and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    import ray

    on_gpu = {"num_gpus": 2} if args.device == "cuda" else {}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, **on_gpu)
    data = load(args.data, args.data_dir).subsample(*IMAGES)
    report: dict[str, Any] = {
        "command": "python benchmarks/speed/shared_gpu.py",
        "device": device_name(args.device),
        "versions": versions() | {"ray": ray.__version__},
        "rounds": ROUNDS,
        "methods": {},
    }
    for method in METHODS:
        runs = {
            name: run(data, method, more | {"device": args.device})
            for name, more in ENGINES.items()
        }
        report["methods"][method] = {
            name: {
                "seconds": done["seconds"],
                "last": done["records"][-1],
                "from serial": distance(done, runs["serial"]),
            }
            for name, done in runs.items()
        }
        print(method, json.dumps(report["methods"][method]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
