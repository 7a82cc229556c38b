"""One client after the other: the reference that every other engine is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fedhelix.client import Job, Outcome, work
from fedhelix.engines.base import Engine


class Serial(Engine):
    """A plain loop, as the papers' pseudo-code has it."""

    name: ClassVar[str] = "serial"

    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order."""
        return [work(self.setup, job) for job in jobs]
