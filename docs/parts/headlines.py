"""The papers' own claims, at most eight for each: what we compare, and what the paper prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parts.paper_claims import Claim, at_least, at_most


class Headline(NamedTuple):
    """A claim of a paper in some settings, the main one first, and the section that has all."""

    words: str
    claims: Sequence[Claim]
    more: str
    anchor: str
    measure: str = ""  # whose published values are shown; by default the one that is compared
    rival: str = ""  # the row of the rival's published values; by default the one that is compared
    printed: str = "no number"  # what the paper says where it prints no such values
    enough: int = 0  # in how many columns it must hold; in all of them by default


def in_columns(
    study: str,
    columns: Sequence[str],
    ours: str,
    other: str,
    measure: str,
    margin: Callable[[float, float], float] = at_least,
    where: str = "{}",
) -> list[Claim]:
    """A row against another one in some columns."""
    return [
        Claim(
            study,
            "",
            (ours, column, measure),
            (other, column, measure),
            margin,
            where=where.format(column),
        )
        for column in columns
    ]


def against(
    study: str, column: str, ours: str, others: Sequence[str], measure: str, where: str = "{}"
) -> list[Claim]:
    """A row against several others in one column."""
    return [
        Claim(
            study,
            "",
            (ours, column, measure),
            (other, column, measure),
            where=where.format(other),
        )
        for other in others
    ]


_DATA = ("CIFAR-10", "Fashion-MNIST", "SVHN", "MNIST")
_CHOSEN, _LEVEL = "chosen on validation", "rounds to 90 % of FedAvg's best"
_FULL = ("all samples", "all-samples-without-momentum")
_TABLE_2 = ("Table 2", "table-2-rounds-to-a-target-and-accuracy")
_PFEDGPA = ("CIFAR-10 100", "EMNIST 100", "Fashion-MNIST 100", "CIFAR-10 20")
_TABLE_1 = ("Table 1", "table-1-all-methods")
_INVERSION = ("Table 2", "table-2-with-and-without-inversion")
_THREE = ("CIFAR-10", "EMNIST", "Fashion-MNIST")
_C10, _NEW, _KNOWN = "C10 s=4", "accuracy of newcomers", "accuracy of the known"
_TABLE_VI = ("Table VI", "table-vi-hyperparameters")
_PRINTED = ("ParFed", "FedAvg", "FedBN", "FedLP")
_RESNET = ("ResNet-18", "resnet-18-on-all-images")

HEADLINES: dict[str, list[Headline]] = {
    "genfed": [
        Headline(
            "Fewer rounds than FedAvg without supplement",
            in_columns(
                *("genfed-full", _DATA, "GenFed (1)", "FedAvg, no supplement"),
                *("rounds to target", at_most),
            ),
            *_FULL,
            rival="FedAvg",
        ),
        Headline(
            "More accurate than FedAvg without supplement",
            in_columns("genfed-full", _DATA, "GenFed (1)", "FedAvg, no supplement", "at the end"),
            *_FULL,
            measure="best on test",
            rival="FedAvg",
        ),
        Headline(
            "Schedule (3) needs fewer rounds than (1)",
            in_columns("genfed-table2", _DATA, "GenFed (3)", "GenFed (1)", _LEVEL, at_most),
            *_TABLE_2,
            measure="rounds to target",
        ),
        Headline(
            "GenFedUmf: fewer rounds than FedUmf",
            in_columns("genfed-table2", _DATA, "GenFedUmf (1)", "FedUmf", _LEVEL, at_most),
            *_TABLE_2,
            measure="rounds to target",
        ),
        Headline(
            "GenFedAU: fewer rounds than FedAU",
            in_columns("genfed-table2", _DATA, "GenFedAU (1)", "FedAU", _LEVEL, at_most),
            *_TABLE_2,
            measure="rounds to target",
        ),
        Headline(
            "Loses less than FedAvg to attacks by a fifth, in percent",
            in_columns(
                "genfed-table4",
                ("label flip", "IPM", "mimic"),
                "GenFed (1)",
                "FedAvg",
                "change in percent",
            ),
            "Table 4",
            "table-4-attacks",
        ),
        Headline(
            "More accurate than FedAvg, many clients or few",
            in_columns(
                "genfed-table5",
                ("180", "100", "20"),
                "GenFed (1)",
                "FedAvg",
                _CHOSEN,
                where="{} clients",
            ),
            "Table 5",
            "table-5-number-of-clients",
            measure="best on test",
        ),
        Headline(
            "More accurate than FedAvg where clients differ much",
            in_columns(
                "genfed-table6",
                ("0.05", "0.1", "0.5"),
                "GenFed (1)",
                "FedAvg",
                _CHOSEN,
                where="alpha {}",
            ),
            "Table 6",
            "table-6-heterogeneity",
            measure="best on test",
        ),
    ],
    "pfedgpa": [
        *(
            Headline(
                f"More accurate than {rival}, after fine-tuning",
                in_columns("pfedgpa-table1", _PFEDGPA, "pFedGPA", rival, "accuracy"),
                *_TABLE_1,
            )
            for rival in ("FedAvg-FT", "FedBABU", "pFedHN")
        ),
        *(
            Headline(
                f"Inversion beats direct generation {when}",
                in_columns("pfedgpa-table2", _THREE, "inversion", "no inversion", when),
                *_INVERSION,
            )
            for when in ("before fine-tuning", "after fine-tuning")
        ),
        Headline(
            "Inversion fails less often (percent of clients below 60 %)",
            in_columns(
                "pfedgpa-figure4",
                ("Fashion-MNIST", "CIFAR-10"),
                "inversion, linear",
                "no inversion, linear",
                "% failed before fine-tuning",
                at_most,
            ),
            "Figure 4",
            "figure-4-client-by-client",
            printed="1 of 40 against about 3 of 20",
        ),
        Headline(
            "A guided newcomer starts better than from the average",
            in_columns(
                "pfedgpa-newcomers",
                ("Fashion-MNIST",),
                "guided",
                "average",
                "after one local training",
            ),
            "Newcomers",
            "newcomers",
        ),
        Headline(
            "A known generator starts a new federation better than random weights",
            in_columns(
                "pfedgpa-initialisation",
                ("Fashion-MNIST",),
                "guided",
                "random",
                "after one local training",
            ),
            "Newcomers",
            "newcomers",
        ),
    ],
    "gene-fl": [
        Headline(
            "Known clients: GENE-FL is more accurate than the others",
            [
                *against("gene-fl-full", _C10, "GENE-FL", _PRINTED, _KNOWN, "{}, ResNet-18"),
                *against("gene-fl-table1", _C10, "GENE-FL", _PRINTED, _KNOWN, "{}, small network"),
            ],
            *_RESNET,
        ),
        Headline(
            "Newcomers: GENE-FL is more accurate than the others",
            [
                *against(
                    *("gene-fl-full", _C10, "GENE-FL", ("ParFed", "FedBN", "FedLP"), _NEW),
                    "{}, ResNet-18",
                ),
                *against(
                    *("gene-fl-table3", _C10, "GENE-FL", ("ParFed", "FedBN", "FedLP", "FedLG")),
                    _NEW,
                    "{}, small network",
                ),
            ],
            *_RESNET,
        ),
        Headline(
            "Newcomers: inheriting a gene beats a random start",
            against("gene-fl-table3", _C10, "GENE-FL", ("alone, random start",), "at arrival"),
            "Table III",
            "table-iii-newcomers",
        ),
        Headline(
            "Newcomers: both losses help",
            against("gene-fl-table5", _C10, "full", ("without L_gen", "without L_elg"), _NEW),
            "Table V",
            "table-v-without-one-of-the-losses",
        ),
        Headline(
            "Newcomers: four clusters are best",
            against("gene-fl-table6", _C10, "K=4", ("K=1", "K=10"), _NEW),
            *_TABLE_VI,
        ),
        Headline(
            "Newcomers: epsilon 0.5 is best",
            against("gene-fl-table6", _C10, "K=4", ("epsilon=0.1", "epsilon=0.9"), _NEW),
            *_TABLE_VI,
        ),
    ],
}
