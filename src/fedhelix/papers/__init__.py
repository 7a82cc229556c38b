"""The papers' experiments: `fedhelix bench NAME` runs one of these studies."""

from __future__ import annotations

from fedhelix.papers import concept, devices, gene_fl, genfed, helix, pfedgpa
from fedhelix.papers.cells import Cell, Scale
from fedhelix.papers.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in [
        *helix.STUDIES,
        *genfed.STUDIES,
        *gene_fl.STUDIES,
        *pfedgpa.STUDIES,
        *devices.STUDIES,
        *concept.STUDIES,
    ]
}

__all__ = ["STUDIES", "Cell", "Scale", "Study"]
