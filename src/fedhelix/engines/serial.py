"""One client after the other: the reference that every other engine is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fedhelix.engines.base import Engine
from fedhelix.engines.local import ClientResult, ClientTask, run_client


class Serial(Engine):
    """A plain loop, as the papers' pseudo-code has it."""

    name: ClassVar[str] = "serial"

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the tasks, in order."""
        return [run_client(self.setup, task) for task in tasks]
