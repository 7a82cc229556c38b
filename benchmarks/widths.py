"""Clients of three widths on digits.

    python benchmarks/widths.py [--rounds 30] [--seeds 3] [--out FILE]

Of twelve clients, every third has all, half or a quarter of the channels of `digits-bn-cnn`:
HeteroFL and FedRolex against networks of the same width that train alone. Then nobody has more than
half, and the whole network of both is evaluated.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhelix import Federation, FedRolex, HeteroFL, LocalOnly, Method, load
from fedhelix.federation.provenance import versions
from fedhelix.models.cnn import digits_bn_cnn
from fedhelix.store.records import Record

WIDTHS = (1.0, 0.5, 0.25)
CLIENTS, SAMPLES, TEST = 12, 60, 300
SETTINGS: dict[str, Any] = {
    "clients": CLIENTS, "cohort": CLIENTS, "epochs": 2, "batch_size": 16, "lr": 0.05,
    "engine": "batched", "kernels": "onednn",
}  # fmt: skip


def network(width: float) -> partial[torch.nn.Module]:
    return partial(digits_bn_cnn, width=width)


def trained(method: Method, width: float, seed: int, rounds: int) -> Record:
    """The last record of a run."""
    fed = Federation(
        load("digits").subsample(CLIENTS * SAMPLES, TEST, seed),
        "iid", model=network(width), method=method, seed=seed, **SETTINGS,
    )  # fmt: skip
    return fed.fit(rounds, eval_every=rounds, quiet=True).records[-1]


def by_width(seed: int, rounds: int) -> list[dict[str, Any]]:
    """Mean accuracy of the clients of each width on their own test samples, together and alone."""
    methods = HeteroFL(), FedRolex()
    together = {method.name: trained(method, 1.0, seed, rounds)["personal"] for method in methods}
    rows = []
    for place, width in enumerate(WIDTHS):
        alone = trained(LocalOnly(), width, seed, rounds)["personal"]
        means = {
            name: float(np.mean(found[place :: len(WIDTHS)]))
            for name, found in {**together, "alone": alone}.items()
        }
        rows.append({"seed": seed, "width": width, **means})
    return rows


def whole(seed: int, rounds: int) -> dict[str, Any]:
    """Accuracy of the whole network, where no client has all of it."""
    methods = HeteroFL(widths="0.5/0.25"), FedRolex(widths="0.5/0.25")
    found = {method.name: trained(method, 1.0, seed, rounds)["accuracy"] for method in methods}
    return {"seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/widths.json"))
    given = parser.parse_args()
    found: dict[str, Any] = {
        "command": f"python benchmarks/widths.py --rounds {given.rounds} --seeds {given.seeds}",
        "versions": versions(),
        "settings": {**SETTINGS, "samples": SAMPLES, "widths": WIDTHS},
        "widths": [row for seed in range(given.seeds) for row in by_width(seed, given.rounds)],
        "whole": [whole(seed, given.rounds) for seed in range(given.seeds)],
    }
    for row in found["widths"] + found["whole"]:
        print(row)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
