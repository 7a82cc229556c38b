"""The next character of Python's own source files, every file a client: perplexity and bytes.

    python benchmarks/characters.py [--rounds 10] [--seeds 3] [--out FILE]

A small transformer is trained on other files first, as a public model would be. From there FedAvg,
FedPer and Helix train all of it, FedIT adapters of rank 4 in its linear layers.

Of every file the first 70 % are for training, the next 10 % for validation and the rest for
testing. A method's learning rate is halved, then doubled, as long as its perplexity on the
validation part falls, at seed 0.
"""

from __future__ import annotations

import argparse
import json
import platform
import string
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedhelix import (
    Dataset,
    FedAvg,
    Federation,
    FedIT,
    FedPer,
    Helix,
    add_lora,
    from_clients,
    metrics,
)
from fedhelix.federation.provenance import versions
from fedhelix.models.text import Transformer

CLIENTS = (
    "argparse", "calendar", "csv", "difflib", "heapq", "smtplib", "statistics", "tarfile",
    "textwrap", "turtle",
)  # fmt: skip
PUBLIC = ("random", "shutil", "pdb", "optparse", "string", "inspect")
SYMBOLS, LENGTH, SAMPLES = string.printable, 24, 500
# Helix knows that the network is pretrained.
METHODS = {
    "fedavg": FedAvg(),
    "fedper": FedPer(),
    "helix": Helix(prior="initial"),
    "fedit": FedIT(),
}
FIRST_RATE = 0.001
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 25, "optimizer": "adam", "cohort": 5}
Part = Literal["train", "valid", "test"]
ENDS: dict[Part, tuple[float, float]] = {"train": (0, 0.7), "valid": (0.7, 0.8), "test": (0.8, 1)}


def windows(name: str, samples: int, part: Part = "train") -> tuple[np.ndarray, np.ndarray]:
    """Random windows of a part of a file, and the character after each."""
    path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    start, end = (int(len(text) * share) for share in ENDS[part])
    text = text[start:end]
    codes = np.array([max(SYMBOLS.find(symbol), 0) for symbol in text])
    draw = np.random.default_rng(len(text))
    starts = draw.choice(len(codes) - LENGTH, samples, replace=len(codes) < 2 * samples)
    rows = codes[starts[:, None] + np.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, -1]


@cache
def pretrained(seed: int) -> nn.Module:
    """The public model: 600 steps on the public files."""
    pairs = [windows(name, 2000) for name in PUBLIC]
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*pairs, strict=True))
    torch.manual_seed(seed)
    model = Transformer(LENGTH, len(SYMBOLS))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(600):
        rows = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def adapted(seed: int) -> Callable[[], nn.Module]:
    """A copy of the public model with adapters."""

    def make() -> nn.Module:
        model = Transformer(LENGTH, len(SYMBOLS))
        model.load_state_dict(pretrained(seed).state_dict())
        return add_lora(model, rank=4)

    return make


@torch.no_grad()
def before(data: Dataset, seed: int) -> float:
    """The public model's perplexity on the test samples of a client, the mean of all clients."""
    outputs = pretrained(seed)(data.x_test)
    rows = [torch.from_numpy(data.owners_test == owner) for owner in range(len(CLIENTS))]
    found = [metrics.perplexity(outputs[own], data.y_test[own]) for own in rows]
    return float(torch.stack(found).mean())


def measured(method: str, seed: int, rounds: int, lr: float, part: Part) -> dict[str, Any]:
    """One run: perplexities of the clients' personal models, and what was uploaded."""
    train = [windows(name, SAMPLES) for name in CLIENTS]
    judged = [windows(name, SAMPLES // 4, part) for name in CLIENTS]
    data = from_clients(train, judged, classes=len(SYMBOLS), name="sources")
    model = adapted(seed) if method == "fedit" else pretrained(seed)
    fed = Federation(
        data, model=model, method=METHODS[method], seed=seed, metric=metrics.neg_perplexity,
        engine="serial", kernels="onednn", lr=lr, **SETTINGS,
    )  # fmt: skip
    run = fed.fit(rounds, eval_every=5, quiet=True)
    scores = [record["personal_score"] for record in run.records if "personal_score" in record]
    found = {
        "method": method,
        "seed": seed,
        "lr": lr,
        "perplexity before": round(before(data, seed), 3),
        "perplexity": [round(-score, 3) for score in scores],
        "uplink_bytes": sum(record["uplink_bytes"] for record in run.records),
    }
    print(part, found, flush=True)
    return found


def tuned(method: str, rounds: int) -> list[dict[str, Any]]:
    """The validation runs of a method, the one with the best learning rate first."""
    best, *others = [measured(method, 0, rounds, FIRST_RATE, "valid")]
    for factor in (0.5, 2.0):
        while True:
            row = measured(method, 0, rounds, best["lr"] * factor, "valid")
            if row["perplexity"][-1] >= best["perplexity"][-1]:
                others.append(row)
                break
            others.append(best)
            best = row
        if best["lr"] < FIRST_RATE:
            break
    return [best, *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/characters.json"))
    given = parser.parse_args()
    tried = {name: tuned(name, given.rounds) for name in METHODS}
    found = {
        "command": f"python benchmarks/characters.py --rounds {given.rounds} --seeds {given.seeds}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": versions().get("commit"),
        "settings": {
            **SETTINGS,
            "clients": CLIENTS,
            "public": PUBLIC,
            "samples": SAMPLES,
        },
        "validation": tried,
        "rows": [
            measured(name, seed, given.rounds, tried[name][0]["lr"], "test")
            for seed in range(given.seeds)
            for name in METHODS
        ],
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
