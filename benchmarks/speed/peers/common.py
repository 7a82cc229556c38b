"""The common part of all contestants of the CPU race: the workload and the link to the driver.

Needs PyTorch and NumPy only, so that it works inside the peers' virtual environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Workload:
    """Data, initial weights, cohorts and the order of every client's samples, from `cpu.py`.

    The images are mapped, not read: all processes share one copy, and each batch is normalised when
    it is used.
    """

    def __init__(self, folder: str):
        place = Path(folder)
        maps = {
            name: np.load(place / f"{name}.npy", mmap_mode="c")
            for name in ("x", "y", "x_test", "y_test")
        }
        self.x, self.y, self.x_test, self.y_test = (torch.from_numpy(maps[name]) for name in maps)
        settings = json.loads((place / "settings.json").read_text())
        self.batch_size, self.lr, self.epochs = (
            settings["batch_size"],
            settings["lr"],
            settings["epochs"],
        )
        self.cohorts: list[list[int]] = settings["cohorts"]
        self.shift, self.scale = torch.tensor(settings["mean"]), torch.tensor(settings["std"])
        with np.load(place / "orders.npz") as arrays:
            self.orders = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        with np.load(place / "weights.npz") as arrays:
            self.weights = {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def network(self) -> nn.Sequential:
        """The network of W1 and W2 with its initial weights."""
        net = nn.Sequential()
        net.add_module("conv1", nn.Conv2d(1, 10, 5))
        net.add_module("act1", nn.ReLU())
        net.add_module("pool1", nn.MaxPool2d(2))
        net.add_module("conv2", nn.Conv2d(10, 20, 5))
        net.add_module("act2", nn.ReLU())
        net.add_module("pool2", nn.MaxPool2d(2))
        net.add_module("flatten", nn.Flatten())
        net.add_module("fc1", nn.Linear(320, 50))
        net.add_module("fc1_act", nn.ReLU())
        net.add_module("fc2", nn.Linear(50, 10))
        net.load_state_dict(self.weights)
        return net

    def prepare(self, x: Tensor) -> Tensor:
        """Normalised pixels."""
        return (x.float() / 255 - self.shift) / self.scale

    def samples(self, t: int, client: int) -> int:
        """How many training samples a client of round t has."""
        return len(self.orders[f"{t}-{client}"]) // self.epochs

    def batches(self, t: int, client: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of a client's round."""
        for index in (
            self.orders[f"{t}-{client}"].view(self.epochs, -1)[epoch].split(self.batch_size)
        ):
            yield self.x[index], self.y[index]

    def train(self, net: nn.Module, t: int, client: int) -> None:
        """A client's round: plain SGD."""
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=self.lr)
        for epoch in range(self.epochs):
            for x, y in self.batches(t, client, epoch):
                loss = F.cross_entropy(net(self.prepare(x)), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @torch.no_grad()
    def accuracy(self, net: nn.Module) -> float:
        """On the whole test set."""
        net.eval()
        parts = [net(self.prepare(part)).argmax(1) for part in self.x_test.split(1000)]
        return float((torch.cat(parts) == self.y_test).float().mean())


@cache
def workload(folder: str) -> Workload:
    """The workload, read once per process."""
    return Workload(folder)


def apply(settings: dict[str, Any]) -> None:
    """Apply a contestant's settings of PyTorch."""
    torch.backends.mkldnn.enabled = settings["onednn"]
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])


class RaceClient:
    """A contestant's end of the pipe: a round runs only when the driver requests it."""

    def __init__(self, **facts: Any):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever else is printed goes to the log
        self.left, self.rounds, self.began = 0, [], 0.0
        self.send(facts)

    def send(self, message: Any) -> None:
        """Send a message to the driver."""
        print(json.dumps(message), file=self.out, flush=True)

    def begin_round(self) -> None:
        """Call at the start of a round: waits for its turn and starts the clock."""
        if not self.left:
            line = sys.stdin.readline()
            if not line:
                raise SystemExit  # the race is over
            self.left, self.rounds = int(line), []
        self.began = time.perf_counter()

    def end_round(self, accuracy: float | None) -> None:
        """Call at the end of a round, after the evaluation."""
        self.rounds.append((time.perf_counter() - self.began, accuracy))
        self.left -= 1
        if not self.left:
            self.send(self.rounds)
