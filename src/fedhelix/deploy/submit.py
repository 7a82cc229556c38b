"""Submit a run to a deployment and follow its progress as if it ran here."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhelix import models
from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.imports import check_extra
from fedhelix.core.options import build
from fedhelix.core.registry import is_file
from fedhelix.core.wrapper import check_wrappers
from fedhelix.data import from_npz
from fedhelix.deploy import waiting
from fedhelix.deploy.code import code_files
from fedhelix.deploy.hints import resumption
from fedhelix.deploy.notices import check_any_work, finished_already, odd_sites, why_idle
from fedhelix.deploy.policy import GO_ON, RoundPolicy, cohort_size, sampled
from fedhelix.deploy.registry import SITES_FILE, read_sites
from fedhelix.deploy.remote_data import OWN
from fedhelix.deploy.site_policy import chain
from fedhelix.federation.devices import Devices
from fedhelix.federation.inputs import check_apart, check_forging
from fedhelix.federation.resuming import check_rounds
from fedhelix.methods.budget import Budgeted
from fedhelix.methods.secure import Secure, check_cohort
from fedhelix.runs.config import Config
from fedhelix.runs.spec import RunSpec, changed_settings, changed_spec, read_spec
from fedhelix.store import RunFolder
from fedhelix.store.progress import Progress
from fedhelix.store.records import MOST_NAMES

if TYPE_CHECKING:
    from fedhelix.deploy.control import Control, RunStatus

FOLDER_SECONDS, STATUS_SECONDS = 0.2, 2.0  # between looks at the folder and at the SuperLink
COMPLETED = "completed"
APP_FAILED = "ServerApp failed with exception: "
REFUSED = "refused: "  # what the server app puts before a sentence about the user's mistake
ATTEMPTS = 5  # submissions without a single new round
SIMULATION_SETTINGS = (
    "engine", "workers", "address", "checkpoint_every", "client_state",
    *(field.name for field in dataclasses.fields(Devices)),
)  # fmt: skip
COMMON_DATA_SETTINGS = (
    "data_dir", "train_samples", "test_samples", "shift", "newcomers_classes", "newcomers_samples",
)  # fmt: skip


def create(spec: RunSpec, out: Path, policy: Sequence[str] = (), where: str = "") -> RunFolder:
    """Create the run folder for a deployment; `policy` holds KEY=VALUE for its [deployment] table,
    and `where` the options that name it, for commands that the user is told.

    The experiment gets a unique name, under which the sites keep its client states.
    """
    check_wrappers(spec.method)  # first: no setting helps
    code_files(spec)  # two of one name are refused
    if is_file(spec.config.model):
        models.from_file(spec.config.model)  # so is a network that the file lacks
    if spec.config.data == OWN and spec.config.attack in ("label-flip", "backdoor"):
        raise UserError(
            f"{spec.config.attack} changes samples, and here they are the sites' own; choose an "
            "attack on uploads."
        )
    if spec.method.capabilities.buffer is not None:
        raise UserError(
            f"{spec.method.label} is asynchronous by a simulated clock, and sites answer round by "
            "round; choose another method."
        )
    check_extra(spec.method)
    _check_effects(spec.config)
    values = dict(text.partition("=")[::2] for text in policy)
    checked = _checked(build(RoundPolicy, values, "the deployment's round policy"), spec.config)
    _check_setup(spec, checked)
    deployment = {"experiment": uuid.uuid4().hex, "where": where, **vars(checked)}
    settled = {"clients": spec.config.client_count, "deployment": deployment}
    return RunFolder.create(out, spec.as_dict() | settled)


def _check_setup(spec: RunSpec, policy: RoundPolicy) -> None:
    """Refuse what the server would refuse once the sites are there, as far as it is known now."""
    config, method = spec.config, spec.method
    cohort = sampled(config, policy.extra)
    if isinstance(method, Secure):
        check_cohort(method, cohort, config.client_count)
    if config.data == OWN:
        check_apart(config)
        check_forging(config, method)
        if policy.server_data is None:
            _check_without_samples(spec)
        return
    dataclasses.replace(config, clients=config.client_count).federation(  # as the server has it
        method, engine="serial", cohort=cohort, device="cpu", workers=None, kernels="onednn"
    ).close()


def _check_without_samples(spec: RunSpec) -> None:
    """Refuse what needs samples of the server's, where it has none."""
    why = "which has none where sites have their own; add --term server_data=FILE.npz, or"
    if spec.method.capabilities.server_validation:
        raise UserError(
            f"{spec.method.label} scores models on samples of the server, {why} take another "
            "method."
        )
    if size := spec.config.resolved(needed=False).validation_size:
        raise UserError(
            f"validation_size = {size:g} takes samples of the server, {why} leave it out (and "
            "supplement_size)."
        )


def _check_effects(config: Config) -> None:
    """Refuse settings that would have no effect."""
    where = dict.fromkeys(SIMULATION_SETTINGS, "across sites")
    if config.data == OWN:
        apart = "where sites have their own samples"
        where |= dict.fromkeys(COMMON_DATA_SETTINGS, apart)
        if config.partition is not None:  # presets set one, and no value means none
            warnings.warn(f"the partition {config.partition} has no effect {apart}.", stacklevel=3)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in where and value != field.default:
            raise UserError(
                f"{field.name} = {value} has no effect {where[field.name]}; leave it out."
            )


def _checked(policy: RoundPolicy, config: Config) -> RoundPolicy:
    """The policy with an absolute path; one that no round could meet is refused."""
    cohort = cohort_size(config)
    if policy.minimum > cohort:
        raise UserError(
            f"{policy.minimum} answers never come from a cohort of {cohort}; lower minimum or "
            "raise --cohort."
        )
    if policy.begin is not None and policy.begin > config.client_count:
        raise UserError(
            f"the run cannot begin with {policy.begin} sites, since it has {config.client_count} "
            "clients; lower begin."
        )
    if policy.server_data is None:
        return policy
    if config.data != OWN:
        raise UserError(
            "server_data is for sites with their own samples; here the server takes its from "
            f"'{config.data}'."
        )
    path = Path(policy.server_data).expanduser().resolve()
    from_npz(path)  # so that a mistake shows now, and not on the server
    return dataclasses.replace(policy, server_data=str(path))


def awaited(here: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """What to say about a new run that waits for sites; None where enough are connected."""
    terms = config["deployment"]
    wanted = terms.get("begin") or config["clients"]
    if len(here) >= wanted:
        return None
    names = f" ({', '.join(here)})" if here else ""
    return (
        f"{len(here)} of {wanted} sites are connected{names}; the run begins once {wanted} are, "
        f"and stops after {terms['patience']:g} s (--clients: how many sites the run "
        "has; --term begin=N: how many it begins with; --term patience=SECONDS)."
    )


def _begun(folder: RunFolder) -> RunSpec:
    """What a run across sites was begun with."""
    if "deployment" not in folder.config:
        raise UserError(
            f"'{folder.path}' is no run of a deployment; continue it with "
            f"`fedhelix resume {shlex.quote(str(folder.path))}`."
        )
    return read_spec(folder.config, folder.path)


def change(control: Control, folder: RunFolder, changes: Sequence[str]) -> None:
    """Change settings, KEY=VALUE, of a run that does not go on just now: more rounds, for one.

    Without its summary it is no longer complete. A kill before the new settings are written leaves
    a run that goes on as it was.
    """
    begun, path = _begun(folder), folder.path
    spec = changed_spec(begun, path, changes, ("deploy", "run"), folder.where)
    _check_effects(spec.config)
    check_rounds(spec.config.rounds, folder.rounds_saved, path)
    if control.active_run_id(path) is not None:
        raise UserError(
            f"'{path}' is running, and keeps its settings meanwhile; follow it with "
            f"{resumption(path, folder.where)}, and change them when it has ended or was stopped."
        )
    with folder:
        if spec.config.rounds > folder.rounds_saved:
            folder.remove_summary()
        folder.change(**changed_settings(begun, spec))


def follow(control: Control, folder: RunFolder, quiet: bool | None = None) -> dict[str, Any]:
    """Submit a run, unless it is running already, and follow it to its end; returns its summary.

    A run that is cut short is submitted again.
    """
    spec = _begun(folder)
    folder.verify()  # also where the run is over, and nobody reads its checkpoint
    rounds, label, done = spec.config.rounds, spec.method.label, folder.rounds_saved
    is_over, attempts = folder.summary is not None, 0  # submissions since the last new round
    with Progress(rounds, label, done, quiet, lines=True) as progress:
        watcher = _Watcher(control, folder, progress, spec)
        while folder.summary is None:
            if (attempts := attempts + 1) > ATTEMPTS:
                raise EngineFailure(
                    "the run makes no progress; look into the logs, then go on with "
                    f"{resumption(folder.path, folder.where)}."
                )
            seen = watcher.seen
            if (number := control.active_run_id(folder.path)) is None:
                if folder.summary is not None:  # it ended between both looks
                    break
                waiting.forget(folder.path)
                number = control.submit(folder.path)
            status = watcher.watch(number)
            if watcher.seen > seen:
                attempts = 0
            _explain(status, folder)
    check_any_work(folder.records(), folder.path, folder.where)
    if (ended := folder.rounds_saved) < rounds:
        warnings.warn(
            f"the run ends after round {ended} of {rounds}: the privacy budget is spent, and too "
            "few sites may take part in another one; to train on, begin a new run with more noise "
            "or a larger epsilon.",
            stacklevel=2,
        )
    elif is_over:
        print(f"fedhelix: {finished_already(folder, spec)}", file=sys.stderr)
    return dict(folder.summary)


class _Watcher:
    """Shows the records of a submitted run while it is running."""

    def __init__(self, control: Control, folder: RunFolder, progress: Progress, spec: RunSpec):
        self.control, self.folder, self.progress, self.spec = control, folder, progress, spec
        self.seen = 0  # records
        self.begun = folder.rounds_saved
        self.spent: set[int] = set()  # clients whose privacy budget is spent, as was said
        self.waited = ""  # for whom, as was said last
        self.idle = False  # whether it was said that a round had no effect
        self.odd: set[str] = set()  # sites of whose data or loss something was said

    def watch(self, run_id: int) -> RunStatus:
        """Wait until a submission ends; Ctrl-C stops it."""
        checked = time.monotonic()
        try:
            while True:
                time.sleep(FOLDER_SECONDS)
                self._show_records()
                self._show_waiting()
                due = time.monotonic() > checked + STATUS_SECONDS
                if due or self.folder.summary is not None:
                    checked, status = time.monotonic(), self.control.status(run_id)
                    if status is not None and status.finished:
                        self._show_records()
                        return status
        except KeyboardInterrupt:
            self.control.stop(run_id)
            raise

    def _show_records(self) -> None:
        records = self.folder.records()
        for number, record in enumerate(records[self.seen :], start=self.seen):
            self.progress.update(record)
            if self.begun <= record["round"] < self.spec.config.rounds:
                self._show_spent(record)
            self._show_idle(record, records[:number])
            self._show_odd(record)
        self.seen = max(self.seen, len(records))

    def _show_spent(self, record: Mapping[str, Any]) -> None:
        """Say whose privacy budget is spent, unless it is everybody's and the run ends."""
        spent = record.get("metadata", {}).get("budget_spent", [])
        new = [client for client in spent if client not in self.spent]
        parts = [part for part in chain(self.spec.method) if isinstance(part, Budgeted)]
        if not new or not parts or len(spent) == self.spec.config.client_count:
            return
        self.spent.update(new)
        named = ", ".join(self._names(new[:MOST_NAMES]))
        more = f" and {len(new) - MOST_NAMES} more" if len(new) > MOST_NAMES else ""
        print(
            f"fedhelix: the privacy budget (epsilon {parts[0].epsilon:g} at delta "
            f"{parts[0].delta:g}) of {named}{more} is spent after round {record['round']}: later "
            "rounds go on without them; to train with all, begin a new run with fewer rounds, more "
            "noise or a larger epsilon.",
            file=sys.stderr,
        )

    def _show_idle(self, record: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> None:
        """Say why the first round without effect had none, since more of them may follow."""
        why = why_idle(record, self._names, before)
        if why and not self.idle and record["round"] > self.begun:
            self.idle = True
            print(f"fedhelix: round {record['round']} had no effect: {why}.", file=sys.stderr)

    def _show_odd(self, record: Mapping[str, Any]) -> None:
        """Say once of a site why it is left out, or that its loss is out of place."""
        for site, said in odd_sites(record, self._names):
            if record["round"] > self.begun and site not in self.odd:
                self.odd.add(site)
                print(f"fedhelix: {said}.", file=sys.stderr)

    def _names(self, clients: Iterable[int]) -> list[str]:
        sites = dict(enumerate(read_sites(self.folder.path / SITES_FILE)))
        return [sites.get(client, f"client {client}") for client in clients]

    def _show_waiting(self) -> None:
        words = waiting.read(self.folder.path)
        if words and words != self.waited:
            print(f"fedhelix: the run {words}.", file=sys.stderr)
        self.waited = words


def _explain(status: RunStatus, folder: RunFolder) -> None:
    """Raise the server app's own error, or say that the run was cut short."""
    if status.result != COMPLETED and status.details.startswith(APP_FAILED):
        said = status.details.removeprefix(APP_FAILED)
        if not said.startswith(REFUSED):
            how = resumption(folder.path, folder.where)
            raise EngineFailure(said.replace(GO_ON, f"go on with {how}"))
        said = said.removeprefix(REFUSED)
        if not folder.rounds_saved:
            said = (
                f"{said.rstrip('.')} (no round has run; to change settings, begin again with "
                "another --out)."
            )
        raise UserError(said)
    if folder.summary is None:
        why = status.details.rstrip(".") or status.result
        print(
            f"fedhelix: the run was cut short ({why}); it is submitted again and goes on after "
            f"round {folder.rounds_saved}.",
            file=sys.stderr,
        )
