"""A client whose next upload is watched: its model, and the entries that the upload really holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedhelix.client import Job, open_round, work
from fedhelix.data import Dataset, available, load
from fedhelix.errors import BadInput
from fedhelix.federation import Federation, Standing
from fedhelix.privacy.settings import Audit
from fedhelix.registry import make
from fedhelix.runs.config import read_plan
from fedhelix.store import RunFolder
from fedhelix.tree import State, clone

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
    def of(cls, spec: str, asked: Audit) -> Victim:
        """A client of a run folder as it stands, or one in the first round of a method."""
        if (Path(spec) / "config.toml").is_file():
            folder = RunFolder.open(spec)
            plan = read_plan(folder.config, spec)
            federation, network = plan.config.federation(plan.method), plan.config.model
            restored = folder.state(str(federation.device))
            standing = (
                Standing(restored[0], restored[1], dict(restored[2]))
                if restored
                else federation.begin(plan.config.rounds)
            )
        else:
            method, network = make(spec, {"clusters": 1} if make(spec).apart else {}), asked.model
            federation = Federation(
                found_data(asked).subsample(*FEW), "iid", model=network, method=method, clients=4, cohort=2, epochs=1,
                batch_size=32, lr=0.01, seed=asked.seed, device=asked.device, engine="serial",
            )  # fmt: skip
            standing = federation.begin(1)
        if federation.data.classes is None or len(federation.data.shape) != 3:
            raise BadInput(f"'{spec}' does not classify pictures; an audit rebuilds pictures.")
        client, setup = federation.cohort(standing.round)[0], federation.engine.setup
        payload = federation.method.download(
            standing.server, client, federation.context(standing.round, standing.round + 1)
        )
        job = Job(client, standing.round, payload, standing.own.get(client, {}))
        model = clone(open_round(setup, job, anchored=False).models["model"])
        upload = work(setup, job).upload
        seen = {*upload.get("model", {}), *upload.get("values", {})}
        sent = [entry for entry in federation.units.parameters if entry in seen]
        if not sent:
            raise BadInput(f"{federation.method.label} uploads no parameters, so there is nothing to attack.")
        return cls(federation.method.label, federation, network, model, sent)


def found_data(asked: Audit) -> Dataset:
    """The data set that was asked for, or what there is."""
    if asked.data != "auto":
        return load(asked.data, data_dir=asked.data_dir)
    here = {found.name for found in available(asked.data_dir) if found.found}
    return load("cifar10" if "cifar10" in here else "digits", data_dir=asked.data_dir)
