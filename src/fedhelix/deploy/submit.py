"""Have a run played by a deployment, and watch it as if it were a local one."""

from __future__ import annotations

import dataclasses
import sys
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.options import build
from fedhelix.core.registry import is_known
from fedhelix.data import from_npz
from fedhelix.deploy.policy import RoundPolicy, cohort_size
from fedhelix.deploy.remote_data import OWN
from fedhelix.runs.config import Config
from fedhelix.runs.spec import RunSpec, read_spec
from fedhelix.store import RunFolder
from fedhelix.store.progress import Progress

if TYPE_CHECKING:
    from fedhelix.deploy.control import Control

INTERVAL, STATUS = (
    0.2,
    2.0,
)  # seconds between looks into the folder, and between questions to the SuperLink
COMPLETED = "completed"
OF_THE_APP = "ServerApp failed with exception: "
ATTEMPTS = 5  # without a single new round
OF_SIMULATIONS = (
    "engine",
    "workers",
    "checkpoint_every",
    "client_state",
)  # settings that only these can obey
OF_COMMON_DATA = ("data_dir", "train_samples", "test_samples", "newcomers_classes")


def create(spec: RunSpec, out: Path, policy: Sequence[str] = ()) -> RunFolder:
    """A run folder for a deployment; its experiment has a name of its own, under which sites keep
    state.
    """
    if not is_known(spec.spec):
        raise UserError(
            "sites run registered methods only; a method in a file must be installed at every site."
        )
    if spec.config.data == OWN and spec.config.attack == "label-flip":
        raise UserError(
            "label-flip changes samples, and here they are the sites' own; choose an attack on uploads."
        )
    _check_effects(spec.config)
    given = dict(text.partition("=")[::2] for text in policy)
    requested = _met(build(RoundPolicy, given, "the deployment's terms"), spec.config)
    deployment = {"experiment": uuid.uuid4().hex, **vars(requested)}
    return RunFolder.create(out, spec.as_dict() | {"deployment": deployment})


def _check_effects(config: Config) -> None:
    """Refuse settings that would change nothing."""
    where, apart = (
        dict.fromkeys(OF_SIMULATIONS, "across sites"),
        "where sites have their own samples",
    )
    if config.data == OWN:
        where |= dict.fromkeys(OF_COMMON_DATA, apart)
        if config.partition is not None:  # presets bring one along, and there is no word for none
            warnings.warn(f"the partition {config.partition} has no effect {apart}.", stacklevel=3)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in where and value != field.default:
            raise UserError(
                f"{field.name} = {value} has no effect {where[field.name]}; leave it out."
            )


def _met(requested: RoundPolicy, config: Config) -> RoundPolicy:
    """The terms as they can be read on the server; those that no round could meet are refused."""
    cohort = cohort_size(config)
    if requested.minimum > cohort:
        raise UserError(
            f"{requested.minimum} answers never come from a cohort of {cohort}; lower minimum or raise --cohort."
        )
    if requested.begin is not None and requested.begin > config.clients:
        raise UserError(
            f"the run cannot begin with {requested.begin} sites, since it has {config.clients} clients; lower begin."
        )
    if requested.server_data is None:
        return requested
    if config.data != OWN:
        raise UserError(
            f"server_data is for sites with their own samples; here the server takes its from '{config.data}'."
        )
    place = Path(requested.server_data).expanduser().resolve()
    from_npz(place)  # a mistake shows now, and not on the server
    return dataclasses.replace(requested, server_data=str(place))


def play(control: Control, folder: RunFolder, quiet: bool | None = None) -> dict[str, Any]:
    """Submit a run, unless it is being played, and follow it to its end; one that was cut short is
    submitted again.
    """
    spec = read_spec(folder.config, folder.path)
    if "deployment" not in folder.config:
        raise UserError(
            f"'{folder.path}' is no run of a deployment; continue it with `fedhelix resume {folder.path}`."
        )
    seen, attempts = 0, 0
    with Progress(
        spec.config.rounds, spec.method.label, folder.rounds_saved, quiet, lines=True
    ) as progress:
        while folder.summary is None:
            if (attempts := attempts + 1) > ATTEMPTS:
                raise EngineFailure(
                    f"the run makes no progress; look into the logs, then: fedhelix deploy resume {folder.path}"
                )
            number = control.playing(folder.path) or control.submit(folder.path)
            requested, ended = time.monotonic(), None
            try:
                while ended is None:
                    time.sleep(INTERVAL)
                    records = folder.records()
                    for record in records[seen:]:
                        progress.update(record)
                        attempts = 0
                    seen = max(seen, len(records))
                    if folder.summary is not None or time.monotonic() > requested + STATUS:
                        requested, found = time.monotonic(), control.status(number)
                        ended = found if found is not None and found.over else None
            except KeyboardInterrupt:
                control.stop(number)
                raise
            if ended.result != COMPLETED and ended.details.startswith(OF_THE_APP):
                raise EngineFailure(ended.details.removeprefix(OF_THE_APP))
            if folder.summary is None:
                why = ended.details.rstrip(".") or ended.result
                print(
                    f"fedhelix: the run was cut short ({why}); it is submitted again and goes on after round "
                    f"{folder.rounds_saved}.",
                    file=sys.stderr,
                )
    _check_that_somebody_worked(folder.records())
    return dict(folder.summary)


def _check_that_somebody_worked(records: Sequence[Mapping[str, Any]]) -> None:
    """A run whose rounds were all empty is no result."""
    reasons = [{**record["missing"], **record["refused"]} for record in records]
    if any(reasons) and all(
        set(map(str, record["participants"])) <= why.keys()
        for record, why in zip(records, reasons, strict=True)
    ):
        first = next(iter(next(filter(None, reasons)).values()))
        raise EngineFailure(f"no site did any work in this run: {first}")
