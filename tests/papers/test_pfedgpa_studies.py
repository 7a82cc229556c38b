"""pFedGPA's tables: every study is valid, published numbers in their cells, measures by hand."""

import pytest

from fedhelix.papers import STUDIES
from fedhelix.papers.cells import Cell
from fedhelix.papers.measures import Finished, last_percent
from fedhelix.papers.pfedgpa.measures import (
    distance,
    failed,
    last_ten,
    peak,
    reconstruction,
    trainings_to_peak,
)

RIVALS_ASKED_FOR = (
    "inversion, one training step",
    "own head on the averaged body",
    "average, shifted by own class shares",
    "inversion",
)
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


def test_pfedhn_also_visits_one_client_after_the_other_as_often():
    usual = cell("pfedgpa-table1", "pFedHN", "CIFAR-10 100")
    alone = cell("pfedgpa-table1", "pFedHN, client after client", "CIFAR-10 100")
    assert alone.paper == usual.paper and alone.settings["cohort"] == 1
    assert alone.settings["rounds"] == 30 * usual.settings["rounds"] == alone.settings["eval_every"]


def test_tables_share_their_runs(tmp_path):
    one, other = (
        {path for _, runs in STUDIES[name].specs("gpu", tmp_path, {}) for path in runs}
        for name in ("pfedgpa-table1", "pfedgpa-table2")
    )
    assert len(one & other) == 15  # inversion, on three data sets with five seeds


def test_emnist_as_fedpac_partitions_it_stands_beside_the_same_published_numbers():
    usual = cell("pfedgpa-table1", "Local-only", "EMNIST 20")
    fedpac = cell("pfedgpa-table1", "Local-only", "EMNIST 20, FedPAC's partition")
    assert usual.paper == fedpac.paper == {"accuracy": 70.45}
    assert dict(fedpac.settings) == {**usual.settings, "partition": "fedpac:20"}


def test_rivals_meet_on_all_data_sets_and_the_slice_is_told():
    cells = STUDIES["pfedgpa-rivals"].cells("gpu")
    columns = dict.fromkeys(cell.column for cell in cells)
    assert list(columns) == ["Fashion-MNIST", "EMNIST, slice last:2", "CIFAR-10, slice last:2"]
    rows = {row: cell("pfedgpa-rivals", row, "CIFAR-10, slice last:2") for row in RIVALS_ASKED_FOR}
    step, head, shifted, default = rows.values()
    assert step.settings["pfedgpa.fit_steps"] == 1
    assert head.settings["pfedgpa.generate"] == "own"
    assert head.settings["pfedgpa.slice"] == "last:1"
    assert shifted.method == "calibrated" and shifted.settings["calibrated.trained"] is False
    assert not [key for key in default.settings if key in ("pfedgpa.inverted", "pfedgpa.fit_steps")]


def test_the_papers_generator_and_its_algorithm_as_printed_are_rows():
    assert cell("pfedgpa-figure4", "inversion, paper", "Fashion-MNIST").settings[
        "pfedgpa.size"
    ] == ("paper")
    every = cell("pfedgpa-rivals", "inversion in every round", "Fashion-MNIST")
    assert every.settings["pfedgpa.mode"] == "online"


def arrival(method, settings, accuracies):
    records = [{"personal_accuracy": 0.1}] + [
        {"personal_accuracy": accuracy} for accuracy in accuracies
    ]
    records[1]["arrival_bytes"] = 1
    return Finished(Cell("r", "c", method, settings), records, {})


def test_newcomers_are_measured_on_one_kind_of_model():
    """The last round's models are the newcomers' own uploads; the others are what they receive."""
    run = arrival("pfedgpa", {"pfedgpa.newcomer": "model"}, [0.2, 0.5, 0.59, 0.6, 0.9])
    assert peak(run) == pytest.approx(60)
    assert last_ten(run) == pytest.approx((20 + 50 + 59 + 60) / 4)
    assert trainings_to_peak(run) == 3  # 0.59 is more than 95 % of 0.6


def test_trainings_before_the_first_round_count_too():
    for settings, turns in (
        ({}, 5),
        ({"pfedgpa.newcomer": "alone", "pfedgpa.guide_turns": 2}, 2),
        ({"pfedgpa.newcomer": "nearest"}, 1),
        ({"pfedgpa.newcomer": "random"}, 0),
    ):
        assert trainings_to_peak(arrival("pfedgpa", settings, [0.6, 0.6, 0.9])) == turns + 1
    hyper = arrival("pfedhn", {"pfedhn.newcomer_turns": 7}, [0.6, 0.6, 0.9])
    assert trainings_to_peak(hyper) == 8


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
