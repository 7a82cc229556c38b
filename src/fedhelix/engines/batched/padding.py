"""Whether batches may be filled up with samples that do not count.

They may where nothing about a sample depends on the others of its batch. BatchNorm looks at all of
them, and so may a network or a loss of the user's: a few samples tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedhelix.core.copies import copied
from fedhelix.core.seeds import seeded
from fedhelix.engines.local import Setup, call, features, gather, noisy

COUNTED, MANY = 4, 64  # samples; a network may look at others only once there are enough of them
CLOSE = 1e-5  # relative: batches of one size are computed alike
SIMILAR = 1e-2  # relative: those of another size may be computed in another precision


class Results(NamedTuple):
    """What a forward pass gives."""

    samples: list[Tensor]  # outputs, losses and features of the samples that count
    buffers: list[Tensor]


@torch.no_grad()
def allows_padding(setup: Setup) -> bool:
    """Whether short batches of the training may be padded, with a mask for the loss.

    Whatever it contains, padding must change neither the results of the other samples nor the
    buffers. Layers such as dropout draw other numbers for batches of another size, so without
    padding the results may also be the same in evaluation mode only.
    """
    if setup.layers.norm:
        return False
    try:
        return all(_same_when_padded(_trial(setup), count) for count in _sizes(setup))
    except Exception:  # a user's own network or loss may refuse such batches in any way
        return False


def _same_when_padded(setup: Setup, count: int) -> bool:
    """Whether so many samples have the same results with padding and without."""
    usual, other = _paddings(setup, count)
    padded, changed = _results(setup, count, usual), _results(setup, count, other)
    if not _are_close([*padded.samples, *padded.buffers], [*changed.samples, *changed.buffers]):
        return False
    alone = _results(setup, count)
    if not _are_close(padded.buffers, alone.buffers, SIMILAR):
        return False
    if _are_close(padded.samples, alone.samples, SIMILAR):
        return True
    setup.module.eval()
    usual_alone = _results(setup, count, usual).samples, _results(setup, count).samples
    return _are_close(*usual_alone, SIMILAR)


@torch.no_grad()
def mixes_samples(setup: Setup) -> bool:
    """Whether in evaluation mode the outputs for a sample depend on the others of its batch."""
    trial = _trial(setup)
    trial.module.eval()
    try:
        for count in _sizes(setup):
            paddings = _paddings(setup, count)
            one, two = (_results(trial, count, padding).samples[0] for padding in paddings)
            if not _are_close([one], [two]):
                return True
    except Exception:
        return True
    return False


def _trial(setup: Setup) -> Setup:
    """The same with a network of its own in training mode, for others may run theirs in threads,
    and with an initial model none of whose parameters are zero.
    """
    return replace(setup, module=copied(setup.module).train(), initial=noisy(setup))


def _sizes(setup: Setup) -> list[int]:
    """A few samples, and as many as in a batch of the training unless these are more than many."""
    return sorted({COUNTED, max(COUNTED, min(MANY, setup.training.batch_size))})


def _paddings(setup: Setup, count: int) -> tuple[Tensor, Tensor]:
    """The samples that pad a batch in the training, and some others."""
    last = len(setup.data.y) - 1
    others = torch.linspace(last, min(1, last), count - 1).long()
    return torch.zeros_like(others), others


def _results(setup: Setup, count: int, padding: Tensor | None = None) -> Results:
    """The results of the initial model for so many samples."""
    buffers = {name: setup.initial[name].clone() for name in setup.layers.buffers}
    state = setup.initial | buffers
    samples = torch.linspace(0, len(setup.data.y) - 1, count).long()
    if padding is not None:
        samples = torch.cat([samples, padding])
    with seeded(0, setup.device):
        x, y, _ = gather(setup, samples, None)
        outputs = call(setup, state, x).float()
        losses = setup.objective.losses(outputs, y)
        if losses.dim() == 0:  # the loss of a whole batch, which no mask can divide
            losses = losses.new_full((count,), torch.nan)
        found = [outputs, losses]
        if setup.method.overrides("loss") and setup.layers.weighted:
            found.append(features(setup, state, x))
    return Results([value[:count] for value in found], list(buffers.values()))


def _are_close(some: list[Tensor], others: list[Tensor], tolerance: float = CLOSE) -> bool:
    pairs = [(a.double(), b.double()) for a, b in zip(some, others, strict=True) if a.numel()]
    return all(torch.allclose(a, b, tolerance, tolerance * float(a.abs().max())) for a, b in pairs)
