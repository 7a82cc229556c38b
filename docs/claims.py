"""What the papers claim, as sentences about two figures of a study: `python docs/make.py` says
which of them hold.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


def at_least(ours: float, other: float) -> bool:
    """The usual claim."""
    return ours >= other


def at_most(ours: float, other: float) -> bool:
    """The claim of rounds: fewer are better."""
    return ours <= other


def _a_fifth(ours: float, other: float) -> bool:
    return ours <= other / 5


def _half(ours: float, other: float) -> bool:
    return ours <= other / 2


class Claim(NamedTuple):
    """A sentence about two places (row, column, measure) of a study, and when it holds."""

    study: str
    words: str
    ours: tuple[str, str, str]
    other: tuple[str, str, str]
    holds: Callable[[float, float], bool] = at_least
    excuse: Callable[[float], str] = lambda other: ""  # where there is nothing to claim
    where: str = ""  # one of several places that the sentence speaks of


def claims(paper: str, folder: Path) -> str:
    """What of a paper's claims holds in the results of a folder, as far as they are there."""
    evaluated = [
        (claim, found)
        for claim in CLAIMS[paper]
        if (found := evaluate_outputs(claim, folder)) is not None
    ]
    said = []
    for words, group in groupby(evaluated, key=lambda one: one[0].words):
        members = list(group)
        if not members[0][0].where:
            said += [f"* {verdict}: {words} {figures}.\n" for _, (verdict, figures) in members]
            continue
        said.append(f"* {words[0].upper()}{words[1:].removesuffix('.')}:\n")
        for verdict in dict.fromkeys(verdict for _, (verdict, _) in members):
            places = [
                f"{claim.where} ({figures})"
                for claim, (found, figures) in members
                if found == verdict
            ]
            said.append(f"    * {verdict}: {'; '.join(places)}.\n")
    return "".join(said) or "Not measured yet.\n"


def evaluate_outputs(claim: Claim, folder: Path) -> tuple[str, str] | None:
    """Whether a claim holds, and by which figures; seeds are paired. None where the study was not
    run.
    """
    path = folder / f"{claim.study}-gpu.json"
    if not path.exists():
        return None
    cells = {(cell["row"], cell["column"]): cell for cell in json.loads(path.read_text())["cells"]}
    places = [(cells.get(where[:2], {}), where[2]) for where in (claim.ours, claim.other)]
    by_seed = [
        {
            seed: math.inf if value is None else value
            for seed, value in zip(cell["seeds"], cell[measure]["by_seed"], strict=True)
            if value is not None or measure.startswith("rounds")  # which never come
        }
        for cell, measure in places
        if measure in cell
    ]
    common = sorted(set.intersection(*map(set, by_seed))) if len(by_seed) == 2 else []
    if not common:
        return None
    pairs = [[found[seed] for seed in common] for found in by_seed]
    one, other = map(statistics.fmean, pairs)
    verdict = claim.excuse(other) or ("Yes" if claim.holds(one, other) else "No")
    if claim.holds in (at_least, at_most) and _is_noise(
        [by_seed[0][seed] - by_seed[1][seed] for seed in common]
    ):
        verdict += ", but within the spread"
    figures = " against ".join(map(_figure, pairs))
    return verdict, f"{figures}, {len(common)} seed{'s' if len(common) > 1 else ''}"


def _plain(row: str) -> str:
    return row.replace(", no supplement", " without supplement")


def _figure(values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} seeds" if known else "never"
    return f"{statistics.fmean(values):.2f}"


def _is_noise(differences: list[float]) -> bool:
    """Whether two figures differ, seed by seed, by less than two standard errors; of one seed, by
    less than a point.
    """
    if len(differences) == 1:
        return abs(differences[0]) < 1
    if not all(map(math.isfinite, differences)):
        return False
    return (
        abs(statistics.fmean(differences))
        <= 2 * statistics.stdev(differences) / len(differences) ** 0.5
    )


_FASHION, _CHOSEN, _ROUNDS = "Fashion-MNIST", "chosen on validation", "rounds to target"
_STAYS = "rounds to stay there"
_UNTUNED, _ARRIVED = "before fine-tuning", "after one local training"
_FT = ("FedAvg-FT", "Fashion-MNIST 20", "accuracy")
_CHEAP = (
    "own upload", "mean of own uploads", "mean of own updates", "four nearest", "half-way to the four nearest",
    "own upload and noise",
)  # fmt: skip
_HARM = [
    f"{attack} {share} %"
    for attack in ("label flip", "mimic", "IPM", "4x sign flip", "adaptive")
    for share in (20, 40)
]
_LEVEL, _COLUMNS = "rounds to 90 % of FedAvg's best", ("MNIST", "SVHN", "Fashion-MNIST", "CIFAR-10")
_PAIRS = (
    ("GenFed (1)", "FedAvg, no supplement"),
    ("GenFed (1)", "FedAvg"),
    ("GenFedUmf (1)", "FedUmf"),
    ("GenFedAU (1)", "FedAU"),
)
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
                "known clients: GENE-FL is above the others.",
                ("GENE-FL", _SHARDS, _KNOWN),
                (row, _SHARDS, _KNOWN),
                where=row,
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
                "newcomers, last ten rounds: GENE-FL is above the others.",
                ("GENE-FL", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
                where=row,
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
                "newcomers: the paper's choice, four clusters and epsilon 0.5, is better than others.",
                ("K=4", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
                where=row,
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
                f"with other data or numbers of clients, {words}.",
                ("pFedGPA", column, measure),
                ("FedAvg-FT", column, "accuracy"),
                where=f"{column} clients",
            )
            for measure, words in (
                (_UNTUNED, "without fine-tuning pFedGPA is at FedAvg-FT's level"),
                ("accuracy", "after fine-tuning as in the paper pFedGPA is not below FedAvg-FT"),
            )
            for column in (
                f"{data} {count}"
                for data in ("Fashion-MNIST", "EMNIST", "CIFAR-10")
                for count in (10, 20, 100)
            )
            if column != "Fashion-MNIST 20"
        ),
        *(
            Claim(
                "pfedgpa-table2",
                "before fine-tuning inversion is at least 8 points better than direct generation.",
                ("inversion", column, _UNTUNED),
                ("no inversion", column, _UNTUNED),
                lambda ours, other: ours >= other + 8,
                where=column,
            )
            for column in ("Fashion-MNIST", "EMNIST", "CIFAR-10")
        ),
        *(
            Claim(
                "pfedgpa-rivals",
                f"on the {part} samples inversion of means beats its cheap rivals.",
                ("inversion of means", _FASHION, part),
                (rival, _FASHION, part),
                where=rival,
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
        *(
            Claim(
                "genfed-supplement",
                f"{name} {words} in at most {share} of {against}.",
                (row, column, measure),
                (other, column, measure),
                holds,
                where=network,
            )
            for measure, words in ((_ROUNDS, "touches 80 %"), (_STAYS, "reaches 80 % for good"))
            for row, name in (
                ("GenFed (1)", "GenFed (1)"),
                (
                    "GenFed (1) around FedAvgM 0.8",
                    "GenFed (1) around FedAvgM (momentum 0.8 on the server)",
                ),
            )
            for other, against, share, holds in (
                (
                    "FedAvg, no supplement",
                    "FedAvg without supplement",
                    "a fifth of the rounds",
                    _a_fifth,
                ),
                ("FedAvg", "FedAvg with the same supplement", "half of the rounds", _half),
            )
            for network, column in (
                ("small network", _FASHION),
                ("larger network", f"{_FASHION}, larger network"),
            )
        ),
        Claim(
            "genfed-supplement",
            "selection inside of FedAvgM (0.8) takes fewer rounds to 80 % than FedAvgM with the same supplement.",
            ("GenFed (1) around FedAvgM 0.8", _FASHION, _ROUNDS),
            ("FedAvgM 0.8", _FASHION, _ROUNDS),
            at_most,
        ),
        Claim(
            "genfed-supplement",
            "in the end GenFed (1) is above FedAvg with the same supplement.",
            ("GenFed (1)", _FASHION, "at the end"),
            ("FedAvg", _FASHION, "at the end"),
        ),
        *(
            Claim(
                "genfed-table2",
                f"with 10,000 pictures {ours} comes to nine tenths of FedAvg's best before {_plain(other)}, in rounds.",
                (ours, column, _LEVEL),
                (other, column, _LEVEL),
                at_most,
                where=column,
            )
            for ours, other in _PAIRS
            for column in _COLUMNS
        ),
        *(
            Claim(
                "genfed-table2",
                f"with 10,000 pictures {ours} is above {_plain(other)}, at the round chosen on validation.",
                (ours, column, _CHOSEN),
                (other, column, _CHOSEN),
                where=column,
            )
            for ours, other in _PAIRS
            for column in _COLUMNS
        ),
        *(
            Claim(
                "genfed-table4",
                "on CIFAR-10 with a fifth of attackers GenFed (1) loses less than FedAvg, in points.",
                ("GenFed (1)", harm, "change in points"),
                ("FedAvg", harm, "change in points"),
                where=harm,
            )
            for harm in ("label flip", "IPM", "mimic")
        ),
        *(
            Claim(
                study,
                "on CIFAR-10 GenFed (1) is above FedAvg.",
                ("GenFed (1)", column, _CHOSEN),
                ("FedAvg", column, _CHOSEN),
                where=words,
            )
            for study, column, words in (
                ("genfed-table5", "20", "20 clients"),
                ("genfed-table5", "180", "180 clients"),
                ("genfed-table6", "0.05", "Dirichlet 0.05"),
                ("genfed-table6", "5", "Dirichlet 5"),
            )
        ),
        *(
            Claim(
                "genfed-attacks",
                f"under attack {words} loses less than half of what FedAvg loses, in points.",
                (row, harm.replace(" %", "%"), "change in points"),
                ("FedAvg", harm.replace(" %", "%"), "change in points"),
                lambda ours, other: ours > other / 2,
                lambda other: "Nothing to halve" if other > -2 else "",
                where=harm,
            )
            for row, words in (
                ("GenFed, no copies", "GenFed, as it is by default,"),
                ("GenFed", "GenFed, as it is printed,"),
                ("GenFed, adaptive, no copies", "GenFed with the schedule that adapts by itself"),
            )
            for harm in _HARM
        ),
        *(
            Claim(
                "genfed-table2",
                f"{words} beats schedule {schedule}.",
                (row, column, _CHOSEN),
                (f"GenFed {schedule}", column, _CHOSEN),
                where=column,
            )
            for row, words, schedule in (
                ("GenFed, adaptive", "the schedule that adapts by itself", "(3)"),
                ("GenFed, adaptive", "the schedule that adapts by itself", "(4)"),
                ("GenFed (3), diverse", "a reward for diversity", "(3)"),
            )
            for column in _COLUMNS
        ),
    ],
}
