"""A gene across widths: half-width networks that inherit it, against new ones, on digits.

    python benchmarks/heirs.py [--networks digits-bn-cnn resnet18] [--rounds 10] [--seeds 3]
        [--device auto] [--out FILE]

Twelve clients train the whole network with GENE-FL: a quarter of it travels, other units in each
round (`gene_rotate`), with their BatchNorm. A newcomer has half its channels; it starts from what
it inherits (all that ever travelled but the head) or from new weights, and trains alone. Its
accuracy on the test samples is measured at arrival and after one and three rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhelix import Federation, GeneFL, from_clients, load
from fedhelix.core.objective import accuracy
from fedhelix.federation.provenance import device_name, versions
from fedhelix.models.cnn import digits_bn_cnn
from fedhelix.models.resnet import resnet18

NETWORKS = {"digits-bn-cnn": digits_bn_cnn, "resnet18": resnet18}
CLIENTS, SAMPLES, MINE, TEST = 12, 60, 120, 300
LATER = (1, 3)  # rounds after which the newcomer is evaluated again
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "lr": 0.05}
GENE: dict[str, Any] = {
    "clusters": 1, "gene_inherit": "body", "gene_granularity": "module", "gene_rotate": True
}  # fmt: skip


def measured(network: str, seed: int, rounds: int, device: str) -> dict[str, Any]:
    """The newcomer's accuracies, from the gene and from new weights."""
    make: Callable[..., nn.Module] = NETWORKS[network]
    data = load("digits").subsample(CLIENTS * SAMPLES + MINE, TEST, seed)
    mine = data.x[:MINE], data.y[:MINE]
    others = [(data.x[at::CLIENTS], data.y[at::CLIENTS]) for at in range(MINE, MINE + CLIENTS)]
    fed = Federation(
        others, model=lambda: make((1, 8, 8), 10), cohort=CLIENTS, seed=seed, device=device,
        method=GeneFL(**GENE), **SETTINGS,
    )  # fmt: skip
    run = fed.fit(rounds, eval_every=rounds, quiet=True)
    torch.manual_seed(seed)
    new = make((1, 8, 8), 10, width=0.5)
    starts = {"gene": run.inherit(new, mine), "new": new}
    judged = from_clients([mine], [(data.x_test, data.y_test)], name="newcomer")
    found: dict[str, Any] = {"network": network, "seed": seed}
    for name, module in starts.items():
        outputs = module.eval()(judged.prepare(judged.x_test))
        alone = Federation(
            judged, model=module, method="fedavg", seed=seed, device=device, **SETTINGS
        )
        records = alone.fit(max(LATER), quiet=True).records
        found[name] = [
            float(accuracy(outputs.detach(), judged.y_test)),
            *(records[later - 1]["accuracy"] for later in LATER),
        ]
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/heirs.json"))
    given = parser.parse_args()
    rows = [
        measured(network, seed, given.rounds, given.device)
        for network in given.networks
        for seed in range(given.seeds)
    ]
    found = {
        "command": f"python benchmarks/heirs.py --networks {' '.join(given.networks)} "
        f"--rounds {given.rounds} --seeds {given.seeds} --device {given.device}",
        "versions": versions(),
        "device": device_name(given.device),
        "settings": {**SETTINGS, **GENE, "clients": CLIENTS, "samples": SAMPLES, "newcomer": MINE},
        "rounds": [0, *LATER],
        "rows": rows,
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
