"""GENE-FL's tables: every study can be set up, the paper's uploads come out exactly, measures by
hand.
"""

import pytest
import torch

from fedhelix.core.layers import Layers
from fedhelix.core.registry import make
from fedhelix.models import build
from fedhelix.papers import STUDIES
from fedhelix.papers.gene_fl import METHODS, TABLE_1, after_rounds, rows_of
from fedhelix.papers.study import Cell, Finished

GENE_FL = [name for name in STUDIES if name.startswith("gene-fl")]


@pytest.mark.parametrize("name", GENE_FL)
def test_every_study_can_be_set_up_at_every_scale(name, tmp_path):
    for scale in ("quick", "gpu", "paper"):
        for cell, specs in STUDIES[name].specs(scale, tmp_path, {}):
            assert len(specs) == STUDIES[name].seeds[scale]
            assert set(cell.paper) <= set(STUDIES[name].measures)
            for spec in specs.values():
                requested = spec.config
                assert (
                    requested.rounds > requested.newcomers_after > 0
                    and requested.newcomers == requested.clients
                )


@pytest.mark.parametrize(("classes", "place"), [(10, 0), (100, 4)])
@pytest.mark.parametrize("row", ["FedAvg", "FedBN", "ParFed", "FedFina", "FedLG"])
def test_the_papers_uploads_come_out_exactly(row, classes, place):
    """100 rounds of ten clients, 4 bytes for each value, in GiB."""
    layers = Layers.of(build("resnet18", (3, 32, 32), classes), torch.zeros(2, 3, 32, 32))
    spec, options = METHODS[row]
    method = make(spec, {key.partition(".")[2]: value for key, value in options.items()})
    values = sum(layers.sizes[name] for name in method.shared_params(layers))
    assert round(100 * 10 * 4 * values / 2**30, 2) == rows_of(TABLE_1)[row][place]


def test_accuracy_some_rounds_after_the_arrival():
    records = [{"round": t, "personal_accuracy": t / 100} for t in range(1, 21)]
    records[9]["arrival_bytes"] = 8.0
    run = Finished(Cell("", "", ""), records, {})
    assert after_rounds(1)(run) == pytest.approx(10) and after_rounds(10)(run) == pytest.approx(19)
    del records[18]["personal_accuracy"]
    assert after_rounds(10)(run) == pytest.approx(20)  # the next evaluated round
    assert (
        after_rounds(20)(run) is None
        and after_rounds(3)(Finished(Cell("", "", ""), [], {})) is None
    )
