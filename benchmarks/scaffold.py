"""SCAFFOLD with both kinds of control and several step sizes, against FedAvg, on digits.

    python benchmarks/scaffold.py [--out benchmarks/results/scaffold.json]

The comparisons are ordinary commands, which the file records.
"""

from __future__ import annotations

from compared import main

METHODS = {
    "FedAvg": "fedavg",
    "gradient": "scaffold",
    "steps": "scaffold --set scaffold.control=steps",
}
STEPS = {
    "the defaults (lr 0.1, momentum 0.5)": "",
    "lr 0.05, no momentum": "--lr 0.05 --momentum 0",
}
COMMON = "--partition dirichlet:0.1 --seeds 3 --rounds 30 --eval-every 30 --eval-clients 0"

if __name__ == "__main__":
    commands = {
        f"{steps}; {name}": f"fedhelix compare {method} {COMMON} {settings}".rstrip()
        for steps, settings in STEPS.items()
        for name, method in METHODS.items()
    }
    main(__doc__ or "", "scaffold", commands)
