"""Too little GPU memory costs slots, not results.

PYTHONPATH=src python benchmarks/speed/out_of_memory.py --data-dir DIR --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch
from workloads import W1, federation

from fedhelix import load


def main() -> None:
    """Two rounds with all memory, and two with hardly any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir")
    parser.add_argument(
        "--limit", type=float, default=0.05, help="GiB that the second run may take"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/out-of-memory.json"))
    args = parser.parse_args()
    data = load("fashion-mnist", args.data_dir)
    runs, messages, slots = [], [], []
    for limit in (None, args.limit):
        if limit is not None:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory / 2**30
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() / 2**30 + limit) / total
            )
        fed = federation(data, {**W1, "epochs": 1}, cohort=100, device="cuda", engine="batched")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = fed.fit(2, quiet=True)
        messages = [str(warning.message) for warning in caught]
        runs.append(run)
        slots.append([cache.slots for cache in fed.engine.scheduler.caches.values()])
        accuracy = run.records[-1]["accuracy"]
        print("limit", limit, "GiB more; slots", slots[-1], "accuracy", accuracy, messages)
        fed.close()
    one, other = (run.state.server["model"] for run in runs)
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    report = {
        "command": f"python benchmarks/speed/out_of_memory.py --limit {args.limit}",
        "device": torch.cuda.get_device_name(),
        "warnings": messages,
        "clients_at_once_at_most": slots,
        "accuracy": [run.records[-1]["accuracy"] for run in runs],
        "largest_difference_of_any_weight": difference,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report)


if __name__ == "__main__":
    main()
