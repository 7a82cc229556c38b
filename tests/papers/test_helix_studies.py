"""Helix's tables: settings at all scales, what defences are told, and intervals by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedhelix.papers import STUDIES
from fedhelix.papers.genfed.settings import ATTACKS, DEFENCES, KNOWING
from fedhelix.papers.helix.cells import ablation, in_bits, in_gene_fl, in_genfed, under_attack
from fedhelix.papers.verdicts import differences, interval

HELIX = [name for name in STUDIES if name.startswith("helix")]
SCALES = ("quick", "gpu", "paper")


def test_the_studies_are_there():
    assert HELIX == [
        "helix-genfed", "helix-attacks", "helix-pfedgpa", "helix-gene-fl", "helix-ablation",
        "helix-bytes",
    ]  # fmt: skip


@pytest.mark.parametrize("name", HELIX)
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_of_helix_can_be_set_up(name, scale, tmp_path):
    study = STUDIES[name]
    cells = study.specs(scale, tmp_path, {})
    names = [(cell.row, cell.column) for cell, _ in cells]
    assert len(set(names)) == len(names)
    assert any(spec.method.name == "helix" for _, specs in cells for spec in specs.values())
    for cell, specs in cells:
        assert len(specs) == study.seeds[scale] >= 3
        assert [spec.config.seed for spec in specs.values()] == list(range(len(specs)))
        assert all(spec.method.label == cell.method for spec in specs.values())


@pytest.mark.parametrize("scale", SCALES)
def test_every_study_has_the_row_that_others_are_compared_with(scale):
    for name in HELIX:
        study = STUDIES[name]
        cells = study.cells(scale)
        row = {"helix-bytes": "1 bit", "helix-ablation": "Helix, cold start"}.get(name, "Helix")
        assert {c.column for c in cells} == {c.column for c in cells if c.row == row}
        report = {
            "measures": list(study.measures),
            "cells": [
                {
                    "row": cell.row,
                    "column": cell.column,
                    "seeds": [0],
                    **{measure: {"by_seed": [1.0]} for measure in study.measures},
                }
                for cell in cells
            ],
        }
        study.finish(report)
        assert set(report["measures"]) > set(study.measures)


@pytest.mark.parametrize("scale", SCALES)
def test_defences_are_told_the_true_share(scale):
    cells = under_attack(scale)
    shares = set()
    for cell in cells:
        told = {key: value for key, value in cell.settings.items() if key.endswith(".withstand")}
        knowing = cell.method.rpartition("+")[2]
        if knowing not in KNOWING:
            assert told == {}
            continue
        share = cell.settings.get("attack_share", 0.2)
        assert told == {f"{knowing}.withstand": share}
        assert cell.column == "no attack" or cell.column.endswith(f" {share:.0%}")
        shares.add(share)
    assert shares == {0.2, 0.4}
    assert len(cells) == (4 + len(DEFENCES)) * (1 + 2 * len(ATTACKS))
    assert {cell.method for cell in cells} == {"helix", "genfed", "fedavg", *DEFENCES}


def test_a_defence_takes_what_it_is_told(tmp_path):
    for cell, specs in STUDIES["helix-attacks"].specs("quick", tmp_path, {}):
        method = next(iter(specs.values())).method
        inner = getattr(method, "inner", None)
        if cell.row in ("nnm+krum", "nnm+trimmed-mean"):
            method = inner
        if method.name in KNOWING and cell.column.endswith("40%"):
            assert method.withstand == 0.4


def test_attackers_do_not_know_the_servers_samples():
    assert all(cell.settings["validation_shared"] is False for cell in under_attack("gpu"))


def test_each_row_of_the_ablation_lacks_one_part():
    rows = {cell.row: dict(cell.settings) for cell in ablation("quick")}
    assert rows["without calibration"]["helix.tau"] == 0
    assert rows["without cull"]["helix.cull"] is False
    assert rows["without momentum"]["helix.server_momentum"] == 0
    assert rows["without ancestors"]["helix.ancestors"] == 0
    assert rows["without finish"]["helix.finish"] is False
    assert rows["Helix, cold start, 32 bits"]["helix.bits"] == 32
    own = {key: value for key, value in rows["Helix, cold start"].items() if "helix." in key}
    assert own == {"helix.warm_epochs": 0}


@pytest.mark.parametrize("name", ["helix-genfed", "helix-attacks", "helix-ablation", "helix-bytes"])
def test_names_say_how_helix_starts_where_the_server_has_samples(name, tmp_path):
    for cell, specs in STUDIES[name].specs("gpu", tmp_path, {}):
        spec = next(iter(specs.values()))
        if cell.method == "helix" and spec.config.validation_size:
            assert spec.method.warm_epochs == (10 if cell.row == "Helix" else 0)
            if name in ("helix-genfed", "helix-attacks"):
                assert cell.row == "Helix" or cell.row.startswith("Helix, cold start")


def test_bits_and_server_data():
    bits = {cell.row: cell.settings.get("helix.bits") for cell in in_bits("quick")}
    assert bits == {"32 bits": 32, "8 bits": 8, "4 bits": 4, "2 bits": 2, "1 bit": None}
    for cell in in_genfed("gpu"):
        without = cell.row.endswith("no server data")
        assert (cell.settings["validation_size"] == 0) == without
        assert (cell.settings["supplement_size"] == 0) == without
    assert {cell.column for cell in in_genfed("paper")} == {"Fashion-MNIST", "CIFAR-10", "SVHN"}
    assert len({cell.column for cell in in_gene_fl("paper")}) == 1


# Verdicts


def test_an_interval_by_hand():
    # Mean 2, deviation 1, error 1/√3 = 0.57735, and t(0.975, 2) = 4.3027: half a width of 2.4841.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx([2 - 2.4841, 2 + 2.4841], abs=1e-4)
    # t(0.95, 2) = 2.9200: 1.6859.
    assert interval([3.0, 1.0, 2.0], 0.9) == pytest.approx([2 - 1.6859, 2 + 1.6859], abs=1e-4)
    assert interval([5.0, 5.0]) == [5, 5]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, None], [1.0, 2.0, None]])
def test_no_interval_without_all_values(values):
    assert interval(values) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9), st.floats(0.5, 0.99))
def test_an_interval_is_scipys(values, level):
    low, high = interval(values, level)
    error = stats.sem(values)
    if error > 1e-9:
        expected = stats.t.interval(level, len(values) - 1, sum(values) / len(values), error)
        assert (low, high) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert low <= high


def cell(row, column, seeds, *values):
    return {"row": row, "column": column, "seeds": seeds, "best": {"by_seed": list(values)}}


def test_differences_are_paired_by_seed():
    report = {
        "measures": ["best"],
        "cells": [
            cell("Helix", "a", [0, 1, 2], 80.0, 90.0, 70.0),
            cell("FedAvg", "a", [2, 0, 1], 60.0, 78.0, 84.0),
            cell("Ditto", "a", [0, 7], 70.0, 50.0),
            cell("FedAvg", "b", [0, 1], 1.0, 2.0),
        ],
    }
    differences(report, "best", "Helix")
    name = "Helix ahead, best"
    assert report["measures"] == ["best", name]
    helix, fedavg, ditto, alone = (one[name] for one in report["cells"])
    assert helix["by_seed"] == [0, 0, 0] and helix["interval"] == [0, 0]
    # 70 - 60, 80 - 78, 90 - 84: mean 6, deviation 4, error 4/√3 = 2.3094, times 4.3027: 9.9365.
    assert fedavg["by_seed"] == [10, 2, 6] and fedavg["mean"] == 6
    assert fedavg["interval"] == pytest.approx([6 - 9.9365, 6 + 9.9365], abs=1e-3)
    # Seed 7 has no Helix, and column b none at all.
    assert ditto["by_seed"] == [10, None] and ditto["interval"] is None
    assert alone["by_seed"] == [None, None] and alone["interval"] is None
