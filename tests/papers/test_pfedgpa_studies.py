"""pFedGPA's tables: every study is valid, published numbers in their cells, measures by hand."""

import pytest

from fedhelix.papers import STUDIES
from fedhelix.papers.cells import Cell
from fedhelix.papers.measures import Finished, last_percent
from fedhelix.papers.pfedgpa.measures import distance, failed, reconstruction

NAMES = [name for name in STUDIES if name.startswith("pfedgpa")]


@pytest.mark.parametrize("scale", ["quick", "gpu", "paper"])
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_spec(name, scale, tmp_path):
    study = STUDIES[name]
    specs = study.specs(scale, tmp_path, {})
    folders = [path for _, runs in specs for path in runs]
    assert len(set(folders)) == len(folders) == len(specs) * study.seeds[scale]
    assert all(
        (scale == "quick") == (spec.config.data == "digits")
        for _, runs in specs
        for spec in runs.values()
    )


def cell(name, row, column):
    return next(
        cell for cell in STUDIES[name].cells("gpu") if (cell.row, cell.column) == (row, column)
    )


def test_the_papers_numbers_are_in_their_cells():
    assert cell("pfedgpa-table1", "pFedGPA", "Fashion-MNIST 20").paper == {"accuracy": 89.18}
    assert cell("pfedgpa-table1", "FedAvg", "CIFAR-10 100").paper == {"accuracy": 69.87}
    assert cell("pfedgpa-table1", "pFedHN", "EMNIST 10").paper == {"accuracy": 77.33}
    without = cell("pfedgpa-table2", "no inversion", "CIFAR-10")
    assert without.paper == {"before fine-tuning": 68.9, "after fine-tuning": 74.77}
    inversion = cell("pfedgpa-table2", "inversion", "Fashion-MNIST")
    assert inversion.paper == {"before fine-tuning": 83.82, "after fine-tuning": 89.37}


def test_a_hundred_clients_are_sampled_and_large_networks_generated_in_part():
    settings = cell("pfedgpa-table1", "pFedGPA", "CIFAR-10 100").settings
    assert settings["cohort"] == 30 and settings["rounds"] == 300
    assert settings["pfedgpa.slice"] == "last:2"


def test_tables_share_their_runs(tmp_path):
    one, other = (
        {path for _, runs in STUDIES[name].specs("gpu", tmp_path, {}) for path in runs}
        for name in ("pfedgpa-table1", "pfedgpa-table2")
    )
    assert len(one & other) == 9  # inversion, on three data sets with three seeds


def test_measures_read_the_last_record():
    distances = {
        "generated_to_nearest": [1.0, 2.0],
        "uploads_spread": [4.0, 2.0],
        "nearest_upload": [3.0, 3.0],
    }
    metadata = {"reconstruction": 0.9, "distances": distances}
    record = {"metadata": metadata, "untuned": [0.5, 0.9], "untuned_accuracy": 0.7}
    run = Finished(Cell("r", "c", "pfedgpa"), [{"metadata": {}}, record], {})
    assert last_percent("untuned_accuracy")(run) == 70
    assert failed("untuned")(run) == 50 and reconstruction(run) == 90
    assert distance("generated_to_nearest")(run) == 0.5 and distance("nearest_upload")(run) == 1
    plain = Finished(Cell("r", "c", "fedavg"), [{"metadata": {}}], {})
    for measure in (
        last_percent("untuned_accuracy"),
        failed("untuned"),
        reconstruction,
        distance("nearest_upload"),
    ):
        assert measure(plain) is None
