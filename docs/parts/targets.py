"""Our own targets for Helix, and sentences whose numbers come from the result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from parts.headlines import Headline, against, in_columns
from parts.paper_claims import Claim

_END, _ROUNDS, _OWN = "at the end", "rounds to target", "personal accuracy"
_KNOWN, _NEW = "accuracy of the known", "accuracy of newcomers"
_FASHION, _C10 = "Fashion-MNIST", "C10 s=4"
_GENFED = ("GenFed's setting", "genfeds-setting")
_GENE_FL = ("GENE-FL's setting", "gene-fls-setting")
_ATTACKS = [
    f"{attack} {share}%"
    for attack in (
        "4x sign flip", "IPM", "label flip", "mimic", "ALIE", "min-max", "adaptive", "adaptive, top"
    )
    for share in (40, 20)
]  # fmt: skip
_DEFENCES = (
    "GenFed", "FedAvg", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median",
    "centred-clipping", "norm-bound", "nnm+krum", "nnm+trimmed-mean",
)  # fmt: skip
_RIVALS = (
    "FedAvg-FT, small steps", "FedBABU, small steps", "FedRep", "Ditto", "pFedGPA",
    "pFedGPA, small steps",
)  # fmt: skip
_COLD = "Helix, cold start"
_SELECTING = ("GenFed", "GenFed around FedAvgM")
_TABLE_1 = [
    f"{data} {clients}"
    for data in ("Fashion-MNIST", "EMNIST", "CIFAR-10")
    for clients in (10, 20, 100)
]


def _ahead_by(points: float, claims: Sequence[Claim]) -> list[Claim]:
    """The same claims with so many points more."""
    return [claim._replace(margin=lambda ours, other: ours - other - points) for claim in claims]


def _in_gene_fl(*rivals: str) -> list[Claim]:
    """Against rivals, for the known and for newcomers, with the small network and ResNet-18."""
    return [
        claim._replace(where=f"{rival}, {who}{network}")
        for rival, (network, column), (who, measure) in product(
            rivals,
            (("", _C10), (", ResNet-18", f"{_C10}, ResNet-18")),
            (("known", _KNOWN), ("newcomers", _NEW)),
        )
        for claim in against("helix-gene-fl", column, "Helix", [rival], measure)
    ]


TARGETS = [
    Headline(
        "80 % in a fifth of the rounds of FedAvg without server data",
        [
            claim._replace(margin=lambda ours, other: other / 5 - ours)
            for claim in in_columns(
                "helix-genfed", [_FASHION], "Helix", "FedAvg, no server data", _ROUNDS
            )
        ],
        *_GENFED,
        printed="a fifth",
    ),
    Headline(
        "80 % in half of the rounds of FedAvg with the supplement",
        [
            claim._replace(margin=lambda ours, other: other / 2 - ours)
            for claim in in_columns("helix-genfed", [_FASHION], "Helix", "FedAvg", _ROUNDS)
        ],
        *_GENFED,
        printed="half",
    ),
    Headline(
        "At the end above FedAvg, GenFed and GenFed around FedAvgM",
        _ahead_by(
            1,
            against(
                "helix-genfed",
                _FASHION,
                "Helix",
                ("FedAvg", "FedAvg, no server data", *_SELECTING),
                _END,
            ),
        ),
        *_GENFED,
        printed="by 1 point",
    ),
    Headline(
        "Without server data above FedAvg",
        _ahead_by(
            4,
            in_columns(
                "helix-genfed",
                [_FASHION, "CIFAR-10", "SVHN"],
                "Helix, no server data",
                "FedAvg, no server data",
                _END,
            ),
        ),
        *_GENFED,
        printed="by 4 points",
    ),
    Headline(
        "Attacks by 20 and 40 %: little below no attack",
        [
            Claim(
                "helix-attacks",
                "",
                ("Helix", attack, _END),
                ("Helix", "no attack", _END),
                lambda ours, other: ours - other + 2,
                where=attack,
            )
            for attack in _ATTACKS
        ],
        "Attacks",
        "attacks",
        printed="at most 2 points",
    ),
    Headline(
        "Attacks by 20 and 40 %: above GenFed, FedAvg and every defence",
        [
            claim._replace(where=f"{attack}, {claim.where}")
            for attack in _ATTACKS
            for claim in against("helix-attacks", attack, "Helix", _DEFENCES, _END)
        ],
        "Attacks",
        "attacks",
        printed="above all",
    ),
    Headline(
        "pFedGPA's Table 1: above every rival",
        [
            claim._replace(where=f"{column}, {claim.where}")
            for column in _TABLE_1
            for claim in against("helix-pfedgpa", column, "Helix", _RIVALS, _OWN)
        ],
        "pFedGPA's setting",
        "pfedgpas-setting",
        printed="in 6 of 9 columns",
        enough=6,
    ),
    Headline(
        "GENE-FL's Tables I and III: above GENE-FL",
        _ahead_by(8, _in_gene_fl("GENE-FL")),
        *_GENE_FL,
        printed="by 8 points",
    ),
    Headline(
        "GENE-FL's Tables I and III: above FedBABU, FedAvg-FT and ParFed",
        _in_gene_fl("FedBABU", "FedAvg-FT, small steps", "ParFed"),
        *_GENE_FL,
        printed="above all",
    ),
    Headline(
        "One bit per value is level with 32",
        _ahead_by(
            -1,
            [
                *in_columns("helix-genfed", [_FASHION], _COLD, f"{_COLD}, 32 bits", _END),
                *in_columns(
                    "helix-pfedgpa",
                    ["Fashion-MNIST 20", "EMNIST 20", "CIFAR-10 20"],
                    "Helix",
                    "Helix, 32 bits",
                    _OWN,
                ),
                *(
                    claim._replace(where=f"{_C10}, {who}")
                    for who, measure in (("known", _KNOWN), ("newcomers", _NEW))
                    for claim in in_columns(
                        "helix-gene-fl", [_C10], "Helix", "Helix, 32 bits", measure
                    )
                ),
            ],
        ),
        "Ablation",
        "ablation",
        printed="at most 1 point below",
    ),
    Headline(
        "Held-out data: above every rival",
        [
            *(
                claim._replace(where=f"SVHN, {claim.where}")
                for claim in against("helix-genfed", "SVHN", "Helix", ("FedAvg", *_SELECTING), _END)
            ),
            *(
                claim._replace(where=f"CIFAR-100, {claim.where}, {who}")
                for who, measure in (("known", _KNOWN), ("newcomers", _NEW))
                for claim in against(
                    "helix-gene-fl",
                    "C100 s=10",
                    "Helix",
                    ("GENE-FL", "FedBABU", "FedAvg-FT, small steps", "ParFed"),
                    measure,
                )
            ),
        ],
        *_GENE_FL,
        printed="above all",
    ),
]


def _ahead(
    folder: Path, study: str, ours: tuple[str, str], other: tuple[str, str], measure: str = _END
) -> list[float]:
    """How far one row and column is ahead of another, seed by seed."""
    sides = []
    for place in (ours, other):
        cell = _cell(folder, study, *place)
        sides.append(dict(zip(cell["seeds"], cell[measure]["by_seed"], strict=True)))
    return [sides[0][seed] - sides[1][seed] for seed in sides[0] if seed in sides[1]]


def _cell(folder: Path, study: str, row: str, column: str) -> dict[str, Any]:
    cells = json.loads((folder / f"{study}-gpu.json").read_text())["cells"]
    return next(cell for cell in cells if (cell["row"], cell["column"]) == (row, column))


def _range(values: Sequence[float]) -> str:
    """The least and the greatest in points, with signs, and the number of seeds."""
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
    ends = dict.fromkeys(f"{end:+.1f}" for end in (min(values), max(values)))
    return f"{' to '.join(ends)} points ({seeds})"


def found(folder: Path) -> str:
    """What else stands in the files of Helix."""
    momentum = _ahead(folder, "helix-genfed", ("Helix", _FASHION), ("FedAvgM 0.8", _FASHION))
    other = {
        (column, row): _range(_ahead(folder, "helix-genfed", ("Helix", column), (row, column)))
        for column in ("CIFAR-10", "SVHN")
        for row in ("FedAvg", "GenFed")
    }
    babu = [
        _ahead(folder, "helix-gene-fl", ("Helix", _C10), ("FedBABU", _C10), measure)
        for measure in (_KNOWN, _NEW)
    ]
    warm = [
        _ahead(folder, "helix-genfed", ("Helix", column), (_COLD, column))
        for column in (_FASHION, "CIFAR-10", "SVHN")
    ]
    rounds = {
        row: f"{_cell(folder, 'helix-genfed', row, _FASHION)[_ROUNDS]['mean']:.3g}"
        for row in ("Helix", _COLD, "FedAvg, warm start")
    }
    lines = [
        f"Against FedAvgM with the supplement, seeds differ: {_range(momentum)} at the end.",
        f"On CIFAR-10, Helix ends {other['CIFAR-10', 'FedAvg']} from FedAvg with the "
        f"supplement and {other['CIFAR-10', 'GenFed']} from GenFed; on SVHN, which was held out "
        f"when all defaults but the warm start were chosen, {other['SVHN', 'FedAvg']} and "
        f"{other['SVHN', 'GenFed']}.",
        "The warm start saves rounds, if the server's epochs are not counted "
        f"({_FASHION}: {rounds['Helix']} instead of {rounds[_COLD]} to 80 %; FedAvg with a warm "
        f"start takes {rounds['FedAvg, warm start']}), but changes little at the end: "
        f"{min(map(min, warm)):+.1f} to {max(map(max, warm)):+.1f} points against a cold start "
        "on three data sets.",
        f"Under attack, no seed loses more than {_harm(folder, 'Helix')}; with a cold start, "
        f"{_harm(folder, _COLD)}.",
        f"Against FedBABU in GENE-FL's setting: {_range(babu[0])} for the known and "
        f"{_range(babu[1])} for newcomers.",
        f"Uploads: {_ratio(folder, 'helix-genfed', _FASHION, 'FedAvg', 'uploads in MiB')} of "
        "FedAvg's in GenFed's setting; in GENE-FL's, "
        f"{_ratio(folder, 'helix-gene-fl', _C10, 'GENE-FL', 'uploads of the known in MiB')} of "
        "GENE-FL's and "
        f"{_ratio(folder, 'helix-gene-fl', _C10, 'FedBABU', 'uploads of the known in MiB')} of "
        "FedBABU's. The number of bits decides this, not the training.",
        "What a part is worth, in points of personal accuracy after a cold start: "
        f"{_ablation(folder)}.",
    ]
    return "".join(f"* {line}\n" for line in lines)


def _harm(folder: Path, row: str) -> str:
    """What the worst attack costs a row, and how many of them have been measured."""
    found = {
        attack: _ahead(folder, "helix-attacks", (row, "no attack"), (row, attack))
        for attack in _ATTACKS
    }
    harm = {attack: max(values) for attack, values in found.items() if values}
    worst = max(harm, key=lambda attack: harm[attack])
    seeds = max(map(len, found.values()))
    return (
        f"{harm[worst]:.1f} points ({worst}; {len(harm)} of {len(found)} attacks measured, "
        f"with up to {seeds} seed{'s' if seeds > 1 else ''})"
    )


def _ratio(folder: Path, study: str, column: str, row: str, measure: str) -> str:
    ours, other = (_cell(folder, study, name, column)[measure]["mean"] for name in ("Helix", row))
    return f"1/{other / ours:.0f}"


def _ablation(folder: Path) -> str:
    """Every part with the least and the greatest mean difference over the settings."""
    cells = json.loads((folder / "helix-ablation-gpu.json").read_text())["cells"]
    worth: dict[str, list[float]] = {}
    for cell in cells:
        mean = cell[f"{_COLD} ahead, {_OWN}"]["mean"]
        if cell["row"].startswith("without") and mean is not None:
            worth.setdefault(cell["row"].removeprefix("without "), []).append(mean)
    return ", ".join(
        f"{part} {min(values):+.1f} to {max(values):+.1f}" for part, values in worth.items()
    )
