"""Helix with a bound on the length of updates, where local training may run away.

    python benchmarks/bounded.py [--out benchmarks/results/bounded.json]

The comparisons are ordinary commands, which the file records.
"""

from __future__ import annotations

from compared import main

COMMON = "fedhelix compare helix norm-bound+helix --set norm-bound.times=3 --seeds 10"
SETTINGS = {
    "defaults": "",
    "Dirichlet 0.1": "--partition dirichlet:0.1",
    "two classes": "--partition shard:2",
}

if __name__ == "__main__":
    commands = {name: f"{COMMON} {settings}".rstrip() for name, settings in SETTINGS.items()}
    main(__doc__ or "", "bounded", commands)
