"""A client whose next upload is watched: its model, and the entries that the upload really holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedhelix.core.errors import UserError
from fedhelix.core.registry import make
from fedhelix.core.tree import State, clone
from fedhelix.data import Dataset, available, load
from fedhelix.engines.local import ClientTask, run_client, start_round
from fedhelix.federation.federation import Federation, FederationState
from fedhelix.privacy.settings import Audit
from fedhelix.runs.spec import read_spec
from fedhelix.store import RunFolder

FEW = (600, 300)  # samples for training and test: enough for one client's round of any method


@dataclass(frozen=True, eq=False)
class Victim:
    """What the attacks are tried on."""

    name: str
    federation: Federation
    network: str
    model: State
    sent: list[str]

    @classmethod
    def of(cls, spec: str, requested: Audit) -> Victim:
        """A client of a run folder as it stands, or one in the first round of a method."""
        if (Path(spec) / "config.toml").is_file():
            folder = RunFolder.open(spec)
            run = read_spec(folder.config, spec)
            federation, network = run.config.federation(run.method), run.config.model
            restored = folder.state(str(federation.device))
            state = (
                FederationState(restored[0], restored[1], dict(restored[2]))
                if restored
                else federation.initialize(run.config.rounds)
            )
        else:
            method, network = (
                make(spec, {"clusters": 1} if make(spec).capabilities.several_models else {}),
                requested.model,
            )
            federation = Federation(
                found_data(requested).subsample(*FEW), "iid", model=network, method=method, clients=4, cohort=2, epochs=1,
                batch_size=32, lr=0.01, seed=requested.seed, device=requested.device, engine="serial",
            )  # fmt: skip
            state = federation.initialize(1)
        if federation.data.classes is None or len(federation.data.shape) != 3:
            raise UserError(f"'{spec}' does not classify pictures; an audit rebuilds pictures.")
        client, setup = federation.cohort(state.round)[0], federation.engine.setup
        payload = federation.method.download(
            state.server, client, federation.context(state.round, state.round + 1)
        )
        task = ClientTask(client, state.round, payload, state.client_states.get(client, {}))
        model = clone(start_round(setup, task, with_context=False).models["model"])
        upload = run_client(setup, task).upload
        seen = {*upload.get("model", {}), *upload.get("values", {})}
        sent = [entry for entry in federation.layers.parameters if entry in seen]
        if not sent:
            raise UserError(
                f"{federation.method.label} uploads no parameters, so there is nothing to attack."
            )
        return cls(federation.method.label, federation, network, model, sent)


def found_data(requested: Audit) -> Dataset:
    """The data set that was asked for, or what there is."""
    if requested.data != "auto":
        return load(requested.data, data_dir=requested.data_dir)
    here = {found.name for found in available(requested.data_dir) if found.found}
    return load("cifar10" if "cifar10" in here else "digits", data_dir=requested.data_dir)
