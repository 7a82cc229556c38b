"""Finished runs of one machine, with their models."""

from __future__ import annotations

from pathlib import Path

from fedhelix.core.errors import UserError
from fedhelix.core.options import options_of
from fedhelix.federation import Federation, FederationSettings, FederationState, Run
from fedhelix.federation.description import check_same
from fedhelix.federation.sinks import saved_run
from fedhelix.runs.spec import RunSpec, check_files, in_names, read_spec
from fedhelix.store import RunFolder
from fedhelix.store.records import Record


def run_here(folder: RunFolder, path: str | Path, federation: Federation | None) -> Run:
    """A run of one machine from its folder, which was named by a path; see `load_run`."""
    config = in_names(folder.config)
    if federation is None and config.get("library"):
        raise UserError(
            f"'{path}' was made in Python with data, a network or a method of your own, which its "
            f"folder does not hold; build the same Federation again and call load_run('{path}', "
            "fed). For a model that needs neither, call run.export(...) after training."
        )
    if federation is None:
        otherwise = f"build the same Federation with it and call load_run('{path}', fed)"
        check_files(config, path, otherwise)
        spec = read_spec(config, path)
        federation = spec.config.federation(
            spec.method, engine="serial", workers=None, address=None
        )
    elif not folder.config.get("library"):
        _check_settings(federation, read_spec(config, path), path)
    check_same(federation, folder)
    device = str(federation.device)
    restored = last_checkpoint(folder, device)
    if restored is None:
        raise UserError(f"'{path}' has no checkpoint yet; let it finish a round first.")
    run = Run(federation, *restored, folder)
    run.made_by = (folder.summary or {}).get("engine", "unknown (no summary.json names it)")
    return run


def last_checkpoint(folder: RunFolder, device: str) -> tuple[list[Record], FederationState] | None:
    """The last checkpoint, which a run that goes on may replace meanwhile; nothing is written."""
    while True:
        before = folder.rounds_saved
        try:
            return saved_run(folder, device, folder.state(device))
        except (UserError, RuntimeError):
            if folder.rounds_saved == before:
                raise


def _check_settings(federation: Federation, spec: RunSpec, path: str | Path) -> None:
    """Refuse a federation with other settings than the command's run."""
    method, settings = spec.method, spec.config
    resolved = settings.resolved(method.capabilities.server_validation)
    its = {"method": method.label, **method.options(), "seed": settings.seed}
    its |= options_of(FederationSettings, resolved)
    mine = {"method": federation.method.label, **federation.method.options()}
    mine |= {"seed": federation.seed, **options_of(FederationSettings, federation.settings)}
    for key, value in its.items():
        if value != mine.get(key):
            raise UserError(f"'{path}' was run with {key} = {value}, not {mine.get(key)}.")
