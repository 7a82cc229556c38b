"""The papers' experiments: `fedhelix bench NAME` runs one of these studies."""

from __future__ import annotations

from fedhelix.papers import genfed
from fedhelix.papers.study import Cell, Scale, Study

STUDIES: dict[str, Study] = {study.name: study for study in [*genfed.STUDIES]}

__all__ = ["STUDIES", "Cell", "Scale", "Study"]
