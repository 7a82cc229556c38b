"""GENE-FL's tables: every study is valid, the paper's uploads are exact, measures by hand."""

import pytest
import torch

from fedhelix.core.layers import Layers
from fedhelix.core.registry import make
from fedhelix.models import build
from fedhelix.papers import STUDIES
from fedhelix.papers.cells import Cell
from fedhelix.papers.gene_fl.measures import OF_BOTH, OF_KNOWN, after_rounds
from fedhelix.papers.gene_fl.settings import METHODS, TABLES
from fedhelix.papers.measures import Finished
from fedhelix.runs.config import layered

GENE_FL = [name for name in STUDIES if name.startswith("gene-fl")]


@pytest.mark.parametrize("name", GENE_FL)
def test_every_study_can_be_set_up_at_every_scale(name, tmp_path):
    for scale in ("quick", "gpu", "paper"):
        for cell, specs in STUDIES[name].specs(scale, tmp_path, {}):
            assert len(specs) == STUDIES[name].seeds[scale]
            assert set(cell.paper) <= set(STUDIES[name].measures)
            for spec in specs.values():
                config = spec.config
                assert config.rounds > config.newcomers_after > 0
                assert config.newcomers == config.clients


def test_rows_that_start_from_a_body_with_a_fresh_head():
    for name in ("gene-fl-table1", "gene-fl-table3"):
        for scale in ("quick", "gpu", "paper"):
            rows = {cell.row: cell.method for cell in STUDIES[name].cells(scale)}
            assert rows["FedPer"] == "clustered+fedper"
            assert rows["FedBABU"] == "clustered+fedbabu"


def test_every_method_is_evaluated_in_the_same_state_and_bytes_go_both_ways():
    for name in GENE_FL:
        for cell in STUDIES[name].cells("gpu"):
            assert cell.settings["eval_trained"]
    summary = {
        "known_trained_accuracy": 0.5,
        "newcomer_trained_accuracy": 0.25,
        "known_downlink_bytes": 3 * 2**20,
        "known_other_bytes": 2**19,
        "cluster_agreement": 0.1,
    }
    run = Finished(Cell("", "", ""), [], summary)
    assert OF_BOTH["the known after one training"](run) == 50
    assert OF_BOTH["newcomers after one training"](run) == 25
    assert OF_BOTH["MiB of all downloads"](run) == 3 and OF_BOTH["MiB of fingerprints"](run) == 0.5
    assert OF_BOTH["adjusted Rand index of clusters"](run) == 0.1


def test_the_preset_that_starts_whole_is_a_row():
    (cell,) = (c for c in STUDIES["gene-fl-table3"].cells("gpu") if c.row.endswith("shrinking"))
    preset = layered("gene-fl.whole")
    wanted = {key: value for key, value in preset.items() if key.startswith("gene-fl.")}
    assert wanted == {
        "gene-fl.gene_budget": 0,
        "gene-fl.gene_gamma0": 5,
        "gene-fl.gene_gamma_min": 3,
        "gene-fl.gene_shrink_every": 4,
        "gene-fl.clusters": 1,
        "gene-fl.lambda_elg": 0,
    }
    assert {key: cell.settings[key] for key in wanted} == wanted
    method = make("gene-fl", {key.partition(".")[2]: value for key, value in wanted.items()})
    layers = Layers.of(build(preset["model"], (3, 32, 32), 10), torch.zeros(2, 3, 32, 32))
    units = method._units(layers)
    assert method._size.most(units) == len(units) == 5 and method._size.least(units) == 3


@pytest.mark.parametrize(("classes", "column"), [(10, "C10 s=4"), (100, "C100 s=10")])
@pytest.mark.parametrize("name", ["FedAvg", "FedBN", "ParFed", "FedFina", "FedLG"])
def test_the_papers_uploads_come_out_exactly(name, classes, column):
    """100 rounds of ten clients, 4 bytes for each value, in GiB."""
    layers = Layers.of(build("resnet18", (3, 32, 32), classes), torch.zeros(2, 3, 32, 32))
    row = next(row for row in METHODS if row.name == name)
    method = make(row.method, {key.partition(".")[2]: value for key, value in row.settings.items()})
    values = sum(layers.sizes[layer] for layer in method.shared_params(layers))
    uploads = TABLES["table1"].numbers["uploads in GiB"][name, column]
    assert round(100 * 10 * 4 * values / 2**30, 2) == uploads


def test_uploads_are_counted_as_the_paper_does():
    measure, gib = OF_KNOWN["uploads in GiB"], 2**30
    for summary, size in (
        ({"known_uplink_bytes": 9 * gib, "known_uplink_values": gib}, 4),
        ({"known_uplink_bytes": 9 * gib, "known_uplink_values": None}, 9),
        ({"known_uplink_bytes": 9 * gib}, 9),
        ({}, None),
    ):
        assert measure(Finished(Cell("", "", ""), [], summary)) == size


def test_accuracy_some_rounds_after_the_arrival():
    records = [{"round": t, "personal_accuracy": t / 100} for t in range(1, 21)]
    records[9]["arrival_bytes"] = 8.0
    run = Finished(Cell("", "", ""), records, {})
    assert after_rounds(1)(run) == pytest.approx(10) and after_rounds(10)(run) == pytest.approx(19)
    del records[18]["personal_accuracy"]
    assert after_rounds(10)(run) == pytest.approx(20)  # the next evaluated round
    assert after_rounds(20)(run) is None
    assert after_rounds(3)(Finished(Cell("", "", ""), [], {})) is None
