"""pFedGPA's rows and columns: methods and data sets with their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedhelix.components.generative.generator import SizeName
from fedhelix.methods import PFedGPA, PFedHN
from fedhelix.papers.cells import Cell, Row, Scale
from fedhelix.papers.published import load
from fedhelix.runs.config import layered

TABLES = load("pfedgpa")
DATA = {"Fashion-MNIST": "fashion-mnist", "EMNIST": "emnist", "CIFAR-10": "cifar10"}
CLIENTS = (20, 10, 100)
# Generator sizes. The paper's takes a minute on a GPU, the next smaller one a quarter of that.
SIZES: Mapping[Scale, Sequence[SizeName]] = {
    "quick": ("fast",),
    "gpu": ("linear", "fast", "default", "paper"),
    "paper": ("linear", "fast", "default", "paper"),
}
# The paper's clients fine-tune with the learning rate of any other round.
AS_PRINTED = {"pfedgpa.ft_rate": 1.0, "fedbabu.ft_rate": 1.0}
QUICK = {"clients": 10, "cohort": 10, "rounds": 15, "pfedgpa.buffer_rounds": 10}


def prefixed(method: str, **options: Any) -> dict[str, Any]:
    """Options of a method as settings of a run."""
    return {f"{method}.{name}": value for name, value in options.items()}


METHODS = [
    Row("pFedGPA", "pfedgpa"),
    Row("FedAvg-FT", "fedavg-ft"),
    Row("FedAvg", "fedavg"),
    Row("Local-only", "local"),
    Row("FedPer", "fedper"),
    Row("FedRep", "fedrep"),
    Row("LG-FedAvg", "lg-fedavg"),
    Row("FedBABU", "fedbabu"),
    Row("pFedHN", "pfedhn"),
]
# The mean of a client's uploads tells more about it than its last upload alone. Generated models
# are so good that small steps improve them more; small steps are the default.
OURS = [
    Row("pFedGPA, of means", "pfedgpa", prefixed("pfedgpa", inverted="mean", inversion_samples=8)),
    Row("pFedGPA, small steps", "pfedgpa", {"pfedgpa.ft_rate": 0.1}),
    Row("FedAvg-FT, small steps", "fedavg-ft", {"fedavg-ft.ft_rate": 0.1}),
    Row("FedBABU, small steps", "fedbabu", {"fedbabu.ft_rate": 0.1}),
]
RIVALS: dict[str, dict[str, Any]] = {
    "reconstruction": {"generate": "reconstruct"},
    "inversion": {},
    "inversion, one training step": {"fit_steps": 1},
    "inversion in every round": {"mode": "online"},  # Algorithm 1 as printed
    "inversion of means": {"inverted": "mean", "inversion_samples": 8},
    "inversion of the four nearest": {"inverted": "near", "inversion_samples": 8},
    "no inversion": {"generate": "direct"},
    "own upload": {"generate": "own"},
    "own head on the averaged body": {"generate": "own", "slice": "last:1"},
    "mean of own uploads": {"generate": "own_mean", "learn": "upload"},
    "mean of own updates": {"generate": "own_mean"},
    "four nearest": {"generate": "neighbours"},
    "half-way to the four nearest": {"generate": "shrink"},
    "own upload and noise": {"generate": "noise", "amount": 0.2},
    "inversion from 100": {"inversion_start": 100},
    "inversion from 400": {"inversion_start": 400},
    "inversion from 1000": {"inversion_start": 1000},
    "inversion of means from 400": {
        "inverted": "mean",
        "inversion_samples": 8,
        "inversion_start": 400,
    },
    "inversion, fresh noise": {"inversion_mode": "fresh"},
    "inversion, DPM-Encoder": {"inversion_mode": "dpm_encoder"},
    "inversion of uploads": {"learn": "upload"},
    "inversion, one mean per tensor": {"learn": "upload", "normalise": "tensor"},
    "reconstruction, autoencoder": {"generate": "reconstruct", "size": "default"},
    "inversion, autoencoder": {"size": "default"},
}
# The shared model, whose outputs each client shifts by its own class shares.
SHIFTED = [
    Row("average", "fedavg"),
    Row("average, shifted by own class shares", "calibrated", {"calibrated.trained": False}),
    Row("average, trained and used with own class shares", "calibrated"),
]
STARTS: dict[str, dict[str, Any]] = {
    "guided": {"newcomer": "guide"},
    "trained alone as long": {"newcomer": "alone"},
    "guided from the initial model": {"newcomer": "guide", "guide_from": "random"},
    "guided once": {"newcomer": "guide", "guide_turns": 1},
    "nearest client": {"newcomer": "nearest"},
    "average": {"newcomer": "model"},
    "random": {"newcomer": "random"},
    "random, trained alone as long": {"newcomer": "alone", "guide_from": "random"},
}


def turns_of(cell: Cell) -> int:
    """How often a newcomer trains before its first round, in the dialogue of its arrival."""
    if cell.method == "pfedhn":
        return int(cell.settings.get("pfedhn.newcomer_turns", PFedHN.newcomer_turns))
    newcomer = cell.settings.get("pfedgpa.newcomer", PFedGPA.newcomer)
    if newcomer in ("guide", "alone"):
        return int(cell.settings.get("pfedgpa.guide_turns", PFedGPA.guide_turns))
    return 1 if newcomer == "nearest" else 0


def settings(scale: Scale, data: str, clients: int = 20) -> dict[str, Any]:
    """The settings of a data set at a scale."""
    if scale == "quick":
        return {**layered("pfedgpa.digits"), **AS_PRINTED, **QUICK}
    preset = layered(f"pfedgpa.{DATA[data]}")
    return {
        **preset,
        **AS_PRINTED,
        "clients": clients,
        "cohort": clients * 3 // 10 if clients == 100 else clients,
        "eval_every": preset["rounds"],
        "checkpoint_every": 100,  # the buffer of uploads makes checkpoints large
        **({"pfedgpa.size": "paper"} if scale == "paper" else {}),
    }


def fedpac_settings(scale: Scale, clients: int) -> dict[str, Any]:
    """EMNIST as FedPAC's code partitions it: 1,000 samples a client, remainders in one class."""
    return {**settings(scale, "EMNIST", clients), "partition": "fedpac:20"}


def data_sets(scale: Scale) -> list[str]:
    """The data sets of a scale."""
    return ["digits"] if scale == "quick" else list(DATA)


def inversion(way: str, **options: Any) -> Row:
    """pFedGPA with or without inversion."""
    generate = "invert" if way == "inversion" else "direct"
    return Row(way, "pfedgpa", prefixed("pfedgpa", generate=generate, **options))
