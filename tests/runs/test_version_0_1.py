"""Run folders that version 0.1 wrote: they are read, shown and resumed to the result of the
straight run.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fedhelix.core.tree import flatten
from fedhelix.report.results import read
from fedhelix.runs import jobs
from fedhelix.store import RunFolder
from helpers import checkpoint

OLD = Path(__file__).parent / "version-0.1"
NAMES = sorted(path.name for path in OLD.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_resumes_to_the_straight_run(name, tmp_path):
    shutil.copytree(OLD / name / "stopped", tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").rounds_saved == 2
    jobs.resume(tmp_path / "run", quiet=True)
    ours, theirs = checkpoint(tmp_path / "run"), checkpoint(OLD / name / "straight")
    assert ours.keys() == theirs.keys()
    for owner, tree in theirs.items():
        mine = flatten(ours[owner])
        for entry, value in flatten(tree).items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(mine[entry].double(), value.double(), rtol=1e-3, atol=1e-5)
            else:
                assert mine[entry] == value
    one, other = (RunFolder.open(path) for path in (tmp_path / "run", OLD / name / "straight"))
    for mine, its in zip(one.records(), other.records(), strict=True):
        assert mine.keys() - {"uplink_values"} == its.keys()
        assert mine["participants"] == its["participants"]
        assert mine["metadata"].keys() == its["metadata"].keys()
    assert one.summary["personal_accuracy"] == pytest.approx(
        other.summary["personal_accuracy"], abs=0.02
    )


@pytest.mark.parametrize("name", NAMES)
def test_old_names_are_read_as_new_ones(name):
    path = OLD / name / "straight"
    assert "judged" in json.loads((path / "clients.json").read_text())
    result = read(RunFolder.open(path))
    assert len(result.client_finals()) >= len(RunFolder.open(path).records()[-1]["personal"])
    if name == "genfed-clustered":
        assert "fitness" in RunFolder.open(path).records()[0]["metadata"]
