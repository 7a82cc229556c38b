"""Data sets by name: those that are built in, and those in files or on the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.options import checks_arguments
from fedhelix.data import sources
from fedhelix.data.builtin import BUILT_IN
from fedhelix.data.datasets import Dataset
from fedhelix.data.federated import FOLDERS, find_folder, how_to_get


@dataclass(frozen=True)
class Availability:
    """Whether a data set can be loaded, from where, and what to do if not."""

    name: str
    found: str | None
    train: int | None
    test: int | None
    how: str


@checks_arguments
def load(name: str = "digits", data_dir: str | Path | None = None) -> Dataset:
    """A data set by its name, such as digits, wine, synthetic-text, fashion-mnist or cifar10.

    Those in `BUILT_IN` need no file. The others are searched for in `data_dir` (or the folder that
    FEDHELIX_DATA names), in the user's cache and in the system's folder of data sets; otherwise
    they are downloaded through Hugging Face `datasets`, if that is installed. Official files are
    read as they are, those of femnist, shakespeare, har and ag-news in a folder of this name; so is
    NAME.npz with x_train, y_train, x_test, y_test (uint8, N×H×W or
    N×H×W×C).
    """
    folder = sources.explicit_folder(data_dir)
    known = canonical(name)
    if known in BUILT_IN:
        return BUILT_IN[known].make()
    if known in FOLDERS:
        roots = sources.roots(folder)
        place = find_folder(known, roots)
        if place is None:
            raise UserError(f"{known} is not on this machine; {how_to_get(known, roots)}.")
        return FOLDERS[known].read(place)
    source = sources.SOURCES[known]
    stored = sources.find(source, folder)
    raw = stored.read() if stored else sources.download(source, folder)
    origin = stored.path if stored else source.hub
    x, y, x_test, y_test = (torch.from_numpy(array) for array in raw)
    try:
        return Dataset(known, x, y, x_test, y_test, source.classes, source.mean, source.std)
    except UserError as problem:
        raise UserError(f"'{origin}' does not hold {known}: {problem}") from None


def available(data_dir: str | Path | None = None) -> list[Availability]:
    """All data sets that `load` knows, each with where it lies or how to get it."""
    folder = sources.explicit_folder(data_dir)
    rows = [
        Availability(name, f"{item.origin} (built in)", *item.sizes, how="nothing to do")
        for name, item in BUILT_IN.items()
    ]
    for name, source in sources.SOURCES.items():
        try:
            stored = sources.find(source, folder)
            if stored is None:
                how = sources.advice(source, folder)
                rows.append(Availability(name, None, *source.sizes, how=how))
            else:
                path = str(stored.path)
                rows.append(Availability(name, path, *stored.sizes(), how="nothing to do"))
        except UserError as problem:  # a damaged file must not hide the other data sets
            rows.append(Availability(name, None, None, None, how=str(problem)))
    roots = sources.roots(folder)
    for name in FOLDERS:
        place = find_folder(name, roots)
        how = how_to_get(name, roots) if place is None else "nothing to do"
        rows.append(Availability(name, None if place is None else str(place), None, None, how))
    return rows


def canonical(name: str) -> str:
    """The name as the library spells it: `Fashion_MNIST` is fashion-mnist."""
    known = (*BUILT_IN, *sources.SOURCES, *FOLDERS)
    spelled = str(name).strip().lower().replace("_", "-")
    if spelled not in known:
        if Path(name).suffix == ".npz":
            raise UserError(
                f"'{name}' is no data set by name; fedhelix.data.from_npz('{name}') reads it."
                if Path(name).exists()
                else f"there is no file '{name}'."
            )
        if Path(name).suffix or Path(name).exists():
            raise UserError(
                f"'{name}' is no data set; a file of your own is an npz file with x and y, and in "
                "Python from_table(pandas.read_csv(...)) takes a table."
            )
        raise unknown("data set", name, known)
    return spelled
