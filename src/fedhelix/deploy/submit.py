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

from fedhelix.data import from_npz
from fedhelix.deploy.elsewhere import OWN
from fedhelix.deploy.terms import Terms, cohort_size
from fedhelix.errors import BadInput, EngineFailure
from fedhelix.options import build
from fedhelix.progress import Progress
from fedhelix.registry import is_known
from fedhelix.runs.config import Config, Plan, read_plan
from fedhelix.store import RunFolder

if TYPE_CHECKING:
    from fedhelix.deploy.control import Control

INTERVAL, STATUS = 0.2, 2.0  # seconds between looks into the folder, and between questions to the SuperLink
COMPLETED = "completed"
OF_THE_APP = "ServerApp failed with exception: "
ATTEMPTS = 5  # without a single new round
OF_SIMULATIONS = ("engine", "workers", "checkpoint_every", "client_state")  # settings that only these can obey
OF_COMMON_DATA = ("data_dir", "train_samples", "test_samples", "newcomers_classes")


def create(plan: Plan, out: Path, terms: Sequence[str] = ()) -> RunFolder:
    """A run folder for a deployment; its experiment has a name of its own, under which sites keep state."""
    if not is_known(plan.spec):
        raise BadInput("sites run registered methods only; a method in a file must be installed at every site.")
    if plan.config.data == OWN and plan.config.attack == "label-flip":
        raise BadInput("label-flip changes samples, and here they are the sites' own; choose an attack on uploads.")
    _check_effects(plan.config)
    given = dict(text.partition("=")[::2] for text in terms)
    asked = _met(build(Terms, given, "the deployment's terms"), plan.config)
    deployment = {"experiment": uuid.uuid4().hex, **vars(asked)}
    return RunFolder.create(out, plan.as_dict() | {"deployment": deployment})


def _check_effects(config: Config) -> None:
    """Refuse settings that would change nothing."""
    where, apart = dict.fromkeys(OF_SIMULATIONS, "across sites"), "where sites have their own samples"
    if config.data == OWN:
        where |= dict.fromkeys(OF_COMMON_DATA, apart)
        if config.partition is not None:  # presets bring one along, and there is no word for none
            warnings.warn(f"the partition {config.partition} has no effect {apart}.", stacklevel=3)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in where and value != field.default:
            raise BadInput(f"{field.name} = {value} has no effect {where[field.name]}; leave it out.")


def _met(asked: Terms, config: Config) -> Terms:
    """The terms as they can be read on the server; those that no round could meet are refused."""
    cohort = cohort_size(config)
    if asked.minimum > cohort:
        raise BadInput(
            f"{asked.minimum} answers never come from a cohort of {cohort}; lower minimum or raise --cohort."
        )
    if asked.begin is not None and asked.begin > config.clients:
        raise BadInput(
            f"the run cannot begin with {asked.begin} sites, since it has {config.clients} clients; lower begin."
        )
    if asked.server_data is None:
        return asked
    if config.data != OWN:
        raise BadInput(
            f"server_data is for sites with their own samples; here the server takes its from '{config.data}'."
        )
    place = Path(asked.server_data).expanduser().resolve()
    from_npz(place)  # a mistake shows now, and not on the server
    return dataclasses.replace(asked, server_data=str(place))


def play(control: Control, folder: RunFolder, quiet: bool | None = None) -> dict[str, Any]:
    """Submit a run, unless it is being played, and follow it to its end; one that was cut short is submitted again."""
    plan = read_plan(folder.config, folder.path)
    if "deployment" not in folder.config:
        raise BadInput(f"'{folder.path}' is no run of a deployment; continue it with `fedhelix resume {folder.path}`.")
    seen, attempts = 0, 0
    with Progress(plan.config.rounds, plan.method.label, folder.rounds_saved, quiet, lines=True) as progress:
        while folder.summary is None:
            if (attempts := attempts + 1) > ATTEMPTS:
                raise EngineFailure(
                    f"the run makes no progress; look into the logs, then: fedhelix deploy resume {folder.path}"
                )
            number = control.playing(folder.path) or control.submit(folder.path)
            asked, ended = time.monotonic(), None
            try:
                while ended is None:
                    time.sleep(INTERVAL)
                    records = folder.records()
                    for record in records[seen:]:
                        progress.update(record)
                        attempts = 0
                    seen = max(seen, len(records))
                    if folder.summary is not None or time.monotonic() > asked + STATUS:
                        asked, found = time.monotonic(), control.status(number)
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
        set(map(str, record["participants"])) <= why.keys() for record, why in zip(records, reasons, strict=True)
    ):
        first = next(iter(next(filter(None, reasons)).values()))
        raise EngineFailure(f"no site did any work in this run: {first}")
