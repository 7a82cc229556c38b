"""Batches of sequences cut to their longest, against all padded to the longest of the data set.

    python benchmarks/lengths.py [--rounds 3] [--out FILE]

Clients are files of Python's standard library, samples their lines as bytes. A small transformer
tells whether a line ends with a colon. Times are of the processor and the best of several rounds;
both ways take turns. The largest difference between the two models after the rounds is given, too.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measured import origin, write
from torch import Tensor, nn

from fedhelix import Federation, from_clients
from fedhelix.core.tree import flatten
from fedhelix.engines.local import batch_schedule
from fedhelix.engines.local.setup import ClientTask, Phase

CLIENTS = ("argparse", "calendar", "csv", "difflib", "heapq", "smtplib", "tarfile", "textwrap")
LINES, WIDTH = 200, 32
SETTINGS: dict[str, Any] = {"batch_size": 8, "epochs": 1, "lr": 0.05, "kernels": "onednn"}


class Reader(nn.Module):
    """A layer of self-attention that leaves out the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.attention(self.embedding(x)).chunk(3, 2)
        scores = (query @ key.transpose(1, 2)).masked_fill(~mask[:, None], -1e9) / WIDTH**0.5
        hidden = torch.relu(self.hidden(scores.softmax(2) @ value)) * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))


def lines(name: str) -> tuple[list[list[int]], list[int]]:
    """The lines of a module without their last character, and whether that is a colon."""
    text = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8")
    found = [line.encode() for line in text.splitlines() if len(line) > 1][:LINES]
    return [list(line[:-1]) for line in found], [int(line.endswith(b":")) for line in found]


def federation(engine: str, cuts: bool) -> Federation:
    data = from_clients([lines(name) for name in CLIENTS], name="lines")
    fed = Federation(data, model=Reader, engine=engine, seed=0, device="cpu", **SETTINGS)
    assert fed.engine.setup.cuts
    fed.change_setup(replace(fed.engine.setup, cuts=cuts))
    return fed


def compared(engine: str, rounds: int) -> dict[str, Any]:
    """Seconds of a round both ways, and how far their models are apart."""
    loops = {cuts: federation(engine, cuts).run_rounds(rounds) for cuts in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    models = {}
    for _ in range(rounds):
        for cuts, loop in loops.items():
            began = time.process_time()
            _, state = next(loop)
            seconds[cuts].append(time.process_time() - began)
            models[cuts] = flatten(state.server)
    apart = max(
        float((models[True][name] - models[False][name]).abs().max()) for name in models[True]
    )
    padded, cut = min(seconds[False]), min(seconds[True])
    return {
        "engine": engine,
        "padded_s": padded,
        "cut_s": cut,
        "faster": padded / cut,
        "apart": apart,
    }


def widths() -> dict[str, float]:
    """The width of all samples when padded, and the mean width of batches and of stacks."""
    setup = federation("serial", cuts=True).engine.setup
    clients = [
        batch_schedule(setup, ClientTask(client, 0, {}, {}), Phase(), "batches").widths or []
        for client in range(len(CLIENTS))
    ]
    batches = [width for one in clients for width in one]
    stacks = [max(step) for step in zip(*clients, strict=False)]
    assert setup.data.fields is not None and setup.data.fields.length is not None
    return {
        "padded": setup.data.fields.length,
        "batch": sum(batches) / len(batches),
        "stack": sum(stacks) / len(stacks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lengths.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {**origin(), "settings": SETTINGS, "widths": widths()}
    found["engines"] = [compared(engine, given.rounds) for engine in ("serial", "batched")]
    print(found["widths"], *found["engines"], sep="\n")
    write(given.out, found)


if __name__ == "__main__":
    main()
