"""Our methods under PFLlib's protocol, beside the figures of its leaderboard.

    python benchmarks/pfllib.py [--rounds 300] [--minutes M] [--only METHOD ...] [--seeds 1 ...]
                                [--images N] [--lr 0.005] [--device auto] [--data-dir FOLDER]
                                [--jobs 1] [--runs FOLDER] [--out FILE.json]

All 70,000 images of Fashion-MNIST, split over 20 clients by Dirichlet 0.1 as PFLlib does (it draws
with seed 1, and so does this); 75 % of a client's images train and 25 % test. Its network and
settings: every client in every round, one epoch, batches of 10, a learning rate of 0.005 without
momentum. The score is the accuracy over all test images in the round where that is best, which is
PFLlib's choice and not ours. PFLlib trains for 2,000 rounds.

Runs are kept in a folder, so the same command goes on where it stopped, also with more rounds.
With `--minutes` all runs stop by then, after whatever round they are in. A result that is there
already keeps its rows of other methods and seeds. METHOD may have numbers: feddbe@kappa=50. A part
of the images, with a larger learning rate, is enough to compare settings on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measured import origin, write

from fedhelix import METHODS, Dataset, Federation, from_clients, load, partition
from fedhelix.federation.provenance import device_name
from fedhelix.models.cnn import Conv, plain_cnn
from fedhelix.store import RunFolder

IMAGES, CLIENTS, ALPHA, TRAINED, LEAST = 70_000, 20, 0.1, 0.75, 40
EVAL_EVERY = 5
# https://www.pfllib.com/benchmark.html: practical label skew, Fashion-MNIST.
PUBLISHED = {
    "fedavg": 85.85,
    "fedprox": 85.63,
    "pfedme": 97.25,
    "ditto": 97.47,
    "apfl": 97.25,
    "fedamp": 97.20,
    "fedala": 97.66,
    "fedper": 97.44,
    "fedrep": 97.56,
    "fedbabu": 97.46,
    "fedcp": 97.89,
    "gpfl": 97.81,
    "feddbe": 97.69,
    "fedproto": 97.40,
}
OURS = ("fedavg-ft", "helix")
# 5×5 convolutions of 32 and 64 channels, 512 features.
NETWORK = partial(plain_cnn, convs=[Conv(32, 5), Conv(64, 5)], hidden=[512])


class Job(NamedTuple):
    """One method's run."""

    method: str
    seed: int
    rounds: int
    images: int
    lr: float
    device: str
    data_dir: str | None
    runs: Path
    ends: float  # by the clock that all processes share


def owners(labels: np.ndarray, draw: np.random.RandomState) -> list[np.ndarray]:
    """The samples of each client: a class goes to clients by Dirichlet shares, but not to those
    that have the mean number of samples already; drawn again until nobody has too few.
    """
    while True:
        held: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(int(labels.max()) + 1):
            samples = draw.permutation(np.flatnonzero(labels == label))
            open_to = np.array([len(mine) < len(labels) / CLIENTS for mine in held])
            shares = draw.dirichlet(np.full(CLIENTS, ALPHA)) * open_to
            ends = (np.cumsum(shares / shares.sum()) * len(samples)).astype(int)[:-1]
            for mine, more in zip(held, np.split(samples, ends), strict=True):
                mine.extend(more.tolist())
        if min(map(len, held)) >= LEAST * len(labels) / IMAGES:
            return [draw.permutation(mine) for mine in held]


def federated(seed: int, images: int, data_dir: str | None) -> Dataset:
    """So many images of Fashion-MNIST as PFLlib deals them out."""
    pool = load("fashion-mnist", data_dir=data_dir)
    x, y = torch.cat([pool.x, pool.x_test]), torch.cat([pool.y, pool.y_test])
    if images < len(y):
        kept = torch.as_tensor(np.random.RandomState(0).permutation(len(y))[:images])
        x, y = x[kept], y[kept]
    train: list[tuple[torch.Tensor, torch.Tensor]] = []
    test: list[tuple[torch.Tensor, torch.Tensor]] = []
    for mine in owners(y.numpy(), np.random.RandomState(seed)):
        cut = int(TRAINED * len(mine))
        for parts, samples in ((train, mine[:cut]), (test, mine[cut:])):
            parts.append((x[samples], y[samples]))
    return from_clients(train, test, classes=10, mean=(0.5,), std=(0.5,))


def run(job: Job) -> dict[str, Any]:
    """One method's best round, by the accuracy over all test images."""
    torch.set_num_threads(1)
    data = federated(job.seed, job.images, job.data_dir)
    name, _, text = job.method.partition("@")
    numbers = dict(pair.split("=") for pair in text.split(",") if pair)
    method = METHODS[name](**{key: float(value) for key, value in numbers.items()})
    fed = Federation(
        data, partition.natural(valid=0.0), model=NETWORK, method=method, seed=job.seed,
        device=job.device, cohort=CLIENTS, epochs=1, batch_size=10, lr=job.lr, momentum=0.0,
    )  # fmt: skip
    out = job.runs / f"{job.method}-seed{job.seed}"

    def stop_in_time(_: dict[str, Any]) -> None:
        if time.time() > job.ends:
            raise KeyboardInterrupt

    # An interrupted run has a checkpoint, and its records are as good as a finished one's.
    with contextlib.suppress(KeyboardInterrupt):
        fed.fit(
            job.rounds, out=out, resume=(out / "checkpoint").exists(), quiet=True,
            eval_every=min(EVAL_EVERY, job.rounds), checkpoint_every=10 * EVAL_EVERY,
            watch=stop_in_time,
        )  # fmt: skip
    records = RunFolder.open(out).records()
    assert data.owners_test is not None
    sizes = np.bincount(data.owners_test)
    curve = {
        record["round"]: 100 * float(np.average(record["personal"], weights=sizes))
        for record in records
        if "personal" in record
    }
    best = max(curve, key=lambda number: curve[number], default=None)
    return {
        "method": job.method,
        "seed": job.seed,
        "accuracy": None if best is None else round(curve[best], 2),
        "round": best,
        "rounds": records[-1]["round"],
        "pfllib": PUBLISHED.get(name),
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "curve": {number: round(value, 2) for number, value in curve.items()},
    }


def finished(jobs: list[Job], workers: int) -> Iterator[dict[str, Any]]:
    """Results as they come."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, job) for job in jobs]):
            yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", nargs="+", default=[*PUBLISHED, *OURS], metavar="METHOD")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--data-dir")
    parser.add_argument("--jobs", type=int, default=1, help="methods that run at once")
    parser.add_argument("--runs", type=Path, default=Path("runs/pfllib"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pfllib.json"))
    arguments = parser.parse_args()
    ends = time.time() + 60 * arguments.minutes
    jobs = [
        Job(
            method, seed, arguments.rounds, arguments.images, arguments.lr, arguments.device,
            arguments.data_dir, arguments.runs, ends,
        )
        for method in arguments.only
        for seed in arguments.seeds
    ]  # fmt: skip
    about = {**origin(), "device": device_name(arguments.device)}
    rows = earlier(arguments.out)
    for row in finished(jobs, arguments.jobs):
        print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
        made = {key: about[key] for key in ("command", "commit", "device")}
        rows[row["method"], row["seed"]] = {**row, **made}
        order = [*PUBLISHED, *OURS, *sorted({method for method, _ in rows})]
        places = sorted(rows, key=lambda place: (order.index(place[0]), place[1]))
        settings = {"images": arguments.images, "lr": arguments.lr}
        write(arguments.out, {**about, **settings, "rows": [rows[place] for place in places]})


def earlier(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of a result that is there already, by method and seed."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["method"], row["seed"]): row for row in rows}


if __name__ == "__main__":
    main()
