"""The leaderboard: equal searches on validation samples, ranks, critical differences, figures."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from fedhelix.cli import app as cli
from fedhelix.core.registry import METHODS
from fedhelix.papers.leaderboard import draw, run_leaderboard, settings
from fedhelix.papers.leaderboard.board import Board, ranks_of
from fedhelix.papers.leaderboard.figures import relative_costs
from fedhelix.papers.leaderboard.ranks import indistinct, nemenyi, ranking
from fedhelix.papers.options import BenchOptions
from fedhelix.runs.spec import make_spec
from helpers import unseal

TINY = {
    "train_samples": 200, "test_samples": 60, "rounds": 2, "eval_every": 1, "clients": 4,
    "cohort": 2, "model": "mlp", "engine": "serial", "kernels": "onednn",
}  # fmt: skip


@pytest.mark.parametrize(
    ("methods", "quantile"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)]
)
def test_critical_differences_are_demsars(methods, quantile):
    settings = 14
    expected = quantile * np.sqrt(methods * (methods + 1) / (6 * settings))
    assert nemenyi(methods, settings) == pytest.approx(expected, abs=1e-3)


def test_demsars_example():
    """Four classifiers on 14 data sets: section 3.2.2 of his paper says 1.25."""
    assert nemenyi(4, 14) == pytest.approx(1.25, abs=0.005)


def test_ranks_by_hand():
    scores = {
        "good": np.array([[90.0, 92.0], [80.0, 80.0]]),
        "poor": np.array([[50.0, 50.0], [80.0, 80.0]]),
        "middle": np.array([[70.0, 70.0], [60.0, 60.0]]),
    }
    ranked = ranking(scores)["rows"]
    # First setting: 1, 3, 2. Second: the first two share 1.5, the other is third.
    assert {row: known["rank"] for row, known in ranked.items()} == {
        "good": 1.25,
        "poor": 2.25,
        "middle": 2.5,
    }
    for known in ranked.values():
        low, high = known["interval"]
        assert 1 <= low <= known["rank"] <= high <= 3


def test_a_setting_that_lacks_a_seed_does_not_count():
    def cell(row, column, *values):
        return {"row": row, "column": column, "accuracy": {"by_seed": list(values)}}

    cells = [cell("a", "x", 1, 2), cell("b", "x", 0, 0), cell("a", "y", 1, 2), cell("b", "y", 3)]
    report = {"seeds": [0, 1], "cells": cells}
    assert ranks_of(report, ["a", "b"])["settings"] == 1
    assert ranks_of(report, ["a", "b", "c"]) is None


def test_bars_join_what_is_not_told_apart():
    assert indistinct([1, 1.5, 3, 3.2, 6], 1) == [(0, 1), (2, 3)]
    assert indistinct([1, 2, 3], 1.5) == [(0, 1), (1, 2)]
    assert indistinct([1, 5], 1) == []


@pytest.mark.parametrize("scale", ["quick", "gpu"])
def test_every_method_tries_equally_many_settings(scale):
    rows, columns = settings.entrants(scale), settings.columns(scale)
    assert len({one.row for one in rows}) == len(rows) and "helix" in {one.method for one in rows}
    assert len({one.name for one in columns}) == len(columns)
    for entrant in rows:
        trials = entrant.trials(columns[0], settings.TRIALS[scale])
        assert len(trials) == settings.TRIALS[scale]
        specs = [make_spec(trial.method, trial.settings) for trial in trials]
        assert len({(spec.method, spec.config) for spec in specs}) == len(specs)
        rates = {spec.config.lr / columns[0].settings["lr"] for spec in specs}
        assert min(rates) == pytest.approx(0.316, abs=1e-3)
        assert max(rates) == pytest.approx(3.16, abs=1e-2)
        if entrant.option:
            name = entrant.option.rpartition(".")[2]
            assert getattr(METHODS[entrant.method](), name) == entrant.values[0]


def test_a_board_is_searched_on_validation_resumed_and_drawn(tmp_path, monkeypatch):
    entrants = [one for one in settings.ENTRANTS if one.row in ("FedAvg", "Local", "FedAvg-FT")]
    monkeypatch.setattr(settings, "ENTRANTS", entrants)
    columns = settings.columns("quick")
    options = BenchOptions(out=tmp_path, overrides=TINY, seeds=2, quiet=True)
    report, done = run_leaderboard("quick", replace(options, minutes=0))
    assert not done and not report["cells"] and report["ranking"] is None and not draw(report)
    options = replace(options, only=[columns[0].name])
    report, done = run_leaderboard("quick", options)
    assert done and not report["complete"] and len(report["cells"]) == 3
    # Four trials and another seed of the best one.
    assert len(list(tmp_path.iterdir())) == 3 * (4 + 1)
    again, _ = run_leaderboard("quick", replace(options, minutes=0))
    assert again == report
    for cell in report["cells"]:
        best = max(cell["search"], key=lambda trial: trial["validation"])
        assert {**cell["chosen"], "validation": best["validation"]} == best
        assert cell["seeds"] == [0, 1]
    assert report["ranking"]["settings"] == 1
    assert draw(report).keys() == {"ranks", "bytes", "seconds"}
    costs = relative_costs(report, "traffic in MiB")
    assert costs["FedAvg"][0] == 1 and costs["Local"][0] == 0
    # The trial that won has the best validation accuracy, whatever the test samples say.
    board = Board("quick", tmp_path, TINY, 2)
    local = next(one for one in entrants if one.row == "Local")
    for _, runs in board.search(local, columns[0]):
        (path,) = runs
        unseal(path)
        records = path / "metrics.jsonl"
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        for line in lines:
            line["personal_accuracy"] = 1 - line["personal_accuracy"]
        records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = board.chosen(local, columns[0])
    (kept,) = (cell for cell in report["cells"] if cell["row"] == "Local")
    assert local.tried(changed) == kept["chosen"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scale", "paper"], "unknown scale 'paper'"),
        (["--only", "FedAvgg"], "did you mean 'FedAvg'"),
        (["--only", "fedprox"], "'fedprox' is not in scale quick; choose --scale gpu for it"),
        (["--seeds", "0"], "seeds must lie between 1 and 1000, not 0"),
    ],
)
def test_mistakes_end_with_one_sentence(monkeypatch, capsys, words, sentence, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["fedhelix", "leaderboard", *words, "--out", str(tmp_path / "runs")]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_costs_are_those_of_the_settings_that_all_methods_have():
    def cell(row: str, column: str, traffic: float, accuracy: float) -> dict[str, object]:
        known = {"traffic in MiB": {"mean": traffic}, "accuracy": {"mean": accuracy}}
        return {"row": row, "column": column, **known}

    cells = [
        cell("FedAvg", "a", 2, 80), cell("FedAvg", "b", 4, 60), cell("FedAvg", "c", 1, 10),
        cell("Helix", "a", 1, 90), cell("Helix", "b", 1, 70),
    ]  # fmt: skip
    costs = relative_costs({"cells": cells}, "traffic in MiB")
    assert costs["FedAvg"] == (1, 70)
    assert costs["Helix"] == (pytest.approx((1 / 2 * 1 / 4) ** 0.5), 80)
