"""Readers of data files: npz, IDX (MNIST), binary records (CIFAR) and MATLAB files (SVHN).

None of them reads pickle. Every reader of a whole data set returns `Arrays`, or raises `UserError`
with the file's name when the file is damaged.
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedhelix.core.errors import UserError

KEYS = ("x_train", "y_train", "x_test", "y_test")

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Training images (uint8, N×C×H×W) and labels (int64), then the test ones: the order of KEYS."""

NPZ_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    EOFError,
    AttributeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy raises for a damaged npz file."""


def damaged(path: Path, problem: object) -> UserError:
    """The error for a file that is not what it should be."""
    return UserError(
        f"'{path}' is damaged: {str(problem).rstrip('.')}; remove it or put a whole copy there."
    )


def absent(path: Path) -> UserError:
    """The error for a file that a data set lacks."""
    return UserError(f"'{path}' is missing; put the file of that name there.")


def images(x: np.ndarray) -> np.ndarray:
    """N×H×W or N×H×W×C as N×C×H×W."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise ValueError(
            f"images must be uint8, N×H×W or N×H×W×C, not {x.dtype} of shape {x.shape}"
        )
    return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2))


def labels(y: np.ndarray) -> np.ndarray:
    """Labels as one int64 vector."""
    return y.astype(np.int64).ravel()


def read_entries(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Some arrays of an npz file."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return [file[name] for name in names]
    except KeyError:
        raise UserError(f"'{path}' lacks some of {', '.join(names)}.") from None
    except NPZ_ERRORS as problem:
        raise damaged(path, problem) from None


def read_npz(path: Path) -> Arrays:
    """A data set that is one npz file."""
    x, y, x_test, y_test = read_entries(path, KEYS)
    try:
        return images(x), labels(y), images(x_test), labels(y_test)
    except ValueError as problem:
        raise damaged(path, problem) from None


def read_idx(path: Path) -> np.ndarray:
    """One array of bytes in the IDX format of MNIST.

    The file holds two zeros, type 8, the number of axes, their lengths, and then the data.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as problem:
        raise damaged(path, problem) from None
    start = 4 + 4 * content[3] if len(content) >= 4 else 4
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise damaged(path, "it does not begin like an IDX file of bytes")
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise damaged(
            path, f"it has {len(content) - start} bytes of data where its head says {shape}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_idx_set(files: list[Path], transposed: bool = False) -> Arrays:
    """The four IDX files of MNIST and its relatives; EMNIST's images are stored transposed."""
    arrays = []
    for file, axes in zip(files, (3, 1, 3, 1), strict=True):
        array = read_idx(file)
        if array.ndim != axes:
            raise damaged(file, f"it has {array.ndim} axes instead of {axes}")
        if axes == 1:
            arrays.append(labels(array))
        else:
            upright = images(array.swapaxes(1, 2) if transposed else array)
            # A view of the file's bytes would be read-only.
            arrays.append(np.require(upright, requirements="W"))
    return arrays[0], arrays[1], arrays[2], arrays[3]


def read_cifar(files: list[Path], label_bytes: int) -> Arrays:
    """The binary version of CIFAR: records of labels (the fine one last) and 3×32×32 pixels."""
    width = label_bytes + 3 * 32 * 32
    batches = []
    for file in files:
        content = np.fromfile(file, dtype=np.uint8)
        if len(content) == 0 or len(content) % width:
            raise damaged(
                file, f"its {len(content)} bytes are not a number of records of {width} bytes"
            )
        batches.append(content.reshape(-1, width))
    train, test = np.concatenate(batches[:-1]), batches[-1]
    x, x_test = (
        np.ascontiguousarray(part[:, label_bytes:]).reshape(-1, 3, 32, 32) for part in (train, test)
    )
    return x, labels(train[:, label_bytes - 1]), x_test, labels(test[:, label_bytes - 1])


def read_svhn(files: list[Path]) -> Arrays:
    """The cropped digits of SVHN: MATLAB files with X (32×32×3×N) and y, where 10 means 0."""
    from scipy.io import loadmat  # comes with scikit-learn, and is needed for this data set only

    arrays = []
    for file in files:
        try:
            content = loadmat(file)
            arrays += [images(content["X"].transpose(3, 0, 1, 2)), labels(content["y"]) % 10]
        except Exception as problem:  # the reader fails in as many ways as files can be broken
            raise damaged(file, problem) from None
    return arrays[0], arrays[1], arrays[2], arrays[3]
