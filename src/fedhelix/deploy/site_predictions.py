"""A site's own model after a run is complete: for others, and what it says about new samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.tree import to_device
from fedhelix.deploy.code import SiteCode
from fedhelix.deploy.remote_data import OWN
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_state import SiteState, latest_model
from fedhelix.engines.local import UsedModel
from fedhelix.federation.export import network_of, write_network
from fedhelix.federation.predictions import outputs_for, predicted


def trained_site(
    name: str, data: str, folder: Path, data_dir: str | None = None, code: SiteCode | None = None
) -> Site:
    """A site as in its latest run: FILE.npz holds its own samples, or those of which the
    sites of `fedhelix up` each take a part.
    """
    header, _ = SiteState(latest_model(folder, name).parent).used()
    code = code or SiteCode()
    if missing := sorted(set(header.get("code") or {}) - code.files.keys()):
        raise UserError(
            f"the model needs the site's file '{missing[0]}'; add --code {missing[0]} to this "
            "command."
        )
    common = json.loads(header["spec"]).get("data") != OWN
    return Site(name, data, folder, data_dir, common, code=code)


def export_model(site: Site, path: Path) -> None:
    """Write the site's model in the format that the file's name ends in."""
    setup, state = site.used_model()
    write_network(network_of(setup, state), setup.data, path)


def predictions(site: Site, inputs: Path, outputs: bool = False) -> np.ndarray:
    """The classes or values that the site's model predicts, or its outputs, for FILE.npy."""
    try:
        x = np.load(inputs, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"there is no file '{inputs}'.") from None
    except OSError as problem:
        raise UserError(f"'{inputs}' cannot be read ({problem.strerror}).") from None
    except (ValueError, EOFError):
        raise UserError(
            f"'{inputs}' is no FILE.npy with numbers; write one with numpy.save, for example of a "
            "table that pandas has read from a CSV file: numpy.save('new.npy', table.to_numpy())."
        ) from None
    if not isinstance(x, np.ndarray):
        raise UserError(f"'{inputs}' holds several arrays; give one FILE.npy with the samples.")
    setup, state = site.used_model()
    model = UsedModel(setup, to_device(state, setup.device))
    return outputs_for(model, setup, x).numpy() if outputs else predicted(model, setup, x)
