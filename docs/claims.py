"""What the papers claim, as sentences about two figures of a study: `python docs/make.py` says which of them hold."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def at_least(ours: float, other: float) -> bool:
    """The usual claim."""
    return ours >= other


class Claim(NamedTuple):
    """A sentence about two places (row, column, measure) of a study, and when it holds."""

    study: str
    words: str
    ours: tuple[str, str, str]
    other: tuple[str, str, str]
    holds: Callable[[float, float], bool] = at_least
    excuse: Callable[[float], str] = lambda other: ""  # where there is nothing to claim


def claims(paper: str, folder: Path) -> str:
    """What of a paper's claims holds in the results of a folder, as far as they are there; seeds are paired."""
    said = []
    for claim in CLAIMS[paper]:
        path = folder / f"{claim.study}-gpu.json"
        if not path.exists():
            continue
        cells = {(cell["row"], cell["column"]): cell for cell in json.loads(path.read_text())["cells"]}
        places = [(cells.get(where[:2], {}), where[2]) for where in (claim.ours, claim.other)]
        by_seed = [
            {
                seed: value
                for seed, value in zip(cell["seeds"], cell[measure]["by_seed"], strict=True)
                if value is not None
            }
            for cell, measure in places
            if measure in cell
        ]
        common = sorted(set.intersection(*map(set, by_seed))) if len(by_seed) == 2 else []
        if not common:
            continue
        one, other = (statistics.fmean(found[seed] for seed in common) for found in by_seed)
        seeds = f"{len(common)} seed{'s' if len(common) > 1 else ''}"
        verdict = claim.excuse(other) or ("Yes" if claim.holds(one, other) else "No")
        if claim.holds is at_least and _is_noise([by_seed[0][seed] - by_seed[1][seed] for seed in common]):
            verdict += ", but within the spread"
        said.append(f"* {verdict}: {claim.words} {one:.2f} against {other:.2f}, {seeds}.\n")
    return "".join(said) or "Not measured yet.\n"


def _is_noise(differences: list[float]) -> bool:
    """Whether seeds differ more from each other than two figures do; of one seed, whether they are a point apart."""
    if len(differences) == 1:
        return abs(differences[0]) < 1
    return abs(statistics.fmean(differences)) <= statistics.stdev(differences) / len(differences) ** 0.5


_FASHION, _CHOSEN, _ROUNDS = "Fashion-MNIST", "chosen on validation", "rounds to target"
_UNTUNED, _ARRIVED = "before fine-tuning", "after one local training"
_FT = ("FedAvg-FT", "Fashion-MNIST 20", "accuracy")
_CHEAP = (
    "own upload", "mean of own uploads", "mean of own updates", "four nearest", "half-way to the four nearest",
    "own upload and noise",
)  # fmt: skip
_HARM = [
    f"{attack} {share} %" for attack in ("label flip", "mimic", "IPM", "4x sign flip", "adaptive") for share in (20, 40)
]
_SHARDS, _LATE = "C10 s=4", "accuracy of newcomers"
_KNOWN = "accuracy of the known"
_OTHERS = ("FedAvg", "FedBN", "ParFed", "FedFina", "FedLP", "FedLPS", "FedLG")
CLAIMS: dict[str, list[Claim]] = {
    "gene-fl": [
        Claim(
            "gene-fl-table1",
            "GENE-FL uploads at most a quarter of FedAvg's bytes, in MiB.",
            ("GENE-FL", _SHARDS, "MiB of all uploads"),
            ("FedAvg", _SHARDS, "MiB of all uploads"),
            lambda ours, other: ours <= other / 4,
        ),
        *(
            Claim(
                "gene-fl-table1",
                f"known clients: GENE-FL is above {row}.",
                ("GENE-FL", _SHARDS, _KNOWN),
                (row, _SHARDS, _KNOWN),
            )
            for row in (*_OTHERS, "FedAvg-FT", "alone, random start")
        ),
        *(
            Claim(
                "gene-fl-table3",
                f"newcomers, {when}: who inherits a gene is ahead of a random start.",
                ("GENE-FL", _SHARDS, when),
                ("alone, random start", _SHARDS, when),
            )
            for when in ("at arrival", "after 10 rounds")
        ),
        *(
            Claim(
                "gene-fl-table3",
                f"newcomers, last ten rounds: GENE-FL is above {row}.",
                ("GENE-FL", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
            )
            for row in (*_OTHERS, "FedAvg-FT", "alone, random start")
        ),
        *(
            Claim(
                study,
                f"{who}: reading A is above reading B.",
                ("GENE-FL, reading A", _SHARDS, measure),
                ("GENE-FL, reading B", _SHARDS, measure),
            )
            for study, who, measure in (
                ("gene-fl-table1", "known clients", _KNOWN),
                ("gene-fl-table3", "newcomers", _LATE),
            )
        ),
        *(
            Claim(
                "gene-fl-table5",
                f"newcomers: GENE-FL is above itself {row}.",
                ("full", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
            )
            for row in ("without L_gen", "without L_elg")
        ),
        *(
            Claim(
                "gene-fl-table6",
                f"newcomers: the paper's choice, four clusters and epsilon 0.5, is better than {row}.",
                ("K=4", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
            )
            for row in ("K=1", "K=10", "epsilon=0.1", "epsilon=0.9")
        ),
    ],
    "pfedgpa": [
        Claim(
            "pfedgpa-table1",
            "without fine-tuning pFedGPA is at FedAvg-FT's level.",
            ("pFedGPA", "Fashion-MNIST 20", _UNTUNED),
            _FT,
        ),
        Claim(
            "pfedgpa-table1",
            "after fine-tuning as in the paper pFedGPA is not below FedAvg-FT.",
            ("pFedGPA", "Fashion-MNIST 20", "accuracy"),
            _FT,
        ),
        *(
            Claim(
                "pfedgpa-table1",
                f"after fine-tuning in small steps, as it does by default, pFedGPA is not below {words}.",
                ("pFedGPA, small steps", "Fashion-MNIST 20", "accuracy"),
                (row, "Fashion-MNIST 20", "accuracy"),
            )
            for row, words in (
                ("FedAvg-FT", "FedAvg-FT"),
                ("FedAvg-FT, small steps", "FedAvg-FT that takes small steps too"),
            )
        ),
        *(
            Claim(
                "pfedgpa-table1",
                f"{column} clients, after fine-tuning as in the paper: pFedGPA is not below FedAvg-FT.",
                ("pFedGPA", column, "accuracy"),
                ("FedAvg-FT", column, "accuracy"),
            )
            for column in (
                f"{data} {count}" for data in ("Fashion-MNIST", "EMNIST", "CIFAR-10") for count in (10, 20, 100)
            )
            if column != "Fashion-MNIST 20"
        ),
        Claim(
            "pfedgpa-table2",
            "before fine-tuning inversion is at least 8 points better than direct generation.",
            ("inversion", _FASHION, _UNTUNED),
            ("no inversion", _FASHION, _UNTUNED),
            lambda ours, other: ours >= other + 8,
        ),
        *(
            Claim(
                "pfedgpa-rivals",
                f"on the {part} samples inversion of means beats the cheap rival '{rival}'.",
                ("inversion of means", _FASHION, part),
                (rival, _FASHION, part),
            )
            for part in ("validation", "test")
            for rival in _CHEAP
        ),
        *(
            Claim(
                "pfedgpa-newcomers",
                f"a guided newcomer is ahead of one {words}.",
                ("guided", _FASHION, _ARRIVED),
                (row, _FASHION, _ARRIVED),
            )
            for row, words in (
                ("average", "that starts from the average, after one local training"),
                ("trained alone as long", "that has trained alone as long"),
            )
        ),
    ],
    "genfed": [
        Claim(
            "genfed-supplement",
            "GenFed (1) reaches 80 % in at most a fifth of the rounds of FedAvg without supplement.",
            ("GenFed (1)", _FASHION, _ROUNDS),
            ("FedAvg, no supplement", _FASHION, _ROUNDS),
            lambda ours, other: ours <= other / 5,
        ),
        Claim(
            "genfed-supplement",
            "GenFed (1) reaches 80 % in at most half of the rounds of FedAvg with the same supplement.",
            ("GenFed (1)", _FASHION, _ROUNDS),
            ("FedAvg", _FASHION, _ROUNDS),
            lambda ours, other: ours <= other / 2,
        ),
        Claim(
            "genfed-supplement",
            "in the end GenFed (1) is above FedAvg with the same supplement.",
            ("GenFed (1)", _FASHION, _CHOSEN),
            ("FedAvg", _FASHION, _CHOSEN),
        ),
        *(
            Claim(
                "genfed-attacks",
                f"under {harm} {words} loses less than half of what FedAvg loses, in points.",
                (row, harm.replace(" %", "%"), "change in points"),
                ("FedAvg", harm.replace(" %", "%"), "change in points"),
                lambda ours, other: ours > other / 2,
                lambda other: "Nothing to halve" if other > -2 else "",
            )
            for row, words in (
                ("GenFed, no copies", "GenFed, as it is by default,"),
                ("GenFed", "GenFed, as it is printed,"),
            )
            for harm in _HARM
        ),
        *(
            Claim(
                "genfed-table2",
                f"on {column} {words} beats schedule (3).",
                (row, column, _CHOSEN),
                ("GenFed (3)", column, _CHOSEN),
            )
            for column in ("MNIST", _FASHION)
            for row, words in (
                ("GenFed, adaptive", "the schedule that adapts by itself"),
                ("GenFed (3), diverse", "a reward for diversity"),
            )
        ),
    ],
}
