"""What all runs of a site may spend together: privacy budgets add up over the same samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.core.method import Method
from fedhelix.deploy.site_policy import chain
from fedhelix.methods.budget import Budgeted


def budget(method: Method) -> float:
    """The epsilon that a run may spend; methods without noise spend any."""
    return sum(part.epsilon for part in chain(method) if isinstance(part, Budgeted)) or math.inf


class Budgets:
    """The methods and budgets of a site's runs with noise, in one file that outlives what the site
    keeps of them.
    """

    def __init__(self, path: Path):
        self.path = path

    def total(self, experiment: str, method: Method) -> float:
        """The sum of all budgets, with that of one more run or of a run that goes on."""
        return sum(epsilon for _, epsilon in self._with(experiment, method).values())

    def reserve(self, experiment: str, method: Method) -> None:
        """Write a run's whole budget down before it spends any."""
        if budget(method) < math.inf and (all_of := self._with(experiment, method)) != self._read():
            write_atomically(self.path, json.dumps(all_of, indent=1).encode())

    def _with(self, experiment: str, method: Method) -> dict[str, tuple[str, float]]:
        known = self._read()
        label, epsilon = known.get(experiment, (method.label, 0.0))
        if label != method.label:  # whose clients would count from zero
            raise UserError(f"the run began as {label}, and does not go on as {method.label}.")
        return {**known, experiment: (label, max(epsilon, budget(method)))}

    def _read(self) -> dict[str, tuple[str, float]]:
        if not self.path.exists():
            return {}
        try:
            known = json.loads(self.path.read_bytes())
            return {run: (str(label), float(epsilon)) for run, (label, epsilon) in known.items()}
        except (OSError, ValueError, TypeError, AttributeError) as problem:
            raise UserError(f"'{self.path}' cannot be read: {problem}.") from None
