"""The minibatches of a client's training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedhelix.core.method import Batch, Phase
from fedhelix.core.parts import arguments
from fedhelix.core.seeds import draw
from fedhelix.data import Dataset, crop_and_flip, draw_crops, rows_of
from fedhelix.engines.local.setup import ClientTask, Setup, Subset

SMALLEST = 8  # samples from which BatchNorm can estimate a mean and a variance


class BatchSchedule(NamedTuple):
    """The samples of each training step, and how they are cropped and flipped.

    Rows of short batches are padded with zeros.
    """

    samples: Tensor  # steps x batch size
    crops: Tensor | None
    sizes: list[int]  # of each row without the padding

    def steps(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The batches one by one, without the padding."""
        for row, size in enumerate(self.sizes):
            yield self.samples[row, :size], None if self.crops is None else self.crops[row, :size]


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
    """The minibatches of a phase: every epoch visits the samples once, in a new order.

    With BatchNorm, an epoch leaves out a last batch that is too small, see `batch_sizes`.
    """
    indices = torch.from_numpy(setup.splits[task.client].train)
    epochs, count, size = epochs_of(setup, phase), len(indices), setup.training.batch_size
    generator = draw(setup.seed, f"{purpose}-{index}", task.round, task.client)
    sizes = batch_sizes(count, size, bool(setup.layers.norm))
    rows = len(sizes)
    samples = torch.zeros(epochs, rows * size, dtype=torch.int64)
    crops = (
        torch.zeros(epochs, rows * size, 3, dtype=torch.int64) if setup.training.augment else None
    )
    for epoch in range(epochs):
        order = indices[torch.randperm(count, generator=generator)]
        samples[epoch, : sum(sizes)] = order[: sum(sizes)]
        if crops is not None:
            crops[epoch, : sum(sizes)] = draw_crops(count, generator)[: sum(sizes)]
    return BatchSchedule(
        samples.view(epochs * rows, size),
        None if crops is None else crops.view(epochs * rows, size, 3),
        sizes * epochs,
    )


def gather(setup: Setup, samples: Tensor, crops: Tensor | None) -> Batch:
    """Samples as the model receives them; both arguments may have a leading axis of clients."""
    samples = samples.to(setup.device)
    x = rows_of(setup.data.x, samples)
    if crops is not None:
        x = crop_and_flip(x, crops.to(setup.device))
    return Batch(setup.data.prepare(x), setup.data.y[samples])


def unscaled(data: Dataset, x: Tensor) -> Tensor:
    """Samples before they are normalised: pixels between 0 and 1, other values as they are."""
    if data.fields is not None:
        args, keywords = arguments(data.prepare(x))
        return torch.cat([part.float().flatten(1) for part in (*args, *keywords.values())], 1)
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def samples_of(setup: Setup, subset: Subset) -> tuple[Tensor, Tensor]:
    """The raw samples and targets of a subset."""
    data = setup.data
    return (data.x, data.y) if subset == "train" else (data.x_test, data.y_test)
