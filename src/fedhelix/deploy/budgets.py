"""What a site's runs spend, alone and together: privacy budgets add up over the same samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedhelix.core.bounds import rounded_up
from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.core.method import Method
from fedhelix.core.tree import Tree
from fedhelix.deploy.logs import say
from fedhelix.deploy.site_policy import chain
from fedhelix.engines.local import ClientTask, Setup
from fedhelix.methods.budget import Budgeted


def budget(method: Method) -> float:
    """The epsilon that a run may spend; methods without noise spend any."""
    return sum(part.epsilon for part in chain(method) if isinstance(part, Budgeted)) or math.inf


def check_counted(method: Method, payload: Tree, answered: float) -> None:
    """Refuse a round if the server's count of the site's rounds with noise, by which it bounds
    their epsilon, has not grown since the last one that the site has answered.
    """
    for part in chain(method):
        if not isinstance(part, Budgeted) or (counted := part.counted(payload)) is None:
            continue
        if counted <= answered:
            raise UserError(
                f"this site has answered {answered:g} rounds with noise, and the server counts "
                f"{counted - 1}; it counts all of them from the next round on."
            )


def spent_by_round(setup: Setup, task: ClientTask, client_state: Tree) -> dict[str, Any]:
    """What the answer of a round says of the site's privacy budget: epsilon and delta, and whether
    it is spent. Then the site's log says so too.
    """
    fields: dict[str, Any] = {}
    for part in chain(setup.method):
        if not isinstance(part, Budgeted):
            continue
        epsilon = part.spent(task.payload, client_state)
        fields |= {"epsilon": epsilon, "delta": part.delta}
        if (counted := part.counted(task.payload)) is not None:
            fields["noisy_rounds"] = counted
        if part.is_last(task.payload, client_state, setup.training.epochs):
            fields["spent"] = True
            say(
                f"the privacy budget of this site is spent after round {task.round + 1} (epsilon "
                f"{rounded_up(epsilon)} of {part.epsilon:g} at delta {part.delta:g}), so it takes "
                "no part in later rounds of the run",
                "warning",
            )
    return fields


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
