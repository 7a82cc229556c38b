"""Finds the files of well-known data sets: the user's folder, the cache, the system, the hub."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.files import cache_folder, write_atomically
from fedhelix.data.readers import (
    KEYS,
    Arrays,
    images,
    labels,
    read_cifar,
    read_entries,
    read_idx_set,
    read_npz,
    read_svhn,
)

FOLDER_VARIABLE = "FEDHELIX_DATA"
SYSTEM_FOLDERS = (Path("/usr/share/datasets"),)


@dataclass(frozen=True)
class Source:
    """A well-known data set: its facts, its official files and its name on the Hugging Face hub."""

    name: str
    classes: int
    sizes: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    files: tuple[str, ...]
    read: Callable[[list[Path]], Arrays]
    folders: tuple[str, ...]
    """Where the files are below a data folder; "." where their names are unambiguous."""
    hub: str | None = None
    hub_config: str | None = None
    pickled: str | None = None
    """The folder of the official version that is pickle, and therefore never read."""


@dataclass(frozen=True)
class StoredFiles:
    """A data set's files on this machine, ready to be read."""

    path: Path
    source: Source
    files: list[Path]

    @property
    def packed(self) -> bool:
        """Whether it is one npz file rather than the official ones."""
        return self.path.suffix == ".npz"

    def read(self) -> Arrays:
        """Images and labels."""
        return read_npz(self.path) if self.packed else self.source.read(self.files)

    def sizes(self) -> tuple[int, int]:
        """How many samples train and test have, without reading images."""
        if not self.packed:
            return self.source.sizes
        train, test = read_entries(self.path, ("y_train", "y_test"))
        return len(train), len(test)


def explicit_folder(data_dir: str | Path | None) -> Path | None:
    """The folder that the user named, if any."""
    if data_dir is None:
        named = os.environ.get(FOLDER_VARIABLE)
        return Path(named).expanduser() if named else None
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise UserError(f"data_dir is '{folder}', which is no folder; create it or name another.")
    return folder


def roots(folder: Path | None) -> list[Path]:
    """All folders to look in, in order."""
    return [*([folder] if folder else []), cache_folder(), *SYSTEM_FOLDERS]


def find(source: Source, folder: Path | None) -> StoredFiles | None:
    """The first folder with the data set: as an npz file, or else as the official files."""
    for root in roots(folder):
        for spelling in (source.name, source.name.replace("-", "_")):
            path = root / f"{spelling}.npz"
            if path.is_file():
                return StoredFiles(path, source, [])
        for place in places(root, source):
            files = [file for file in (existing(place / name) for name in source.files) if file]
            if len(files) == len(source.files):
                return StoredFiles(place, source, files)
    return None


def existing(path: Path) -> Path | None:
    """The file, compressed or not.

    Some copies of MNIST have a dot in the name (`train-images.idx3-ubyte`).
    """
    dotted = path.with_name(path.name.replace("-idx", ".idx"))
    for variant in (
        path,
        path.with_name(path.name + ".gz"),
        dotted,
        dotted.with_name(dotted.name + ".gz"),
    ):
        if variant.is_file():
            return variant
    return None


def places(root: Path, source: Source) -> list[Path]:
    """Folders that may hold the official files: those named after the data set, or such a root.

    The name matters: the files of MNIST and Fashion-MNIST are named alike.
    """
    inside = [root / folder for folder in source.folders]
    tails = [Path(folder).parts for folder in source.folders]
    named = any(tail and root.absolute().parts[-len(tail) :] == tail for tail in tails)
    return [*inside, root] if named else inside


def advice(source: Source, folder: Path | None) -> str:
    """What the user can do to get a data set that was not found."""
    target = folder or cache_folder()
    ways = [
        f"put {source.name}.npz ({', '.join(KEYS)}) into {target} "
        f"or the official files ({', '.join(source.files)}) into {target / source.folders[0]}"
    ]
    if source.hub is None:
        ways.append(
            "the official files are at "
            "https://www.nist.gov/itl/products-and-services/emnist-dataset"
        )
    elif importlib.util.find_spec("datasets") is None:
        ways.append("or `pip install 'fedhelix[data]'`, and a first run downloads it")
    else:
        ways.append(f"or let a first run download it from huggingface.co/datasets/{source.hub}")
    pickled = [
        root / source.pickled
        for root in roots(folder)
        if source.pickled and (root / source.pickled).exists()
    ]
    if pickled:
        ways.append(
            f"{pickled[0]} is the python version, which is pickle and never read: "
            "take the binary version"
        )
    return "; ".join(ways)


def download(source: Source, folder: Path | None = None) -> Arrays:
    """Fetch a data set through Hugging Face `datasets` and keep it in the cache."""
    missing = f"{source.name} was not found in {', '.join(map(str, roots(folder)))}"
    if source.hub is None or importlib.util.find_spec("datasets") is None:
        raise UserError(f"{missing}: {advice(source, folder)}.")
    try:
        hub = importlib.import_module("datasets").load_dataset(source.hub, source.hub_config)
        train, test = (columns(hub[part]) for part in ("train", "test"))
    except Exception as problem:  # whatever a network may bring
        reason = " ".join(str(problem).split())
        raise UserError(
            f"{missing} and could not be downloaded ({reason}): {advice(source, folder)}."
        ) from problem
    buffer = io.BytesIO()
    np.savez(buffer, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
    path = cache_folder() / f"{source.name}.npz"
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as problem:
        warnings.warn(f"{source.name} could not be kept as {path}: {problem}", stacklevel=2)
    return images(train[0]), labels(train[1]), images(test[0]), labels(test[1])


def columns(part: object) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one part of a hub data set, whose columns have various names."""
    names = part.column_names  # type: ignore[attr-defined]
    image = next(name for name in ("image", "img") if name in names)
    label = next(name for name in ("fine_label", "label") if name in names)
    x = np.stack([np.asarray(one, dtype=np.uint8) for one in part[image]])  # type: ignore[index]
    return x, np.asarray(part[label], dtype=np.uint8)  # type: ignore[index]


IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
EMNIST_FILES = tuple(f"emnist-byclass-{name.replace('t10k', 'test')}" for name in IDX_FILES)
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")

SOURCES = {
    source.name: source
    for source in (
        Source(
            "mnist", 10, (60_000, 10_000), (0.1307,), (0.3081,), IDX_FILES, read_idx_set,
            folders=("mnist", "MNIST", "MNIST/raw"), hub="ylecun/mnist",
        ),
        Source(
            "fashion-mnist", 10, (60_000, 10_000), (0.2860,), (0.3530,), IDX_FILES, read_idx_set,
            folders=("fashion-mnist", "fashion_mnist", "FashionMNIST", "FashionMNIST/raw"),
            hub="zalando-datasets/fashion_mnist",
        ),
        Source(
            "emnist", 62, (697_932, 116_323), (0.1307,), (0.3081,), EMNIST_FILES,
            functools.partial(read_idx_set, transposed=True),
            folders=("emnist", "EMNIST/raw", "gzip", "."),
        ),
        Source(
            "cifar10", 10, (50_000, 10_000), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010),
            CIFAR10_FILES, functools.partial(read_cifar, label_bytes=1),
            folders=("cifar-10-batches-bin", "cifar10", "."), hub="uoft-cs/cifar10",
            pickled="cifar-10-batches-py",
        ),
        Source(
            "cifar100", 100, (50_000, 10_000), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
            ("train.bin", "test.bin"), functools.partial(read_cifar, label_bytes=2),
            folders=("cifar-100-binary", "cifar100"), hub="uoft-cs/cifar100",
            pickled="cifar-100-python",
        ),
        Source(
            "svhn", 10, (73_257, 26_032), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970),
            ("train_32x32.mat", "test_32x32.mat"), read_svhn,
            folders=("svhn", "."), hub="ufldl-stanford/svhn", hub_config="cropped_digits",
        ),
    )
}  # fmt: skip
