"""FedAU on clients that take part at unequal rates, with gentle and with long local training.

    python benchmarks/participation.py [--out benchmarks/results/participation.json]

The comparisons are ordinary commands, which the file records.
"""

from __future__ import annotations

from compared import main

COMMON = "fedhelix compare fedavg fedau --participation bernoulli --seeds 3 --eval-every 10"
GENTLE = "--model linear --clients 50 --partition {} --lr 0.02 --epochs 1 --rounds 300"
SETTINGS = {
    "gentle": GENTLE.format("shard:1"),
    "gentle, two classes": GENTLE.format("shard:2"),
    "long": "--rounds 100",
}

if __name__ == "__main__":
    commands = {name: f"{COMMON} {settings}" for name, settings in SETTINGS.items()}
    main(__doc__ or "", "participation", commands)
