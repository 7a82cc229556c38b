"""Data sets that need no file: those of scikit-learn, and those that are made here.

What is made here is the same for every seed of a run, as if it had been downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from fedhelix.core.imports import package_folder
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.datasets import Dataset
from fedhelix.data.sampling import stratified

OWNERS = 20  # of the data sets that are made here
EACH = 200  # samples of an owner; every fifth is for testing
SYMBOLS = 12  # of the alphabet of synthetic-text
LETTERS = 16  # of a text, after which the next symbol is to be predicted
MOTIONS = 6  # classes of synthetic-series
MOMENTS = 48  # values of a series


def load_digits() -> Dataset:
    """scikit-learn's 1,797 digits of 8×8 pixels, always in the same stratified 80/20 split."""
    # Read from its file, because importing scikit-learn takes two seconds.
    table = np.loadtxt(package_folder("sklearn") / "datasets/data/digits.csv.gz", delimiter=",")
    x = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    y = table[:, -1].astype(np.int64)
    test = np.zeros(len(y), dtype=bool)
    test[stratified(y, 359, numpy_draw(0, "digits"))] = True
    pixels, digits = torch.from_numpy(x), torch.from_numpy(y)
    return Dataset(
        "digits", pixels[~test], digits[~test], pixels[test], digits[test], 10, (0.3053,), (0.3760,)
    )


def load_table(name: str, test_size: int) -> Dataset:
    """A table of scikit-learn with its columns normalised, in a stratified 80/20 split."""
    from sklearn import datasets

    values, labels = getattr(datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    x, y = torch.from_numpy(values).float(), torch.from_numpy(labels).long()
    test = np.zeros(len(y), dtype=bool)
    test[stratified(labels, test_size, numpy_draw(0, name))] = True
    mean, std = (tuple(column.tolist()) for column in (x[~test].mean(0), x[~test].std(0)))
    return Dataset(name, x[~test], y[~test], x[test], y[test], int(y.max()) + 1, mean, std)


def transitions() -> np.ndarray:
    """For each author the chances of the next symbol after each (authors × symbols × symbols).

    Two fifths of them come from a language that all share, the rest from the author's own habits.
    """
    draw = numpy_draw(0, "synthetic-text")
    chances = draw.dirichlet(np.full(SYMBOLS, 0.05), size=(OWNERS + 1, SYMBOLS))
    return 0.4 * chances[:1] + 0.6 * chances[1:]


def synthetic_text() -> Dataset:
    """Texts of 20 authors, each a Markov chain; the label is the symbol that comes next."""
    draw = numpy_draw(0, "synthetic-text", 1)
    authors = np.repeat(np.arange(OWNERS), EACH)
    limits = transitions().cumsum(2)[authors]
    text = np.zeros((len(authors), LETTERS + 1), dtype=np.int64)
    text[:, 0] = draw.integers(SYMBOLS, size=len(text))
    for place in range(LETTERS):
        row = limits[np.arange(len(text)), text[:, place]]
        text[:, place + 1] = (draw.random((len(text), 1)) > row[:, :-1]).sum(1)
    return owned("synthetic-text", text[:, :-1], text[:, -1], authors, SYMBOLS)


def synthetic_series() -> Dataset:
    """Signals of 20 sensors; the label is the motion, which decides frequencies and wave form.

    Sensors differ in gain, offset and sampling rate; phases and noise differ in every sample.
    """
    draw = numpy_draw(0, "synthetic-series")
    sensors = np.repeat(np.arange(OWNERS), EACH)
    motion = np.tile(np.arange(MOTIONS), OWNERS * EACH // MOTIONS + 1)[: len(sensors)]
    gain, rate = draw.lognormal(0, 0.3, (2, OWNERS, 1))
    offset = draw.normal(0, 0.5, (OWNERS, 1))
    time = np.arange(MOMENTS) / MOMENTS * rate[sensors] ** 0.5
    turns = (1 + motion[:, None] // 2) * 2 * time + draw.random((len(sensors), 1))
    wave = np.sin(2 * np.pi * turns)
    wave = np.where(motion[:, None] % 2, np.sign(wave), wave)  # odd motions are abrupt
    signal = gain[sensors] * wave + offset[sensors] + draw.normal(0, 0.3, wave.shape)
    x = signal.astype(np.float32)[:, None]
    return owned("synthetic-series", x, motion, sensors, MOTIONS)


def owned(name: str, x: np.ndarray, y: np.ndarray, owners: np.ndarray, classes: int) -> Dataset:
    """Data with owners, of whose samples every fifth is for testing."""
    test = np.arange(len(y)) % 5 == 4
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    return Dataset(
        name, inputs[~test], labels[~test], inputs[test], labels[test], classes,
        owners=owners[~test], owners_test=owners[test],
    )  # fmt: skip


class BuiltIn(NamedTuple):
    """Where a data set comes from, how many samples it has, and how to make it."""

    origin: str
    sizes: tuple[int, int]
    make: Callable[[], Dataset]


BUILT_IN = {
    "digits": BuiltIn("scikit-learn", (1438, 359), load_digits),
    "breast-cancer": BuiltIn("scikit-learn", (455, 114), lambda: load_table("breast-cancer", 114)),
    "wine": BuiltIn("scikit-learn", (142, 36), lambda: load_table("wine", 36)),
    "synthetic-text": BuiltIn("made", (3200, 800), synthetic_text),
    "synthetic-series": BuiltIn("made", (3200, 800), synthetic_series),
}
