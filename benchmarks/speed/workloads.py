"""The workloads of the races, and a plain loop that trains one client after the other."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fedhelix import Dataset, Federation, partition
from fedhelix.core.method import Phase
from fedhelix.core.tree import masked_mean
from fedhelix.engines.local import ClientTask, batch_schedule

W1 = {
    "clients": 100,
    "cohort": 10,
    "epochs": 5,
    "batch_size": 32,
    "lr": 0.01,
    "momentum": 0.0,
    "model": "w1-cnn",
}
W2 = {**W1, "clients": 1000, "cohort": 50, "epochs": 1}
RESNET = {
    "clients": 10,
    "cohort": 10,
    "epochs": 1,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "model": "resnet18",
}


def federation(data: Dataset, settings: dict[str, Any], **more: Any) -> Federation:
    """A federation that evaluates only the server's model on the test set, as the peers do."""
    settings = {**settings, **more}
    kind = partition.iid if settings["model"] == "resnet18" else partition.dirichlet
    alpha = {} if kind is partition.iid else {"alpha": 0.1}
    cut = kind(clients=settings.pop("clients"), valid=0.0, **alpha)
    return Federation(data, cut, eval_clients=0, **settings)


@dataclass
class PlainLoop:
    """FedAvg as a careful user writes it, with the batches of fedhelix.

    One module, torch.optim.SGD, data on the device.
    """

    fed: Federation

    def __post_init__(self) -> None:
        self.setup = self.fed.engine.setup
        self.model = {name: value.clone() for name, value in self.fed.initial.items()}

    def round(self, t: int) -> float:
        """One round with the evaluation of the global model; returns its accuracy."""
        setup, module = self.setup, self.setup.module
        uploads, weights = [], []
        for client in self.fed.cohort(t):
            module.load_state_dict(self.model, strict=False)  # frozen entries stay
            module.train()
            settings = setup.training
            optimizer = torch.optim.SGD(
                module.parameters(), lr=settings.lr, momentum=settings.momentum
            )
            schedule = batch_schedule(setup, ClientTask(client, t, {}, {}), Phase(), "batches")
            for samples, *_ in schedule.steps():
                index = samples.to(setup.device)
                loss = F.cross_entropy(
                    module(setup.data.prepare(setup.data.x[index])), setup.data.y[index]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            uploads.append(
                {
                    name: value.detach().clone()
                    for name, value in module.state_dict().items()
                    if name in self.model
                }
            )
            weights.append(len(setup.splits[client].train))
        self.model = masked_mean(uploads, weights, self.model)
        module.load_state_dict(self.model, strict=False)
        module.eval()
        with torch.no_grad():
            parts = [
                module(setup.data.prepare(part)).argmax(1) for part in setup.data.x_test.split(1000)
            ]
        return float((torch.cat(parts) == setup.data.y_test).float().mean())


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def race(ours: Federation, plain: Federation, rounds: int, every: int = 1) -> dict[str, Any]:
    """Rounds of both in turn; a very slow plain loop runs only in every `every`-th round."""
    loop, results = PlainLoop(plain), ours.run_rounds(rounds)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    accuracy: dict[str, float] = {}
    for t in range(rounds):
        wait(ours.device)
        began = time.perf_counter()
        record, _ = next(results)
        wait(ours.device)
        seconds["ours"].append(time.perf_counter() - began)
        accuracy["ours"] = record["accuracy"]
        if t % every == 0:
            began = time.perf_counter()
            accuracy["plain"] = loop.round(t)
            wait(ours.device)
            seconds["plain"].append(time.perf_counter() - began)
    # The first rounds include work that is done only once: graphs, kernels, workspaces.
    middle = {
        name: statistics.median(values[min(2, len(values) - 1) :])
        for name, values in seconds.items()
    }
    return {
        "rounds": rounds,
        "seconds_per_round": middle,
        "ratio": middle["plain"] / middle["ours"],
        "first_rounds": {name: values[:3] for name, values in seconds.items()},
        "all_seconds": seconds,
        # A plain loop that skipped rounds has learnt less and cannot be compared.
        "accuracy_after": accuracy if every == 1 else {"ours": accuracy["ours"]},
    }
