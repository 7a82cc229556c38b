"""FedAU on clients that take part at unequal rates, with gentle and with long local training.

    python benchmarks/participation.py [--out benchmarks/results/participation.json]

The comparisons are ordinary commands, which the file records.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "speed"))
from measure import machine

from fedhelix.runs.provenance import versions

COMMON = "fedhelix compare fedavg fedau --participation bernoulli --seeds 3 --eval-every 10"
GENTLE = "--model linear --clients 50 --partition {} --lr 0.02 --epochs 1 --rounds 300"
SETTINGS = {
    "gentle": GENTLE.format("shard:1"),
    "gentle, two classes": GENTLE.format("shard:2"),
    "long": "--rounds 100",
}


def main() -> None:
    """Run the comparisons and write their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/participation.json"))
    args = parser.parse_args()
    report: dict[str, object] = {
        "command": "python benchmarks/participation.py",
        "machine": machine(),
        "versions": versions(),
    }
    for name, settings in SETTINGS.items():
        command = f"{COMMON} {settings}"
        with tempfile.TemporaryDirectory() as folder:
            words = [*command.split()[1:], "--json", "--quiet", "--out", f"{folder}/runs"]
            done = subprocess.run(
                [sys.executable, "-m", "fedhelix", *words], check=True, stdout=subprocess.PIPE
            )
        table = json.loads(done.stdout)
        report[name] = {"command": command, "table": table}
        print(name, [(row["method"], row["accuracy"]) for row in table], flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
