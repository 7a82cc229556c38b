"""A transformer of ten million parameters with LoRA: the batched engine against a plain loop.

    PYTHONPATH=src python benchmarks/speed/lora.py

Twenty clients, all in every round, predict the next character of Python's own sources. Only the
adapters train and travel. Both sides train the same batches in turn; one process runs everything,
so run it on a GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from workloads import race

from fedhelix import Dataset, Federation, add_lora, partition
from fedhelix.federation.provenance import device_name, versions

SYMBOLS = 128
SIZES: dict[str, dict[str, int]] = {
    "full": {"width": 320, "blocks": 8, "heads": 8, "length": 64, "samples": 160, "clients": 20},
    "tiny": {"width": 32, "blocks": 2, "heads": 4, "length": 16, "samples": 32, "clients": 4},
}


class Block(nn.Module):
    """Causal self-attention and two linear layers, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of sequences."""
        inside = self.before(x)
        query, key, value = (
            layer(inside).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        later = torch.ones(x.shape[-2], x.shape[-2], device=x.device).triu(1) * -1e9
        found = ((scores + later).softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        x = x + self.out(found)
        return x + self.down(torch.relu(self.up(self.between(x))))


class Decoder(nn.Module):
    """The scores of all symbols as the next one."""

    def __init__(self, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """One row of scores per sequence."""
        return self.head(self.blocks(self.embedding(x) + self.places)[:, -1])


def windows(length: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random windows of a source file, and the character after each."""
    path = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    codes = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64) % SYMBOLS
    starts = np.random.default_rng(seed).integers(len(codes) - length, size=samples)
    rows = torch.from_numpy(codes[starts[:, None] + np.arange(length + 1)])
    return rows[:, :-1], rows[:, -1]


def federation(size: dict[str, int], engine: str, device: str) -> Federation:
    """Clients with equally many samples, who all take part."""
    clients, length = size["clients"], size["length"]
    train, test = windows(length, clients * size["samples"], 0), windows(length, 500, 1)
    data = Dataset("sources", *train, *test, classes=SYMBOLS)
    shape = {key: size[key] for key in ("width", "blocks", "heads", "length")}
    return Federation(
        data,
        partition.iid(clients=clients, valid=0.0),
        model=lambda: add_lora(Decoder(**shape), rank=8, layers=["query", "value"]),
        method="fedit", cohort=clients, eval_clients=0, epochs=1, batch_size=16, lr=0.05,
        momentum=0.9, engine=engine, device=device,
    )  # fmt: skip


def main() -> None:
    """Race, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed-lora.json"))
    args = parser.parse_args()
    size = SIZES[args.size]
    ours, plain = (federation(size, engine, args.device) for engine in ("batched", "serial"))
    module, layers = ours.engine.setup.module, ours.layers
    report: dict[str, Any] = {
        "command": f"python benchmarks/speed/lora.py --size {args.size} --rounds {args.rounds}",
        "device": device_name(args.device),
        "versions": versions(),
        "seeds": [0],
        "size": size,
        "parameters": sum(value.numel() for value in module.parameters()),
        "trainable": sum(layers.sizes[name] for name in layers.parameters),
    }
    print(json.dumps(report), flush=True)
    for rounds in (2, args.rounds):  # two rounds are kept should the longer race fail
        report["race"] = race(ours, plain, rounds)
        print(json.dumps(report["race"]), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
