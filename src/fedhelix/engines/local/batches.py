"""The minibatches of a client's training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.method import Batch, Phase
from fedhelix.core.parts import in_order
from fedhelix.core.seeds import draw
from fedhelix.data import Dataset, rows_of
from fedhelix.engines.local.setup import ClientTask, Setup, Subset

SMALLEST = 8  # samples from which BatchNorm can estimate a mean and a variance


class BatchSchedule(NamedTuple):
    """The samples of each training step, what their augmentation drew, and how wide a batch of
    sequences is.

    Rows of short batches are padded with zeros.
    """

    samples: Tensor  # steps x batch size
    draws: Tensor | None  # steps x batch size x numbers
    sizes: list[int]  # of each row without the padding
    widths: list[int] | None  # of each row, where sequences are cut to the longest of a batch

    def steps(self) -> Iterator[tuple[Tensor, Tensor | None, int | None]]:
        """The batches one by one, without the padding."""
        for row, size in enumerate(self.sizes):
            draws = None if self.draws is None else self.draws[row, :size]
            width = None if self.widths is None else self.widths[row]
            yield self.samples[row, :size], draws, width


def epochs_of(setup: Setup, phase: Phase) -> int:
    """How often a phase visits every sample."""
    return setup.training.epochs if phase.epochs is None else phase.epochs


def batch_sizes(count: int, size: int, norm: bool) -> list[int]:
    """The sizes of an epoch's batches.

    A network with BatchNorm (`norm`) skips a last batch under 8 samples, whose statistics would
    spoil the running ones; another epoch's order includes these samples. A client's only batch
    stays, and so do full batches of any size.
    """
    sizes = [min(size, count - at) for at in range(0, count, size)]
    if norm and len(sizes) > 1 and sizes[-1] < min(SMALLEST, size):
        sizes.pop()
    return sizes


def batch_schedule(
    setup: Setup, task: ClientTask, phase: Phase, purpose: str, index: int = 0
) -> BatchSchedule:
    """The minibatches of a phase, in a new order every epoch; see `Training.sampler`.

    With BatchNorm, an epoch leaves out a last batch that is too small, see `batch_sizes`.
    """
    indices = torch.from_numpy(setup.splits[task.client].train)
    epochs, count, size = epochs_of(setup, phase), len(indices), setup.training.batch_size
    generator = draw(setup.seed, f"{purpose}-{index}", task.round, task.client)
    sizes = batch_sizes(count, size, bool(setup.layers.norm))
    rows, used, augmentation = len(sizes), sum(sizes), setup.training.augmentation
    balance = class_balance(setup, indices) if setup.training.sampler == "balanced" else None
    samples = torch.zeros(epochs, rows * size, dtype=torch.int64)
    draws = [] if augmentation is None else [augmentation.draw(0, generator)]
    for epoch in range(epochs):
        order = (
            torch.randperm(count, generator=generator)
            if balance is None
            else torch.multinomial(balance, count, replacement=True, generator=generator)
        )
        samples[epoch, :used] = indices[order][:used]
        if augmentation is not None:
            drawn = augmentation.draw(count, generator)[:used]
            draws.append(F.pad(drawn, [0, 0, 0, rows * size - used]))
    samples = samples.view(epochs * rows, size)
    return BatchSchedule(
        samples,
        torch.cat(draws).view(epochs * rows, size, draws[0].shape[1]) if draws else None,
        sizes * epochs,
        widths_of(setup, samples, sizes * epochs),
    )


def widths_of(setup: Setup, samples: Tensor, sizes: list[int]) -> list[int] | None:
    """How wide the batches of sequences are, each as its widest sample."""
    if setup.data.widths is None or not setup.cuts:
        return None
    rows = zip(setup.data.widths[samples], sizes, strict=True)
    return [int(row[:size].max()) for row, size in rows]


def class_balance(setup: Setup, indices: Tensor) -> Tensor:
    """The weights with which all classes of a client are equally frequent."""
    labels = setup.data.y[indices.to(setup.data.y.device)].cpu()
    return 1 / labels.bincount().double()[labels]


def gather(setup: Setup, samples: Tensor, draws: Tensor | None, width: int | None = None) -> Batch:
    """Samples as the model receives them, sequences cut to a width; samples and draws may have a
    leading axis of clients.
    """
    samples = samples.to(setup.device)
    x, augmentation = rows_of(setup.data.x, samples), setup.training.augmentation
    if draws is not None and augmentation is not None:
        flat, drawn = x.reshape(-1, *setup.data.x.shape[1:]), draws.to(setup.device)
        x = augmentation.apply(flat, drawn.reshape(len(flat), -1)).reshape(x.shape)
    x, y = setup.data.prepare(x), setup.data.y[samples]
    return Batch(x, y) if width is None else Batch(*setup.data.cut(x, y, width))


def unscaled(data: Dataset, x: Tensor) -> Tensor:
    """Samples before they are normalised: pixels between 0 and 1, other values as they are."""
    if data.fields is not None:
        parts = in_order(data.prepare(x))
        return torch.cat([part.float().reshape(len(part), -1) for part in parts], 1)
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def samples_of(setup: Setup, subset: Subset) -> tuple[Tensor, Tensor]:
    """The raw samples and targets of a subset."""
    data = setup.data
    return (data.x, data.y) if subset == "train" else (data.x_test, data.y_test)
