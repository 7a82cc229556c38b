"""pFedGPA's Table 1, the part that needs no generator: Fashion-MNIST, 20 clients, ours beside the paper's.

    PYTHONPATH=src python benchmarks/papers/pfedgpa_table1.py --data-dir DIR [--seeds 3] [--device cuda]

Setting: 20 clients, all in every round, 600 samples each (dominant classes), the 20,522-parameter network, 2 epochs,
batch 50, SGD 0.01 with momentum 0.5 and weight decay 5e-4, 200 rounds; accuracy of the final round, never the best.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from fedhelix.report.tables import comparison
from fedhelix.runs import jobs
from fedhelix.runs.config import layered, versions

PAPER = {
    "local": 84.89,
    "fedavg": 82.96,
    "fedavg-ft": 89.39,
    "fedper": 87.20,
    "fedrep": 88.27,
    "lg-fedavg": 85.25,
    "fedbabu": 88.86,
}
PRESET = "pfedgpa.fashion-mnist"


def main() -> None:
    """Run the methods and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(PAPER))
    parser.add_argument("--data-dir")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, help="keep the run folders here (a stopped benchmark goes on from them)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pfedgpa-table1-fashion-mnist.json"))
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    flags = {"data_dir": args.data_dir, "device": args.device, "rounds": args.rounds, "checkpoint_every": 50}
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        folders = jobs.compare(args.methods, layered(PRESET, None, flags), args.seeds, args.runs or Path(scratch) / "c")
        seconds = time.perf_counter() - began
        table = comparison(folders)
        finals = {folder.path.name: folder.summary for folder in folders}
    rows = {}
    for name in args.methods:
        row = table.loc[name]
        # FedAvg's number in the paper is that of its one model on each client's own test part.
        mean, error = 100 * row["personal_accuracy"], 100 * row["personal_accuracy_se"]
        by_seed = [100 * s["personal_accuracy"] for s in finals.values() if s and s["method"] == name]
        rows[name] = {"ours": mean, "standard_error": error, "by_seed": by_seed, "paper": PAPER.get(name)}
        print(f"{name:10} ours {mean:6.2f} ± {error:.2f}   paper {PAPER.get(name)}", flush=True)
    report = {
        "command": f"python benchmarks/papers/pfedgpa_table1.py {' '.join(args.methods)} --seeds {args.seeds}",
        "preset": PRESET,
        "rounds": args.rounds,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and args.device != "cpu" else "CPU",
        "versions": {**versions(), **({"commit": args.commit} if args.commit else {})},
        "table": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
