"""The study of accuracy by simulated time."""

from fedhelix.papers import STUDIES
from fedhelix.papers.cells import Cell
from fedhelix.papers.figures import figure
from fedhelix.papers.measures import Finished, hours_to
from fedhelix.papers.options import BenchOptions
from fedhelix.papers.study import folder_name, run_studies
from fedhelix.runs.spec import make_spec

TINY = {
    "train_samples": 300, "rounds": 2, "eval_every": 1, "clients": 5, "cohort": 3,
    "model": "linear", "engine": "serial", "kernels": "onednn",
}  # fmt: skip


def test_the_hours_to_a_level_by_hand():
    records = [{"accuracy": value, "clock": 1800.0 * n} for n, value in enumerate((0.5, 0.8, 0.7))]
    run = Finished(Cell("row", "column", "fedavg"), records, {})
    assert [hours_to(level)(run) for level in (50, 65, 81)] == [0, 0.5, None]


def test_every_method_is_timed_and_drawn_by_hours(tmp_path):
    study = STUDIES["devices"]
    rows = ["FedAvg", "FedBuff", "FedAsync", "Helix"]
    options = BenchOptions(out=tmp_path, overrides=TINY, seeds=1, only=rows, quiet=True)
    (report,), done = run_studies([study], "quick", options)
    assert done
    cells = [cell for cell in report["cells"] if cell["runs"]]
    assert [cell["row"] for cell in cells] == rows
    for cell in cells:
        (hours,) = cell["accuracy_curve"]["hours"]
        assert len(hours) == 2 and hours == sorted(hours)
        assert cell["simulated hours"]["mean"] > 0
    (axes,) = figure(report).axes
    assert axes.get_xlabel() == "simulated hours"


def test_runs_without_a_clock_keep_their_folders():
    names = {folder_name(make_spec("fedavg", values)) for values in ({}, {"device_speed": 7.0})}
    timed = {
        folder_name(make_spec("fedavg", {"devices": kind})) for kind in ("uniform", "lognormal:1")
    }
    assert len(names) == 1 and len(timed) == 2 and not names & timed
