"""Further comparisons and targets of our own, each as a sentence about two values of a study."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Place = tuple[str, str, str]  # row, column and measure of a study


def at_least(ours: float, other: float) -> float:
    """The usual claim."""
    return ours - other


def at_most(ours: float, other: float) -> float:
    """The claim about rounds: fewer are better."""
    return other - ours


class Claim(NamedTuple):
    """A sentence about two values of a study; it holds where the margin is positive."""

    study: str
    words: str
    ours: Place
    other: Place
    margin: Callable[[float, float], float] = at_least
    excuse: Callable[[float], str] = lambda other: ""  # why the claim does not apply, if so
    where: str = ""  # which of several settings


def _plain(row: str) -> str:
    return row.replace(", no supplement", " without supplement")


_FASHION, _CHOSEN, _ROUNDS = "Fashion-MNIST", "chosen on validation", "rounds to target"
_STAYS = "rounds to stay there"
_UNTUNED, _ARRIVED = "before fine-tuning", "after one local training"
_FT = ("FedAvg-FT", "Fashion-MNIST 20", "accuracy")
_CHEAP = (
    "own upload",
    "mean of own uploads",
    "mean of own updates",
    "four nearest",
    "half-way to the four nearest",
    "own upload and noise",
)
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
            lambda ours, other: other / 4 - ours,
        ),
        *(
            Claim(
                "gene-fl-table1",
                "known clients: GENE-FL is more accurate than the others.",
                ("GENE-FL", _SHARDS, _KNOWN),
                (row, _SHARDS, _KNOWN),
                where=row,
            )
            for row in (*_OTHERS, "FedAvg-FT", "alone, random start")
        ),
        *(
            Claim(
                "gene-fl-table3",
                f"newcomers, {when}: inheriting a gene beats a random start.",
                ("GENE-FL", _SHARDS, when),
                ("alone, random start", _SHARDS, when),
            )
            for when in ("at arrival", "after 10 rounds")
        ),
        *(
            Claim(
                "gene-fl-table3",
                "newcomers, last ten rounds: GENE-FL is more accurate than the others.",
                ("GENE-FL", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
                where=row,
            )
            for row in (*_OTHERS, "FedAvg-FT", "alone, random start")
        ),
        *(
            Claim(
                study,
                f"{who}, all methods after one round's training: GENE-FL is ahead of the others.",
                ("GENE-FL", _SHARDS, measure),
                (row, _SHARDS, measure),
                where=row,
            )
            for study, who, measure in (
                ("gene-fl-table1", "known clients", "the known after one training"),
                ("gene-fl-table3", "newcomers", "newcomers after one training"),
            )
            for row in (*_OTHERS, "FedAvg-FT", "FedPer", "FedBABU", "alone, random start")
        ),
        *(
            Claim(
                "gene-fl-full",
                f"ResNet-18, {who}, after one round's training: GENE-FL is ahead of the others.",
                ("GENE-FL", _SHARDS, measure),
                (row, _SHARDS, measure),
                where=row,
            )
            for who, measure in (
                ("known clients", "the known after one training"),
                ("newcomers", "newcomers after one training"),
            )
            for row in ("FedAvg", "FedBN", "ParFed", "FedLP", "FedPer", "FedBABU", "FedAvg-FT")
        ),
        *(
            Claim(
                study,
                f"{who}: reading A is more accurate than reading B.",
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
                f"newcomers: GENE-FL is more accurate than GENE-FL {row}.",
                ("full", _SHARDS, _LATE),
                (row, _SHARDS, _LATE),
            )
            for row in ("without L_gen", "without L_elg")
        ),
        *(
            Claim(
                "gene-fl-table6",
                "newcomers: the paper's choice, four clusters and epsilon 0.5, beats the others.",
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
            "without fine-tuning, pFedGPA is more accurate than FedAvg-FT.",
            ("pFedGPA", "Fashion-MNIST 20", _UNTUNED),
            _FT,
        ),
        Claim(
            "pfedgpa-table1",
            "after fine-tuning as in the paper, pFedGPA is ahead of FedAvg-FT.",
            ("pFedGPA", "Fashion-MNIST 20", "accuracy"),
            _FT,
        ),
        *(
            Claim(
                "pfedgpa-table1",
                f"after fine-tuning in small steps (the default), pFedGPA is ahead of {words}.",
                ("pFedGPA, small steps", "Fashion-MNIST 20", "accuracy"),
                (row, "Fashion-MNIST 20", "accuracy"),
            )
            for row, words in (
                ("FedAvg-FT", "FedAvg-FT"),
                ("FedAvg-FT, small steps", "FedAvg-FT with small steps"),
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
                (_UNTUNED, "without fine-tuning, pFedGPA is more accurate than FedAvg-FT"),
                ("accuracy", "after fine-tuning as in the paper, pFedGPA is ahead of FedAvg-FT"),
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
                "before fine-tuning, inversion is at least 8 points better than direct generation.",
                ("inversion", column, _UNTUNED),
                ("no inversion", column, _UNTUNED),
                lambda ours, other: ours - other - 8,
                where=column,
            )
            for column in ("Fashion-MNIST", "EMNIST", "CIFAR-10")
        ),
        *(
            Claim(
                "pfedgpa-rivals",
                f"on the {part} samples, {words} beats the cheap baselines.",
                (row, _FASHION, part),
                (rival, _FASHION, part),
                where=rival,
            )
            for row, words in (
                ("inversion", "inversion by default"),
                ("inversion of means", "inversion of means"),
            )
            for part in ("validation", "test")
            for rival in _CHEAP
        ),
        *(
            Claim(
                "pfedgpa-newcomers",
                f"a guided newcomer is more accurate than one {words}.",
                ("guided", _FASHION, _ARRIVED),
                (row, _FASHION, _ARRIVED),
            )
            for row, words in (
                ("average", "that starts from the average, after one local training"),
                ("trained alone as long", "that has trained alone as long"),
            )
        ),
        Claim(
            "pfedgpa-initialisation",
            "a generator starts a new federation better than the average of the first one.",
            ("guided", _FASHION, _ARRIVED),
            ("average", _FASHION, _ARRIVED),
        ),
    ],
    "genfed": [
        *(
            Claim(
                "genfed-supplement",
                f"{name} {words} in at most {share} of {against}.",
                (row, column, measure),
                (other, column, measure),
                margin,
                where=network,
            )
            for measure, words in (
                (_ROUNDS, "first reaches 80 %"),
                (_STAYS, "settles at 80 % or more"),
            )
            for row, name in (
                ("GenFed (1)", "GenFed (1)"),
                (
                    "GenFed (1) around FedAvgM 0.8",
                    "GenFed (1) around FedAvgM (momentum 0.8 on the server)",
                ),
            )
            for other, against, share, margin in (
                (
                    "FedAvg, no supplement",
                    "FedAvg without supplement",
                    "a fifth of the rounds",
                    lambda ours, other: other / 5 - ours,
                ),
                (
                    "FedAvg",
                    "FedAvg with the same supplement",
                    "half of the rounds",
                    lambda ours, other: other / 2 - ours,
                ),
            )
            for network, column in (
                ("small network", _FASHION),
                ("larger network", f"{_FASHION}, larger network"),
            )
        ),
        Claim(
            "genfed-supplement",
            "GenFed (1) around FedAvgM (0.8) first reaches 80 % in fewer rounds "
            "than FedAvgM with the same supplement.",
            ("GenFed (1) around FedAvgM 0.8", _FASHION, _ROUNDS),
            ("FedAvgM 0.8", _FASHION, _ROUNDS),
            at_most,
        ),
        Claim(
            "genfed-supplement",
            "after the last round, GenFed (1) is more accurate than FedAvg with the same "
            "supplement.",
            ("GenFed (1)", _FASHION, "at the end"),
            ("FedAvg", _FASHION, "at the end"),
        ),
        *(
            Claim(
                "genfed-table2",
                f"with 10,000 images, {ours} reaches 90 % of FedAvg's best accuracy before "
                f"{_plain(other)}, in rounds.",
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
                f"with 10,000 images, {ours} is more accurate than {_plain(other)}, "
                "at the round chosen on validation.",
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
                "on CIFAR-10 with 20 % attackers, GenFed (1) loses less than FedAvg, in points.",
                ("GenFed (1)", harm, "change in points"),
                ("FedAvg", harm, "change in points"),
                where=harm,
            )
            for harm in ("label flip", "IPM", "mimic")
        ),
        *(
            Claim(
                study,
                "on CIFAR-10, GenFed (1) is more accurate than FedAvg.",
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
                f"under attack, {words} loses less than half as much as FedAvg, in points.",
                (row, harm.replace(" %", "%"), "change in points"),
                ("FedAvg", harm.replace(" %", "%"), "change in points"),
                lambda ours, other: ours - other / 2,
                lambda other: "Not applicable (FedAvg loses under 2 points)" if other > -2 else "",
                where=harm,
            )
            for row, words in (
                ("GenFed, no copies", "GenFed with its default options"),
                ("GenFed", "GenFed as printed in the paper"),
                ("GenFed, adaptive, no copies", "GenFed with the adaptive schedule"),
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
                ("GenFed, adaptive", "the adaptive schedule", "(3)"),
                ("GenFed, adaptive", "the adaptive schedule", "(4)"),
                ("GenFed (3), diverse", "a reward for diversity", "(3)"),
            )
            for column in _COLUMNS
        ),
    ],
}
