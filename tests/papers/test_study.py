"""Studies: runs are shared and resumed, measures and comparisons by hand, tables of reports."""

import io
import json
from dataclasses import replace
from typing import get_args

import pytest
from rich.console import Console

from fedhelix.core.errors import UserError
from fedhelix.papers import STUDIES
from fedhelix.papers.cells import Cell, Scale
from fedhelix.papers.measures import Finished, add_measure, best_on_test, rounds_to, spread
from fedhelix.papers.options import BenchOptions, are_wanted, wanted_names
from fedhelix.papers.pfedgpa.measures import failed
from fedhelix.papers.study import Study, folder_name, run_studies
from fedhelix.papers.tables import grid, markdown, render
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

SMALL = {"clients": 5, "cohort": 3, "rounds": 2, "epochs": 1, "model": "linear", "eval_every": 1}


def small() -> Study:
    def cells(scale):
        return [
            Cell("FedAvg", "digits", "fedavg", SMALL, {"best": 50.0}),
            Cell("GenFed", "digits", "genfed", {**SMALL, "validation_size": 60.0}),
        ]

    return Study(
        "small", "A small study", cells, {"best": best_on_test}, {"quick": 2, "gpu": 1, "paper": 1}
    )


def test_a_study_runs_its_cells_once(tmp_path):
    study, options = small(), BenchOptions(out=tmp_path, overrides={"device": "cpu"}, quiet=True)
    report = run_studies([study], "quick", options)[0][0]
    assert report["complete"] and report["seeds"] == [0, 1]
    first, second = report["cells"]
    assert first["best"]["paper"] == 50.0 and second["best"]["paper"] is None
    assert first["best"]["mean"] == pytest.approx(sum(first["best"]["by_seed"]) / 2)
    assert [len(seed) for seed in first["accuracy_curve"]["by_seed"]] == [2, 2]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(files) == 4
    again = run_studies([study], "quick", options)[0][0]
    assert again == report | {"seconds": None}  # nothing was left to do
    assert report["device"] == "CPU" and first["seeds"] == [0, 1]
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    json.dumps(report, allow_nan=False)


def test_a_row_that_is_run_alone_stands_beside_what_was_run_before(tmp_path):
    rows = list(dict.fromkeys(cell.row for cell in small().cells("quick")))
    for row in rows[:2]:
        options = BenchOptions(out=tmp_path, only=[row], quiet=True)
        (report,), done = run_studies([small()], "quick", options)
        assert done
    assert {cell["row"] for cell in report["cells"] if cell["runs"]} == set(rows[:2])
    assert report["complete"] == (len(rows) == 2)


def test_one_row_can_be_run_alone_and_the_time_can_be_up(tmp_path):
    options = BenchOptions(out=tmp_path, minutes=0, only=["FedAvg"], quiet=True)
    (report,), done = run_studies([small()], "quick", options)
    assert not done and not report["complete"]
    assert {cell["runs"] for cell in report["cells"]} == {0}
    with pytest.raises(UserError, match="FedAgv"):
        run_studies([small()], "quick", replace(options, only=["FedAgv"]))


def test_wanted_rows_are_run_in_wanted_columns_alone():
    places = [("FedAvg", "iid"), ("FedAvg", "skew"), ("Local", "iid"), ("Local", "skew")]
    assert are_wanted(places, []) == [True] * 4
    assert are_wanted(places, ["Local"]) == [False, False, True, True]
    assert are_wanted(places, ["iid"]) == [True, False, True, False]
    assert are_wanted(places, ["iid", "Local"]) == [False, False, True, False]
    assert are_wanted(places, ["of another study"]) == [False] * 4


def test_names_are_found_in_any_case_and_in_other_scales():
    names = {"quick": ["FedAvg", "digits, iid"], "gpu": ["FedAvg", "FedProx"], "paper": ["FedProx"]}
    wanted = ["fedavg", "Digits, IID"]
    assert wanted_names(wanted, "row", "quick", names) == ["FedAvg", "digits, iid"]
    with pytest.raises(UserError, match=r"not in scale quick; choose --scale gpu or --scale paper"):
        wanted_names(["fedprox"], "row", "quick", names)
    with pytest.raises(UserError, match="unknown row 'FedAgv'; did you mean 'FedAvg'"):
        wanted_names(["FedAgv"], "row", "quick", names)


def test_no_study_has_names_that_differ_in_case_only():
    for study in STUDIES.values():
        for scale in get_args(Scale):
            names = {name for cell in study.cells(scale) for name in (cell.row, cell.column)}
            assert len({name.lower() for name in names}) == len(names), study.name


def test_a_row_is_printed_whatever_the_case_of_its_name(cli):
    done = cli("bench", "genfed-table2", "--minutes", "0", "--only", "fedavg", "--out", "runs")
    assert done.code == 0 and "FedAvg" in done.out, done.err


def test_folder_names_follow_from_the_settings_and_not_from_the_device():
    names = {
        folder_name(make_spec("fedavg", {**SMALL, **more}))
        for more in ({}, {"device": "cpu"}, {"workers": 2})
    }
    assert len(names) == 1
    assert folder_name(make_spec("fedavg", {**SMALL, "lr": 0.3})) not in names
    # A new setting must not rename finished runs where it has its default: see ADDED.
    kept = folder_name(make_spec("helix", {"clients": 4, "rounds": 2}))
    assert kept == "helix-digits-seed0-cab1b449ae"


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ({}, "cab1b449ae"),
        ({"helix.warm_epochs": 0}, "cab1b449ae"),
        ({"supplement_size": 0, "validation_size": 0, "helix.warm_epochs": 3}, "7fa19ce18f"),
        ({"validation_size": 0.1, "helix.warm_epochs": 0}, "ff4632c846"),
        ({"validation_size": 0.1}, "5d0d0d8972"),
        ({"supplement_size": 0.5, "helix.warm_epochs": 0}, "4bfff977e6"),
        ({"supplement_size": 0.5}, "33d3aa1c1a"),
    ],
    ids=str,
)
def test_a_warm_start_renames_no_run_that_has_none(settings, digest):
    """All digests are those of before Helix started warm by itself."""
    name = folder_name(make_spec("helix", {"clients": 4, "rounds": 2, **settings}))
    assert name == f"helix-digits-seed0-{digest}"
    alone = folder_name(make_spec("warm-start", {"clients": 4, "rounds": 2}))
    assert alone == "warm-start-digits-seed0-7f796c6ed4"


def finished(accuracies, column="digits"):
    records = [{"round": 2 * (t + 1), "accuracy": value} for t, value in enumerate(accuracies)]
    return Finished(Cell("row", column, "fedavg"), records, {})


def test_measures_by_hand():
    run = finished([0.5, 0.8, 0.7])
    assert best_on_test(run) == 80
    assert rounds_to(70)(run) == 4
    assert rounds_to({"digits": 81})(run) is None
    assert rounds_to(50)(run) == 2 and rounds_to(50, every=3)(run) == 6
    assert [rounds_to(target, for_good=True)(run) for target in (50, 70, 75)] == [2, 4, None]
    diverged = finished([0.5, None])
    assert best_on_test(diverged) == 50
    assert rounds_to(40)(diverged) == 2 and rounds_to(60)(diverged) is None
    assert rounds_to(40, for_good=True)(diverged) is None
    assert best_on_test(finished([None])) is None
    assert spread([1.0, 3.0]) == {"mean": 2.0, "se": 1.0}
    assert spread([1.0, None]) == {"mean": None, "se": None}
    assert spread([4.0]) == {"mean": 4.0, "se": None}


def test_a_diverged_model_leaves_a_gap_in_its_curve(tmp_path):
    with RunFolder.create(tmp_path / "run", {"seed": 0}) as folder:
        for round, loss in ((1, 0.12345), (2, None)):
            folder.append({"round": round, "accuracy": 0.5, "loss": loss, "personal": [0.25, None]})
        folder.write_summary({"complete": True})
    study = Study(
        "small", "A small study", lambda _: (), {"failed": failed("personal")}, curves=("loss",)
    )
    runs = {folder.path: make_spec("fedavg", {})}
    report = study.cell_report(Cell("FedAvg", "digits", "fedavg"), runs)
    assert report["loss_curve"] == {"rounds": [1, 2], "by_seed": [[0.1235, None]]}
    assert report["failed"]["by_seed"] == [100]  # of those clients that have an accuracy


@pytest.mark.parametrize("scale", get_args(Scale))
def test_titles_name_the_data_sets_that_a_scale_uses(scale, tmp_path):
    study = STUDIES["genfed-table4"]
    title = study.report(scale, study.specs(scale, tmp_path, {}, 1), None)["title"]
    data = "digits" if scale == "quick" else "cifar10"
    assert title == f"GenFed, Table 4: attacks ({scale}: {data})"
    without = replace(study, cells=lambda _: [])  # as the leaderboard has it
    assert without.report(scale, [], None)["title"] == f"GenFed, Table 4: attacks ({scale})"
    named = ("mnist", "cifar", "svhn", "digits")
    assert not [one.title for one in STUDIES.values() if any(d in one.title.lower() for d in named)]


@pytest.mark.parametrize(("paper", "title"), [(50.0, "t: best, ours (paper)"), (None, "t: best")])
def test_titles_mention_the_paper_only_if_it_has_numbers(paper, title):
    best = {"by_seed": [1.0], "mean": 1.0, "se": None, "paper": paper}
    report = {
        "measures": ["best"],
        "cells": [{"row": "a", "column": "c", "runs": 1, "best": best}],
        "title": "t",
    }
    assert printed(report, 80).splitlines()[0] == title


def test_whole_numbers_have_the_decimals_of_the_others():
    def shown(*numbers):
        cells = [
            {
                "row": "a",
                "column": f"{place}",
                "runs": 1,
                "best": {"by_seed": [mean], "mean": mean, "se": se, "paper": paper},
            }
            for place, (mean, se, paper) in enumerate(numbers)
        ]
        return grid({"cells": cells}, "best")[1][0][1:]

    mixed = shown((98.8, 0.16, 70.0), (86.0, 1.92, None), (5.0, 0.0, 71.5))
    assert mixed == ["98.8 ± 0.16 (70.0)", "86.0 ± 1.92", "5.00 ± 0 (71.5)"]
    assert shown((12.0, 1.0, 9.5), (7.0, None, None)) == ["12 ± 1 (9.50)", "7"]


def printed(report, width):
    """The table of a report as a terminal of this width shows it."""
    console = Console(width=width, file=io.StringIO())
    console.print(render(report, report["measures"][0], width))
    return console.file.getvalue()


def cells_of(columns, **rows):
    """A report of one seed with these numbers by row; None is not measured, "no run" not run."""
    cells = [
        {
            "row": row,
            "column": column,
            "runs": int(mean != "no run"),
            "best": {"by_seed": [], "mean": mean, "se": None, "paper": None},
        }
        for row, means in rows.items()
        for column, mean in zip(columns, means, strict=True)
    ]
    title = "A study with a title that is longer than its table"
    return {"measures": ["best"], "cells": cells, "title": title}


def test_a_narrow_table_has_its_title_in_one_line_and_one_sign_for_no_number():
    report = cells_of(["c"], ran=[1.0], unmeasured=[None], missing=["no run"])
    assert printed(report, 80).splitlines() == [
        "A study with a title that is longer than its table: best",
        "            c",
        "─────────────",
        "ran         1",
        "unmeasured  –",
        "missing     –",
        "– means not run yet, or not measured",
    ]
    assert "means" not in printed(cells_of(["c"], ran=[1.0]), 80)


def test_columns_that_do_not_fit_stand_below_the_others_and_nothing_is_cut():
    columns = [f"label flip of {share} %" for share in range(10, 90, 10)]
    numbers = [11.1 * place for place in range(1, 9)]
    report = cells_of(columns, **{"GenFed without any copies": numbers})
    for width in (40, 80):
        text = printed(report, width)
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        assert [word for word in text.split() if "." in word] == [f"{one:.1f}" for one in numbers]
    wide = printed(report, 250).splitlines()
    assert len(wide) == 4 and all(column in wide[1] for column in columns)


def test_cells_are_compared_seed_by_seed():
    cells = [
        {
            "row": row,
            "column": "c",
            "runs": 2,
            "seeds": seeds,
            "best": {"by_seed": values, **spread(values), "paper": None},
        }
        for row, seeds, values in (
            ("a", [0, 2], [10.0, 20.0]),
            ("b", [0, 2], [5.0, 8.0]),
            ("c", [2, 3], [19.0, 1.0]),
        )
    ]
    report = {"measures": ["best"], "cells": cells, "title": "t"}
    add_measure(
        report,
        "loss",
        lambda _, other: other["row"] == "a",
        lambda mine, its: mine - its,
        "best",
        {("b", "c"): -3.0},
    )
    assert cells[1]["loss"]["by_seed"] == [-5.0, -12.0]
    assert cells[2]["loss"]["by_seed"] == [-1.0, None]
    assert cells[2]["loss"]["mean"] == -1  # seed 3 has no baseline
    assert grid(report, "loss") == (
        ["", "c"],
        [["a", "0 ± 0"], ["b", "-8.50 ± 3.50 (-3)"], ["c", "-1.00"]],
    )
    assert markdown(report, "best").splitlines()[1] == "| --- | ---: |"


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
@pytest.mark.parametrize("scale", ["quick", "gpu", "paper"])
def test_every_cell_of_every_study_is_a_valid_spec(study, scale, tmp_path):
    specs = study.specs(scale, tmp_path, {}, seeds=1)
    positions = [(cell.row, cell.column) for cell, _ in specs]
    assert len(set(positions)) == len(positions)
    assert all(len(runs) == 1 for _, runs in specs)
    assert {name for cell, _ in specs for name in cell.paper} <= set(study.measures)
