"""What many tests share: small federations, and comparisons of runs and trees."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import METHODS, Federation, Method, Run, partition
from fedhelix.core.tree import flatten, load
from fedhelix.data import Dataset

# Options that make a method cheap, for tests that hold for every method. Newcomers get what all
# have learnt together.
CHEAP: dict[str, dict[str, Any]] = {
    "fedala": {"first_epochs": 2},
    "pfedgpa": {"fit_steps": 5, "newcomer": "model"},
    "pfedhn": {"newcomer_turns": 1},
}


# Networks for methods that need something special.
NETWORKS = {"fedbn": "digits-bn-cnn"} | dict.fromkeys(
    ("fedit", "ffa-lora", "fedsa-lora", "flexlora"), "lora-mlp"
)


def cheap(name: str, **options: Any) -> Method:
    """A method by name."""
    return METHODS[name](**CHEAP.get(name, {}) | options)


def small(method: str | Method | None = None, model: Any = "linear", **more: Any) -> Federation:
    """Six clients on digits, three in a round; the slow engine, because it is the reference.

    Engines without workers ignore their number, so that tests can compare engines.
    """
    settings = {
        "data": "digits",
        "partition": "dirichlet:0.3",
        "cohort": 3,
        "epochs": 1,
    } | more
    if isinstance(settings["partition"], str) and settings["partition"] != "natural":
        settings = {"clients": 6} | settings
    settings = {"batch_size": 64, "engine": "serial", "kernels": "onednn"} | settings
    if settings["engine"] in ("serial", "batched") and isinstance(settings.get("workers"), int):
        del settings["workers"]
    return Federation(
        settings.pop("data"), settings.pop("partition"), model=model, method=method, **settings
    )


def two_quadratics(
    method: Method, slopes: tuple[float, float] = (1.0, 1.0), **more: Any
) -> Federation:
    """Two clients with the losses a² (w - 1)² and b² (w - 3)²; w starts at 0. A client has two
    equal samples x = slope, so that every epoch is one step of 0.1 along its whole gradient.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    x = torch.tensor(slopes).repeat_interleave(2)
    y = x * torch.tensor([1.0, 1, 3, 3])
    owners = torch.tensor([0, 0, 1, 1]).numpy()
    data = Dataset("quadratics", x[:, None], y, x[:, None], y, classes=None, owners=owners)
    usual = {"cohort": 2, "epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0}
    return small(method, model, data=data, partition=partition.natural(valid=0), **usual | more)


def timeless(records: list[dict]) -> list[dict]:
    """Records without what may differ between equal runs."""
    times = ("seconds", "start_seconds")
    return [{key: value for key, value in record.items() if key not in times} for record in records]


def agree(left: list[dict], right: list[dict]) -> bool:
    """Whether the records of two runs are equal, their numbers up to rounding."""

    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(alike, one, other))
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
        if isinstance(one, float) and isinstance(other, float):
            return bool(np.isclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True))
        return one == other

    return alike(timeless(left), timeless(right))


def on_disk(run: Path) -> list[dict]:
    """The records of a run folder, without seconds."""
    return timeless([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


def checkpoint(run: Path) -> dict[str, dict]:
    """The trees of a run's checkpoint, by who owns them."""
    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text())
    entries = {"server": manifest["server"], **manifest["clients"]}
    return {owner: load(run / "checkpoint" / entry["file"]) for owner, entry in entries.items()}


def fit_and_stop(fed: Federation, rounds: int, after: int, out: Path, **more: Any) -> None:
    """A fit that Ctrl-C ends after some of its rounds."""

    def stop(record: dict) -> None:
        if record["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fed.fit(rounds, out=out, quiet=True, watch=stop, **more)


def check_resumed(build: Callable[[], Federation], folder: Path, rounds: int, after: int) -> Run:
    """A run that is stopped, moved and resumed gives the straight run to the bit."""
    build().fit(rounds, out=folder / "straight", quiet=True)
    fit_and_stop(build(), rounds, after, folder / "part")
    shutil.copytree(folder / "part", folder / "moved")
    run = build().fit(rounds, out=folder / "moved", resume=True, quiet=True)
    assert len(on_disk(folder / "straight")) == rounds
    assert on_disk(folder / "moved") == on_disk(folder / "straight")
    assert same(checkpoint(folder / "moved"), checkpoint(folder / "straight"))
    return run


def same(left: dict, right: dict) -> bool:
    """Whether two trees are equal to the bit."""
    left, right = flatten(left), flatten(right)
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype and torch.equal(value, right[name])
        if isinstance(value, torch.Tensor)
        else value == right[name]
        for name, value in left.items()
    )


def close(left: dict, right: dict, tolerance: float = 1e-6) -> bool:
    """Whether two states are equal up to rounding."""
    return left.keys() == right.keys() and all(
        torch.allclose(value, right[name], rtol=tolerance, atol=tolerance)
        for name, value in left.items()
    )


def unseal(run: Path) -> None:
    """Make a run folder one without digests of its files, as folders were before there were any."""
    path = run / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_text())
    sealed = ("files", "metrics", "digest")
    path.write_text(json.dumps({key: manifest[key] for key in manifest if key not in sealed}))


def interpreted(program: str) -> None:
    """Run a program with Triton's interpreter in place of a GPU; it prints `fine` at its end."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr
