"""Names of version 0.1, so that an old file gets a sentence that says what to rename."""

from __future__ import annotations

from typing import Any, ClassVar

from fedhelix.core.errors import UserError

HOOKS = {
    "shared": "shared_params",
    "hello": "client_init",
    "begin": "server_init",
    "workers": "select_clients",
    "anchor": "loss_context",
    "weigh": "weights",
    "merge": "aggregate",
    "tune": "personalize",
    "welcome": "onboard_server",
    "reply": "onboard_client",
    "settle": "onboard_state",
}
FLAGS = {
    "greets": "client_init",
    "scores": "server_validation",
    "whole": "complete_uploads",
    "packed": "packed_uploads",
    "central": "central_model",
    "singles": "single_uploads",
    "apart": "several_models",
    "objective": "loss_key",
}
MODULES = {
    "asked": "core.hooks",
    "attacks": "robust.attacks",
    "client": "engines.local",
    "clustering": "methods.clustered",
    "defences": "robust.defences",
    "errors": "core.errors",
    "generative": "components.generative",
    "genes": "components.genes",
    "method": "core.method",
    "options": "core.options",
    "participation": "federation.sampling",
    "pruning": "components.pruning",
    "records": "store.records",
    "registry": "core.registry",
    "seeds": "core.seeds",
    "selection": "components.selection",
    "standing": "federation.run",
    "task": "core.objective",
    "tree": "core.tree",
    "units": "core.layers",
    "wrapper": "core.wrapper",
}
OPTIONS = {"fedopt": {"optimizer": "server_optimizer"}}  # by method, as in config.toml
OBJECTS = {
    "Standing": "FederationState",
    "Units": "Layers",
    "Task": "Objective",
    "Job": "ClientTask",
    "Outcome": "ClientResult",
}


class HasRenamed:
    """Base of what hooks are given: an attribute's old name raises UserError with the new one."""

    renamed: ClassVar[dict[str, str]] = {}

    def __getattr__(self, name: str) -> Any:  # only called for names that are not there
        if name in type(self).renamed:
            kind, new = type(self).__name__, type(self).renamed[name]
            raise UserError(f"{kind}.{name} is now called {new}; rename it.")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def import_hint(problem: ImportError) -> str | None:
    """What to write instead, where an import failed because of an old name of ours."""
    parts = (problem.name or "").split(".")
    if parts[0] != "fedhelix":
        return None
    if len(parts) > 1 and parts[1] in MODULES:
        return f"fedhelix.{parts[1]} is now fedhelix.{MODULES[parts[1]]}"
    for old, new in OBJECTS.items():
        if f"'{old}'" in str(problem):
            return f"{old} is now called {new}"
    return None
