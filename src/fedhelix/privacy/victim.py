"""The client under attack: its model, and the entries that its next upload really holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedhelix.core.errors import UserError
from fedhelix.core.registry import make
from fedhelix.core.tree import State, clone
from fedhelix.data import Dataset, available, load
from fedhelix.engines import Serial
from fedhelix.engines.local import ClientTask, run_client, start_round
from fedhelix.federation.description import check_same
from fedhelix.federation.federation import Federation, FederationState
from fedhelix.privacy.settings import Audit
from fedhelix.runs.spec import read_spec
from fedhelix.store import RunFolder

FEW = (600, 300)  # training and test samples: enough for one client's round of any method


@dataclass(frozen=True, eq=False)
class Victim:
    """The client under attack."""

    name: str
    federation: Federation
    network: str
    model: State
    sent: list[str]

    @classmethod
    def of(cls, spec: str, settings: Audit) -> Victim:
        """A client of a run at its last checkpoint, or one in the first round of a method."""
        is_run = (Path(spec) / "config.toml").is_file()
        federation, network, state = from_run(spec) if is_run else from_method(spec, settings)
        if federation.data.classes is None or len(federation.data.shape) != 3:
            raise UserError(f"'{spec}' does not classify images; an audit rebuilds images.")
        label, hides = federation.method.label, federation.method.capabilities
        if hides.outermost or hides.sample_gradients:
            raise UserError(
                f"idlg attacks the gradient itself, which {label} hides in noise or a sum; "
                f"`fedhelix audit inversion {label}` attacks what leaves."
            )
        client, setup = federation.cohort(state.round)[0], federation.engine.setup
        ctx = federation.context(state.round, state.round + 1)
        payload = federation.method.download(state.server, client, ctx)
        task = ClientTask(client, state.round, payload, state.client_states.get(client, {}))
        model = clone(start_round(setup, task, with_context=False).models["model"])
        upload = federation.method.decode(run_client(setup, task).upload, payload, ctx)
        seen = {*upload.get("model", {}), *upload.get("values", {})}
        sent = [entry for entry in federation.layers.parameters if entry in seen]
        if not sent:
            raise UserError(
                f"{federation.method.label} uploads no parameters, so there is nothing to attack."
            )
        return cls(federation.method.label, federation, network, model, sent)


def from_run(path: str) -> tuple[Federation, str, FederationState]:
    """The federation of a run folder, its network, and its state at the last checkpoint."""
    folder = RunFolder.open(path)
    run = read_spec(folder.config, path)
    here = Serial if run.config.engine == "ray" else None  # its cluster may be gone
    federation = run.config.federation(run.method, here)
    check_same(federation, folder)
    restored = folder.state(str(federation.device))
    if restored is None:
        return federation, run.config.model, federation.initialize(run.config.rounds)
    round, server, client_states = restored
    return federation, run.config.model, FederationState(round, server, dict(client_states))


def from_method(name: str, settings: Audit) -> tuple[Federation, str, FederationState]:
    """A small federation of a method, its network, and its state before the first round."""
    if "@" in name:
        raise UserError(
            f"idlg takes METHODS without options, and run folders; run {name} and give its folder."
        )
    method = make(name, {"clusters": 1} if make(name).capabilities.several_models else {})
    federation = Federation(
        load_data(settings).subsample(*FEW),
        "iid",
        model=settings.model,
        method=method,
        clients=4,
        cohort=2,
        epochs=1,
        batch_size=32,
        lr=0.01,
        seed=settings.seed,
        device=settings.device,
        engine="serial",
    )
    return federation, settings.model, federation.initialize(1)


def load_data(settings: Audit) -> Dataset:
    """The data set of the settings; `auto` takes one that is on this machine."""
    if settings.data != "auto":
        return load(settings.data, data_dir=settings.data_dir)
    here = {data.name for data in available(settings.data_dir) if data.found}
    return load("cifar10" if "cifar10" in here else "digits", data_dir=settings.data_dir)
