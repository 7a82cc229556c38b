"""Helix's rivals, table by table, and the settings in which they meet."""

from __future__ import annotations

from fedhelix.papers.cells import Column, Row, Scale
from fedhelix.papers.gene_fl import settings as gene_fl
from fedhelix.papers.genfed import settings as genfed
from fedhelix.papers.pfedgpa import settings as pfedgpa
from fedhelix.runs.config import layered

HELIX = Row("Helix", "helix")
FULL = Row("Helix, 32 bits", "helix", {"helix.bits": 32})
# The same without a warm start, which Helix has where the server has samples.
COLD = {"helix.warm_epochs": 0}
COLD_HELIX = Row("Helix, cold start", "helix", COLD)
COLD_FULL = Row("Helix, cold start, 32 bits", "helix", {**COLD, "helix.bits": 32})

# Tuned on Fashion-MNIST, CIFAR-10 and EMNIST in these settings; SVHN and CIFAR-100 were held out.
HELD_OUT = ("SVHN", "CIFAR-100")

PLAIN = {"helix.sharpen": 1.0}
NO_SERVER_DATA = {"supplement_size": 0.0, "validation_size": 0.0}
GENFED = [
    Row("FedAvg, no server data", "fedavg", NO_SERVER_DATA),
    Row("FedAvg", "fedavg"),
    Row("FedAvg, warm start", "warm-start"),
    Row("FedAvgM 0.8", "fedavgm", {"fedavgm.server_momentum": 0.8}),
    Row("GenFed", "genfed", {"genfed.twins": False}),
    Row(
        "GenFed around FedAvgM",
        "genfed+fedavgm",
        {"genfed.twins": False, "fedavgm.server_momentum": 0.8},
    ),
    HELIX,
    COLD_HELIX,
    COLD_FULL,
    Row("Helix, no server data", "helix", NO_SERVER_DATA),
    # The same shared models; personal ones without sharper class shares.
    Row("Helix, cold start, plain shares", "helix", {**COLD, **PLAIN}),
    Row("Helix, plain shares, no server data", "helix", {**PLAIN, **NO_SERVER_DATA}),
]

PFEDGPA = [
    Row("FedAvg-FT, small steps", "fedavg-ft", {"fedavg-ft.ft_rate": 0.1}),
    Row("FedBABU, small steps", "fedbabu", {"fedbabu.ft_rate": 0.1}),
    Row("FedRep", "fedrep"),
    Row("Ditto", "ditto"),
    Row("pFedGPA", "pfedgpa"),
    Row("pFedGPA, small steps", "pfedgpa", {"pfedgpa.ft_rate": 0.1}),
    FULL,
    HELIX,
]

GENE_FL = [
    Row("GENE-FL", "gene-fl"),
    Row("GENE-FL, no clusters", "gene-fl", {"gene-fl.clusters": 1}),
    Row("ParFed", "partialfed"),
    Row("FedAvg-FT", "fedavg-ft"),
    Row("FedAvg-FT, small steps", "fedavg-ft", {"fedavg-ft.ft_rate": 0.1}),
    Row("FedPer", "fedper"),
    Row("FedBABU", "fedbabu"),
    FULL,
    HELIX,
]

WITHOUT = [
    COLD_HELIX,
    Row("without calibration", "helix", {**COLD, "helix.tau": 0.0}),
    Row("without sharper shares", "helix", {**COLD, **PLAIN}),
    COLD_FULL,
    Row("without cull", "helix", {**COLD, "helix.cull": False}),
    Row("without momentum", "helix", {**COLD, "helix.server_momentum": 0.0}),
    Row("without ancestors", "helix", {**COLD, "helix.ancestors": 0.0}),
    Row("without finish", "helix", {**COLD, "helix.finish": False}),
    Row("FedAvg", "fedavg"),
]

CODES = [
    *(Row(f"{bits} bits", "helix", {**COLD, "helix.bits": bits}) for bits in (32, 8, 4, 2)),
    Row("1 bit", "helix", COLD),
]


def genfed_column(scale: Scale, data: str) -> Column:
    """GenFed's setting: preset `genfed.strong` on all samples."""
    if scale == "quick":
        strong = {**layered("genfed.strong"), **genfed.QUICK}
        return Column("digits", {**strong, "valid": 0.1})
    settings = {**layered("genfed.strong"), "data": genfed.DATA[data], "eval_clients": 20}
    return Column(data, settings)


def attacked_columns(scale: Scale) -> list[Column]:
    """GenFed's setting, where attackers do not know the samples on which models are scored."""
    base = {**genfed_column(scale, "Fashion-MNIST").settings, "validation_shared": False}
    if scale == "gpu":
        base |= {"model": "w1-cnn", "train_samples": 20_000, "test_samples": 5_000, "rounds": 80}
    return [
        Column("no attack", base),
        *(
            Column(f"{name} {share:.0%}", {**base, **attack, "attack_share": share})
            for name, attack in genfed.ATTACKS.items()
            for share in (0.2, 0.4)
        ),
    ]


def pfedgpa_columns(scale: Scale) -> list[Column]:
    """pFedGPA's Table 1."""
    if scale == "quick":
        return [Column("digits", pfedgpa.settings(scale, "digits"))]
    return [
        Column(f"{data} {clients}", pfedgpa.settings(scale, data, clients))
        for data in pfedgpa.DATA
        for clients in pfedgpa.CLIENTS
    ]


def more_gene_fl_columns(scale: Scale) -> list[Column]:
    """On a GPU, also held-out data, and the paper's network on all images."""
    if scale != "gpu":
        return []
    resnet = gene_fl.full_columns(scale)[0].settings
    return [gene_fl.column(scale, "C100 s=10"), Column("C10 s=4, ResNet-18", resnet)]


def gene_fl_columns(scale: Scale, eval_trained: bool = False) -> list[Column]:
    """GENE-FL's Tables I and III, first columns."""
    column = gene_fl.column(scale, "C10 s=4")
    return [Column(column.name, {**column.settings, "eval_trained": eval_trained})]
