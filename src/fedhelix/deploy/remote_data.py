"""Data that stays at the sites: the server knows its size and shape, and nothing more."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedhelix.core.errors import UserError
from fedhelix.core.seeds import numpy_draw
from fedhelix.data import Dataset, Partition, Split, from_arrays, from_npz
from fedhelix.data.loading import canonical
from fedhelix.deploy.registry import SiteDescription, SiteRegistry
from fedhelix.deploy.schema import DTYPES
from fedhelix.federation.description import located
from fedhelix.runs.spec import RunSpec

OWN = "own"  # in place of a data set's name: every site has its own samples
# Training and test samples assumed for a client whose site has not joined yet: at most 0.9 of
# them are for validation, and BatchNorm needs two.
UNKNOWN_COUNTS = (20, 0)
CHECK_DATA = "check its --data and start it again"  # of a site whose data differ


class RemotePartition(Partition):
    """One client per site, as the server sees it: only the lengths of the splits mean anything."""

    here: ClassVar[bool] = False

    def __init__(self, counts: Sequence[tuple[int, int]], valid: float):
        super().__init__(clients=len(counts), valid=valid)
        object.__setattr__(self, "counts", list(counts))

    def split(self, data: Dataset, seed: int, exclude: np.ndarray | None = None) -> list[Split]:
        """The split of every client."""
        counts: list[tuple[int, int]] = vars(self)["counts"]
        return [remote_split(train, test, self.valid) for train, test in counts]

    def divided(self, *_: object) -> list[Partition]:
        """The partition as it is: newcomers have the last numbers and bring their own samples."""
        return [self]


def site_split(train: int, test: int, valid: float, seed: int, client: int) -> Split:
    """Split a site's samples: a share of the training samples is held out for validation."""
    order = numpy_draw(seed, "partition-valid", client).permutation(train)
    held_out = _held_out(train, valid)
    return Split(order[held_out:], order[:held_out], np.arange(test))


def remote_split(train: int, test: int, valid: float) -> Split:
    """As many places as `site_split` gives a site; zeros take no memory until they are used."""
    held_out = _held_out(train, valid)
    sizes = train - held_out, held_out, test
    return Split(*(np.zeros(size, dtype=np.int64) for size in sizes))


def _held_out(train: int, valid: float) -> int:
    return 0 if train < 2 or not valid else int(np.clip(round(valid * train), 1, train - 1))


def read_site_data(path: str | Path) -> Dataset:
    """Load a site's samples from FILE.npz or from a folder with x.npy and y.npy.

    The folder may also hold x_test.npy and y_test.npy.
    """
    place = Path(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a site may well lack the first classes
        data = _read_folder(place) if place.is_dir() else from_npz(place)
    data = dataclasses.replace(data, name=OWN)
    if data.labels is not None:
        raise UserError(
            f"the labels in '{place}' are text, and sites do not know each other's; number the "
            "classes from 0, in the same way at every site."
        )
    return data


def _read_folder(place: Path) -> Dataset:
    arrays: dict[str, Any] = {}
    try:
        for name in ("x", "y", "x_test", "y_test"):
            if (place / f"{name}.npy").exists():
                arrays[name] = np.load(place / f"{name}.npy", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise UserError(f"'{place / name}.npy' cannot be read: {problem}.") from None
    if not {"x", "y"} <= arrays.keys():
        raise UserError(
            f"the folder '{place}' must hold x.npy and y.npy; put the site's samples there."
        )
    return from_arrays(**arrays, name=str(place))


def describe_data(data: Dataset) -> dict[str, Any]:
    """What a site reveals of its data: counts, shapes and types, never a sample."""
    return {
        "data": data.name,
        "train": len(data.x),
        "test": len(data.x_test),
        "shape": list(data.shape),
        "target": list(data.y.shape[1:]),
        "dtype": str(data.x.dtype),
        "classes": data.classes,
    }


def common_description(descriptions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The description that holds for all sites; raises UserError that names a site that differs."""
    first, *rest = descriptions
    for name in (first, *rest):
        if why := difference(descriptions[name], descriptions[first], f"'{first}'"):
            raise UserError(f"site '{name}' {why}.")
    classes = [description["classes"] for description in descriptions.values()]
    return {**descriptions[first], "classes": None if None in classes else max(classes)}


def odd_sites(descriptions: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The sites whose data differ from those of more than half of all, and how."""
    for name, description in descriptions.items():
        odd = {
            other: why
            for other, theirs in descriptions.items()
            if (why := difference(theirs, description, f"'{name}'"))
        }
        if name not in odd and 2 * len(odd) < len(descriptions):
            return odd
    return {}


def difference(
    description: Mapping[str, Any], other: Mapping[str, Any], other_name: str
) -> str | None:
    """Why a site's data cannot be trained on together with another's, or None."""
    if "shape" not in description:
        return (
            f"has no samples of its own, but a part of '{description.get('data')}', and the run "
            f"is about '{OWN}' ones; {CHECK_DATA}, or begin a run about these data"
        )
    for key in ("shape", "target", "dtype"):
        if description[key] != other.get(key):
            return (
                f"has samples with {key} {description[key]}, but {other_name} has "
                f"{other.get(key)}; {CHECK_DATA}"
            )
    if (description["classes"] is None) != (other["classes"] is None):
        kinds = "classification", "regression"
        return (
            f"has a {kinds[description['classes'] is None]}, but {other_name} has a "
            f"{kinds[other['classes'] is None]}; {CHECK_DATA}"
        )
    return None


def placeholder_data(description: Mapping[str, Any]) -> Dataset:
    """Data for a server that has none: one sample of zeros, which fixes the network's input."""
    classes = description["classes"]
    dtype = DTYPES[description["dtype"]]
    x = torch.zeros(1, *description["shape"], dtype=dtype)
    y = torch.zeros(1, *description["target"], dtype=torch.int64 if classes else torch.float32)
    return Dataset(OWN, x, y, x, y, classes)


def data_of_sites(
    spec: RunSpec,
    server_data: str | None,
    registry: SiteRegistry,
    description: SiteDescription,
) -> dict[str, Any]:
    """The federation's settings about data where sites have their own samples."""
    config = spec.config
    sites = registry.descriptions.values()
    counts = [(site["train"], site["test"]) for site in sites]
    counts += [UNKNOWN_COUNTS] * (registry.capacity - len(counts))
    settings: dict[str, Any] = {"partition": RemotePartition(counts, config.valid)}
    if server_data is None:
        return settings | {"data": placeholder_data(description)}
    data = _as_classified(from_npz(server_data), description)
    if config.validation_size is None and spec.method.capabilities.server_validation:
        settings["validation_size"] = float(len(data.x) - 1)  # all that the server has
    return settings | {"data": data}


def _as_classified(data: Dataset, description: SiteDescription) -> Dataset:
    """The server's samples under the sites' name and number of classes."""
    return dataclasses.replace(data, name=OWN, classes=description["classes"])


def common_source(data: str) -> str:
    """The canonical name of a common data set: one from the catalogue, or the path of FILE.npz."""
    if data.endswith(".npz"):
        return str(located({"data": data})["data"])
    try:
        return canonical(data)
    except UserError as problem:
        if not Path(data).is_dir():
            hint = "." if "/" in data or os.sep in data else f"; {problem}"
            raise UserError(f"there is no folder '{data}' with the site's samples{hint}") from None
        raise UserError(
            f"'{data}' is a folder; pack its arrays into one FILE.npz to spread them over sites, "
            "or start every site with a folder of its own by `fedhelix site`."
        ) from None
