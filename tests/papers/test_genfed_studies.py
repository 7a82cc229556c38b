"""GenFed's tables: rows and published numbers, shared runs, and comparisons by hand."""

import pytest

from fedhelix.papers.cells import Row
from fedhelix.papers.genfed import STUDIES
from fedhelix.papers.genfed.cells import (
    attacks,
    conditions,
    full,
    participation,
    table_2,
    table_3,
    table_4,
    table_5,
    table_6,
)
from fedhelix.papers.genfed.comparisons import LEVEL, relative_damage, relative_time
from fedhelix.papers.genfed.settings import CONTROLS, KNOWING, OURS, TABLES, paper_row
from fedhelix.papers.tables import grid


def test_rows_name_their_methods():
    for name, method, schedule in (
        ("GenFed (3)", "genfed", "linear"),
        ("GenFedUmf (5)", "genfed+fedumf", "wave"),
        ("GenFedAU (1)", "genfed+fedau", "constant"),
    ):
        assert paper_row(name) == Row(name, method, {"genfed.schedule": schedule})
    plain = [paper_row(name).method for name in ("FedAvg", "FedUmf", "FedAU")]
    assert plain == ["fedavg", "fedumf", "fedau"]


def test_the_papers_numbers_are_complete():
    table = TABLES["table2"]
    assert len(table.rows) == 18 and {len(values) for values in table.numbers.values()} == {72}
    assert TABLES["table5"].at("FedAvg", "180") == {"best on test": 44.931}
    cell = next(c for c in table_2("gpu") if (c.row, c.column) == ("GenFedAU (3)", "SVHN"))
    assert cell.paper == {"rounds to target": 60, "best on test": 92.894}


def test_time_in_table_3_is_rounds_in_table_2():
    rounds = TABLES["table2"].numbers["rounds to target"]
    for (row, column), ratio in TABLES["table3"].numbers["relative to FedAvg"].items():
        full = row if (row, column) in rounds else f"{row} (3)"
        assert abs(rounds[full, column] / rounds["FedAvg", column] - ratio) < 0.016


def test_tables_share_their_runs():
    def runs(cells):
        return {(cell.method, repr(sorted(cell.settings.items()))) for cell in cells}

    unattacked = [cell for cell in table_4("gpu") if cell.column == "no attack"]
    assert runs(table_3("gpu")) <= runs(table_2("gpu"))
    assert runs(unattacked) <= runs(table_2("gpu"))
    assert len(table_2("gpu")) == 4 * (18 + len(OURS))


def test_tables_4_to_6_have_controls():
    names = {row.name for row in CONTROLS}
    assert names == {"FedAvg, no supplement", "server's samples alone", "FedAvgM 0.8"}
    for table in (table_4, table_5, table_6):
        assert names <= {cell.row for cell in table("gpu")}
    alone = [cell for cell in table_4("gpu") if cell.row == "server's samples alone"]
    assert [cell.column for cell in alone] == ["no attack"]  # there is nobody to attack
    assert alone[0].settings["server_only"] and alone[0].settings["cohort"] == 1


def test_at_the_papers_scale_only_genfed_gives_supplements():
    for cell in [*table_2("paper"), *table_5("paper")]:
        given = cell.settings["supplement_size"] > 0
        alone = cell.row in ("FedAvg, same supplement", "server's samples alone")
        assert given == ("genfed" in cell.method and "no supplement" not in cell.row) or alone
        assert cell.settings["momentum"] == 0 and cell.settings["lr"] == 0.001
        assert cell.settings["supplement_below"] == 300 and cell.settings["validation_shared"]


@pytest.mark.parametrize("scale", ["quick", "gpu"])
def test_defences_are_told_the_true_share_and_in_other_rows_the_wrong_one(scale):
    shares = set()
    for cell in attacks(scale):
        knowing = cell.method.rpartition("+")[2]
        if knowing in KNOWING and cell.column != "no attack":
            share = cell.settings["attack_share"]
            told = cell.settings[f"{knowing}.withstand"]
            assert (told == share) == (not cell.row.endswith("wrong share"))
            shares.add((share, told))
    assert shares == {(0.2, 0.2), (0.4, 0.4), (0.2, 0.4), (0.4, 0.2)}
    assert all("carry" not in key for cell in attacks(scale) for key in cell.settings)


def test_rates_by_class_are_those_of_fedaus_paper():
    by_class = [cell for cell in participation("gpu") if cell.column.endswith("by class")]
    assert {cell.method for cell in by_class} >= {"fedau", "fedumf", "genfed+fedau"}
    assert all(cell.settings["participation"] == "classes" for cell in by_class)


def test_rounds_are_counted_to_nine_tenths_of_fedavgs_best_of_the_same_seed():
    def cell(row, *by_seed):
        return {
            "row": row,
            "column": "MNIST",
            "seeds": [0, 1],
            "accuracy_curve": {"rounds": [5, 10, 15], "by_seed": by_seed},
        }

    slow = cell("FedAvg", [0.2, 0.5, 0.4], [0.1, 0.2, 0.9])
    fast = cell("GenFed", [0.46, 0.5, 0.6], [0.2, 0.81, 0.82])
    never = cell("FedAU", [0.4, 0.44, 0.44], [0.9, 0.9, 0.9])
    report = {"scale": "gpu", "measures": [], "cells": [slow, fast, never]}
    relative_time(report)
    rounds = [cell[LEVEL]["by_seed"] for cell in report["cells"]]
    assert rounds == [[10, 15], [5, 10], [None, 5]]
    assert fast["relative to FedAvg"]["by_seed"] == pytest.approx([0.5, 2 / 3])
    assert fast["relative to FedAvg"]["paper"] == 0.07
    assert never["relative to FedAvg"]["mean"] is None  # one seed never reached the level


def test_damage_is_relative_as_in_the_paper():
    def cell(column, *by_seed):
        return {
            "row": "GenFed (1)",
            "column": column,
            "seeds": [0, 1],
            "chosen on validation": {"by_seed": by_seed},
        }

    report = {
        "scale": "gpu",
        "measures": [],
        "cells": [cell("no attack", 50.0, 40.0), cell("label flip", 45.0, 38.0)],
    }
    relative_damage(report)
    attacked = report["cells"][1]
    assert attacked["change in points"]["by_seed"] == [-5, -2]
    assert attacked["change in percent"]["by_seed"] == [-10, -5]
    assert attacked["change in percent"]["paper"] == pytest.approx(-3.546, abs=2e-3)


def test_without_fedavg_there_is_no_level_to_reach():
    curve = {"rounds": [5], "by_seed": [[0.99]]}
    alone = {"row": "GenFed", "column": "MNIST", "runs": 1, "seeds": [0], "accuracy_curve": curve}
    report = {"scale": "gpu", "measures": [], "cells": [alone]}
    relative_time(report)
    assert alone[LEVEL]["by_seed"] == [] and alone["relative to FedAvg"]["mean"] is None
    assert grid(report, LEVEL)[1] == [["GenFed", "–"]]


def test_the_papers_setting_on_all_samples_with_every_control():
    cells = {(cell.row, cell.column): cell for cell in full("gpu")}
    assert {column for _, column in cells} == {"MNIST", "SVHN", "Fashion-MNIST", "CIFAR-10"}
    fedavg, plain = (cells[row, "CIFAR-10"].settings for row in ("FedAvg", "FedAvg, no supplement"))
    assert fedavg["rounds"] == 400 and fedavg["lr"] == pytest.approx(0.01)
    assert fedavg["momentum"] == 0 and fedavg.get("train_samples") is None
    assert fedavg["supplement_size"] and not plain["supplement_size"]
    assert cells["server's samples alone", "SVHN"].settings["server_only"]
    assert {"GenFed (1)", "GenFed (3)", "GenFed, adaptive", "Helix"} < {row for row, _ in cells}


def test_tables_4_to_6_on_all_samples_change_one_thing_each():
    cells = {(cell.row, cell.column): cell for cell in conditions("gpu")}
    (base,) = [
        cell.settings for cell in full("gpu") if (cell.row, cell.column) == ("Helix", "CIFAR-10")
    ]
    changed = {
        column: {key: value for key, value in cell.settings.items() if base.get(key) != value}
        for (row, column), cell in cells.items()
        if row == "Helix"
    }
    assert changed == {
        "no attack": {},
        **{
            name: {"attack": attack, "attack_share": 0.2}
            for name, attack in {"label flip": "label-flip", "IPM": "ipm", "mimic": "mimic"}.items()
        },
        "20 clients": {"clients": 20},
        "180 clients": {"clients": 180},
        **{f"alpha {alpha}": {"partition": f"dirichlet:{alpha}"} for alpha in ("0.05", "0.5", "5")},
    }
    assert cells["FedAvg", "180 clients"].paper == {"best on test": 44.931}
    assert cells["GenFed (1)", "alpha 0.5"].paper == {"best on test": 54.381}
    assert not cells["Helix", "IPM"].paper


def test_the_harm_in_tables_4_to_6_is_that_to_the_best_round():
    study = next(one for one in STUDIES if one.name == "genfed-conditions")
    cells = [
        {"row": "FedAvg", "column": column, "seeds": [0], "best on test": {"by_seed": [best]}}
        | {"at the end": {"by_seed": [10.0]}}
        for column, best in (("no attack", 50.0), ("IPM", 45.0))
    ]
    report = {"scale": "gpu", "measures": list(study.measures), "cells": cells}
    study.finish(report)
    assert cells[1]["change in points"]["mean"] == -5
    assert cells[1]["change in percent"]["mean"] == -10
    # The paper prints 49.939 and 48.477.
    assert cells[1]["change in percent"]["paper"] == pytest.approx(-2.9276, abs=1e-4)
