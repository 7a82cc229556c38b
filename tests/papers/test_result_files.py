"""Result files are extended by new runs, whether or not the folders of the earlier ones exist."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fedhelix.cli import app as cli
from fedhelix.core.errors import UserError
from fedhelix.papers import STUDIES
from fedhelix.papers.cells import Cell
from fedhelix.papers.leaderboard import run_leaderboard, settings
from fedhelix.papers.leaderboard.board import Board
from fedhelix.papers.measures import best_on_test, from_summary
from fedhelix.papers.options import BenchOptions
from fedhelix.papers.results import is_complete, read_result
from fedhelix.papers.study import Study, run_studies
from fedhelix.papers.verdicts import differences, interval

SMALL = {
    "clients": 4, "cohort": 2, "rounds": 2, "epochs": 1, "model": "linear", "eval_every": 1,
    "train_samples": 200, "test_samples": 60, "engine": "serial", "kernels": "onednn",
}  # fmt: skip
COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def small(lr=0.1, **more):
    def cells(scale):
        return [
            Cell(row, "digits", method, {**SMALL, "lr": lr}, {"best": 50.0})
            for row, method in (("FedAvg", "fedavg"), ("FedProx", "fedprox"))
        ]

    fields = {
        "measures": {"best": best_on_test},
        "vectors": ("personal",),
        "finish": partial(differences, of="best", row="FedAvg"),
    }
    return Study("small", "A small study", cells, **(fields | more))


def result(study, tmp_path, runs, seeds, first_seed=0, **more):
    """The report of a bench in a folder of runs, saved as the command does it."""
    folder = tmp_path / "results"
    options = BenchOptions(out=tmp_path / runs, seeds=seeds, quiet=True, results=folder, **more)
    (report,), _ = run_studies([study], "quick", options, first_seed)
    folder.mkdir(exist_ok=True)
    (folder / "small-quick.json").write_text(json.dumps(report))
    return report


def without_time(report):
    return report | {"seconds": None}


def test_seeds_whose_folders_are_gone_stay(tmp_path):
    first = result(small(), tmp_path, "a", 1)
    assert [cell["seeds"] for cell in first["cells"]] == [[0], [0]] and first["complete"]
    row = result(small(), tmp_path, "b", 3, first_seed=1, only=["FedAvg"])
    assert [cell["seeds"] for cell in row["cells"]] == [[0, 1, 2], [0]] and not row["complete"]
    assert len(list((tmp_path / "b").iterdir())) == 2  # seed 0 was not run again
    whole = result(small(), tmp_path, "c", 3, first_seed=1, only=["FedProx"])
    options = BenchOptions(out=tmp_path / "straight", seeds=3, quiet=True)
    (straight,), _ = run_studies([small()], "quick", options)
    assert whole == without_time(straight)  # means, differences, curves and vectors
    assert whole["complete"] and whole["seeds"] == [0, 1, 2]
    ahead = whole["cells"][1]["FedAvg ahead, best"]
    assert ahead["interval"] == interval(ahead["by_seed"]) and len(ahead["by_seed"]) == 3
    # With fewer seeds, or no runs at all, nothing is lost.
    assert result(small(), tmp_path, "none", 1, minutes=0) == whole


def test_a_newer_run_of_the_same_seed_wins(tmp_path):
    result(small(), tmp_path, "a", 2)
    path = tmp_path / "results" / "small-quick.json"
    old = json.loads(path.read_text())
    for cell in old["cells"]:
        cell["best"]["by_seed"] = [1.0, 2.0]
        cell["origin"]["commit"] = ["older", "older"]
    old["versions"]["commit"] = "older"
    path.write_text(json.dumps(old))
    new = result(small(), tmp_path, "b", 1, commit="abcdef0")
    for cell in new["cells"]:
        seed_0, seed_1 = cell["best"]["by_seed"]
        assert seed_0 > 2 and seed_1 == 2
        assert cell["best"]["mean"] == (seed_0 + seed_1) / 2
        newer, older = cell["origin"]["commit"]
        assert newer != "older" and older == "older"
        assert new["versions"]["commit"] == f"{newer}, older"


def test_other_settings_are_not_mixed_and_it_is_said(tmp_path):
    result(small(), tmp_path, "a", 2)
    with pytest.warns(UserWarning, match=r"settings are not today's: FedAvg \(digits\), FedProx"):
        changed = result(small(lr=0.05), tmp_path, "b", 1)
    assert [cell["seeds"] for cell in changed["cells"]] == [[0], [0]]
    assert changed["seeds"] == [0] and changed["complete"]


def test_a_file_that_does_not_know_its_settings_is_told_apart_by_the_method(tmp_path):
    result(small(), tmp_path, "a", 2)
    path = tmp_path / "results" / "small-quick.json"
    old = json.loads(path.read_text())
    for cell in old["cells"]:
        del cell["origin"]
    old["cells"][1]["method"] = "fedbn"
    path.write_text(json.dumps(old))
    with pytest.warns(UserWarning, match=r"settings are not today's: FedProx \(digits\)"):
        new = result(small(), tmp_path, "b", 1)
    assert [cell["seeds"] for cell in new["cells"]] == [[0, 1], [0]]
    assert new["cells"][0]["origin"]["settings"][1] is None


def test_what_was_measured_otherwise_is_kept_until_new_runs_replace_it(tmp_path):
    result(small(), tmp_path, "a", 2)
    more = {"best": best_on_test, "bytes": from_summary("uplink_bytes")}
    study = small(measures=more)
    kept = result(study, tmp_path, "none", 2, minutes=0)
    assert [cell["bytes"]["by_seed"] for cell in kept["cells"]] == [[], []]
    with pytest.warns(UserWarning, match=r"not measured like the new runs: FedAvg \(digits\)\."):
        new = result(study, tmp_path, "b", 1, only=["FedAvg"])
    assert [cell["seeds"] for cell in new["cells"]] == [[0], [0, 1]]
    with pytest.warns(UserWarning, match="not measured like the new runs: FedProx"):
        result(small(measures=more, curves=()), tmp_path, "c", 1, only=["FedProx"])


def test_rows_that_a_study_lost_are_left_out_and_named(tmp_path):
    result(small(), tmp_path, "a", 1)
    study = small()
    fewer = replace(study, cells=lambda scale: study.cells(scale)[:1])
    with pytest.warns(UserWarning, match=r"does not have their row or column any more: FedProx"):
        report = result(fewer, tmp_path, "a", 1)
    assert [cell["row"] for cell in report["cells"]] == ["FedAvg"] and report["complete"]


@pytest.mark.parametrize(
    "text", ["<<<<<<< HEAD", "{}", '{"cells": [{"runs": 3}]}', "[]", '{"cells": 1, "measures": []}']
)
def test_a_file_that_is_no_result_is_refused_before_any_work(tmp_path, text, monkeypatch, capsys):
    path = tmp_path / "genfed-table4-quick.json"
    path.write_text(text)
    words = ["bench", "genfed-table4", "--out", str(tmp_path / "runs"), "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fedhelix", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and "is not a result that can be extended" in capsys.readouterr().err
    assert path.read_text() == text and not (tmp_path / "runs").exists()


def test_the_first_seed_is_one_of_the_seeds(tmp_path):
    with pytest.raises(UserError, match="between 0 and 1, not 2"):
        run_studies([small()], "quick", BenchOptions(out=tmp_path, seeds=2), first_seed=2)


def test_a_leaderboard_is_extended(tmp_path, monkeypatch):
    entrants = [one for one in settings.ENTRANTS if one.row in ("FedAvg", "Local", "FedAvg-FT")]
    monkeypatch.setattr(settings, "ENTRANTS", entrants)
    column = settings.columns("quick")[0].name
    path = tmp_path / "leaderboard-quick.json"

    def board(runs, *only):
        options = BenchOptions(
            out=tmp_path / runs, overrides=SMALL, seeds=2, only=only, quiet=True, results=tmp_path
        )
        report, _ = run_leaderboard("quick", options)
        path.write_text(json.dumps(report))
        return report

    first = board("a", column, "FedAvg", "Local")
    assert first["ranking"] is None and len(first["cells"]) == 2
    second = board("b", column, "FedAvg-FT")
    assert [cell["row"] for cell in second["cells"]] == [one.row for one in entrants]
    assert second["ranking"]["settings"] == 1 and not is_complete(second, 1000)
    kept = {cell["row"]: cell for cell in second["cells"]}
    assert [kept[cell["row"]] for cell in first["cells"]] == first["cells"]
    board_of_now = Board("quick", tmp_path / "none", SMALL | {"rounds": 3}, 2)
    with pytest.warns(UserWarning, match="settings are not today's: Local"):
        assert board_of_now.report(second)["cells"] == []


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_mean_and_difference_follows_from_its_seeds(path):
    """Extending a committed file by nothing computes all of its numbers anew."""
    known = json.loads(path.read_text())
    if not isinstance(known, dict) or known.get("bench") not in STUDIES:
        pytest.skip("no result of a study")
    study = STUDIES[known["bench"]]
    nowhere = study.specs(known["scale"], path.parent / "none", {}, 1)
    again = study.report(known["scale"], nowhere, None, read_result(path))
    cells = {(cell["row"], cell["column"]): cell for cell in again["cells"]}
    for cell in known["cells"]:
        for name in set(known["measures"]) & set(again["measures"]):
            now = cells[cell["row"], cell["column"]][name]
            assert now["by_seed"] == cell[name]["by_seed"]
            for key in ("mean", "se"):
                values = now[key], cell[name][key]
                assert values[0] == values[1] or math.isclose(*values, rel_tol=1e-9)
