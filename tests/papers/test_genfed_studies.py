import pytest

from fedhelix.papers.genfed import (
    LEVEL,
    OURS,
    TABLE_2,
    TABLE_3,
    TABLE_5,
    method_of,
    relative_damage,
    relative_time,
    rows_of,
    table_2,
    table_3,
    table_4,
)
from fedhelix.papers.tables import grid


def test_rows_name_their_methods():
    assert method_of("GenFed (3)") == ("genfed", {"genfed.schedule": "linear"})
    assert method_of("GenFedUmf (5)") == ("genfed+fedumf", {"genfed.schedule": "wave"})
    assert method_of("GenFedAU (1)") == ("genfed+fedau", {"genfed.schedule": "constant"})
    assert [method_of(row)[0] for row in ("FedAvg", "FedUmf", "FedAU")] == [
        "fedavg",
        "fedumf",
        "fedau",
    ]


def test_the_papers_figures_are_read_as_they_stand():
    assert len(rows_of(TABLE_2)) == 18 and {len(row) for row in rows_of(TABLE_2).values()} == {8}
    assert rows_of(TABLE_5)["FedAvg"][-1] == 44.931
    cell = next(c for c in table_2("gpu") if (c.row, c.column) == ("GenFedAU (3)", "SVHN"))
    assert cell.paper == {"rounds to target": 60, "best on test": 92.894}


def test_time_in_table_3_is_rounds_in_table_2():
    # METHODS: the paper's ratios equal those of its rounds within 0.015.
    rounds, times = rows_of(TABLE_2), rows_of(TABLE_3)
    for row, ratios in times.items():
        full = row if row in rounds else f"{row} (3)"
        for place, ratio in enumerate(ratios):
            assert abs(rounds[full][2 * place] / rounds["FedAvg"][2 * place] - ratio) < 0.016


def test_tables_share_their_runs():
    wide = {(cell.method, repr(sorted(cell.settings.items()))) for cell in table_2("gpu")}
    narrow = {(cell.method, repr(sorted(cell.settings.items()))) for cell in table_3("gpu")}
    calm = {
        (cell.method, repr(sorted(cell.settings.items())))
        for cell in table_4("gpu")
        if cell.column == "no attack"
    }
    assert narrow <= wide and calm <= wide
    assert len(table_2("gpu")) == 4 * (18 + len(OURS))


def test_rounds_are_counted_to_nine_tenths_of_fedavgs_best_of_the_same_seed():
    def cell(row, *by_seed):
        return {
            "row": row,
            "column": "MNIST",
            "seeds": [0, 1],
            "accuracy_curve": {"rounds": [5, 10, 15], "by_seed": by_seed},
        }

    slow, fast = (
        cell("FedAvg", [0.2, 0.5, 0.4], [0.1, 0.2, 0.9]),
        cell("GenFed", [0.46, 0.5, 0.6], [0.2, 0.81, 0.82]),
    )
    never = cell("FedAU", [0.4, 0.44, 0.44], [0.9, 0.9, 0.9])
    report = {"scale": "gpu", "measures": [], "cells": [slow, fast, never]}
    relative_time(report)
    assert [found[LEVEL]["by_seed"] for found in report["cells"]] == [[10, 15], [5, 10], [None, 5]]
    assert (
        fast["relative to FedAvg"]["by_seed"] == pytest.approx([0.5, 2 / 3])
        and fast["relative to FedAvg"]["paper"] == 0.07
    )
    assert never["relative to FedAvg"]["mean"] is None  # one seed never got there


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
    harmed = report["cells"][1]
    assert harmed["change in points"]["by_seed"] == [-5, -2]
    assert harmed["change in percent"]["by_seed"] == [-10, -5]
    assert harmed["change in percent"]["paper"] == pytest.approx(-3.546, abs=2e-3)


def test_without_fedavg_there_is_no_level_to_reach():
    curve = {"rounds": [5], "by_seed": [[0.99]]}
    alone = {"row": "GenFed", "column": "MNIST", "runs": 1, "seeds": [0], "accuracy_curve": curve}
    report = {"scale": "gpu", "measures": [], "cells": [alone]}
    relative_time(report)
    assert alone[LEVEL]["by_seed"] == [] and alone["relative to FedAvg"]["mean"] is None
    assert grid(report, LEVEL)[1] == [["GenFed", ""]]
