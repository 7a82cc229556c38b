"""A run that has just begun is called as it will be at its end."""

import numpy as np

from fedhelix.report.live import Watch
from fedhelix.report.live.result import kept_result
from fedhelix.report.results import by_setting, read
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

METHOD = """
from fedhelix import FedAvg, register

@register("begun")
class Begun(FedAvg):
    pass
"""


def test_runs_on_a_file_share_a_section_before_and_after_their_end(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    np.savez(tmp_path / "patients.npz", x=x, y=np.arange(60) % 2, owners=np.arange(60) % 3)
    (tmp_path / "own.py").write_text(METHOD)
    settings = {"data": str(tmp_path / "patients.npz"), "rounds": 1, "model": "linear"}
    session = Session(quiet=True)
    for name, method in (("done", "fedavg"), ("begun", str(tmp_path / "own.py"))):
        session.start(make_spec(method, settings), tmp_path / "runs" / name)
    (tmp_path / "runs" / "begun" / "summary.json").unlink()  # as if it had been stopped
    results = [read(RunFolder.open(tmp_path / "runs" / name)) for name in ("done", "begun")]
    assert [one.method for one in results] == ["fedavg", "begun"]
    assert [one.circumstances["data"] for one in results] == ["patients"] * 2
    assert len(by_setting(results)) == 1
    watch = Watch(tmp_path / "runs")
    watch.refresh()
    shown = {name: kept_result(run).circumstances["data"] for name, run in watch.runs.items()}
    assert shown == {"done": "patients", "begun": "patients"}
