"""Whether batches of padded sequences may be cut to their longest without changing the results."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhelix.core.seeds import draw, seeded
from fedhelix.core.tree import State
from fedhelix.engines.local.batches import gather
from fedhelix.engines.local.network import call, features
from fedhelix.engines.local.setup import Setup

TRIED = 3  # samples of each width
NOISE = 0.1  # on the parameters: some start at zero, where nothing depends on them yet
CLOSE = 1e-4  # relative


@torch.no_grad()
def can_cut(setup: Setup) -> bool:
    """Whether the network takes shorter sequences and gives the same outputs and losses for them.

    It is tried with the longest samples of every width, which would lose most. BatchNorm would see
    fewer padded places in training, so networks with it are left alone.
    """
    widths, lengths = setup.data.widths, setup.data.lengths
    if widths is None or lengths is None or setup.layers.norm:
        return False
    order = lengths.argsort(descending=True)
    state, was_training = noisy(setup), setup.module.training
    setup.module.eval()
    try:
        with seeded(0, setup.device):
            return all(
                _is_same(setup, state, order[widths[order] == width][:TRIED], width)
                for width in widths.unique().tolist()
            )
    except Exception:  # a user's own network or loss may refuse other lengths in any way
        return False
    finally:
        setup.module.train(was_training)


def noisy(setup: Setup) -> State:
    """The initial model with other values of all parameters."""
    generator = draw(0, "cutting")
    noise = {
        name: torch.randn(setup.initial[name].shape, generator=generator)
        for name in setup.layers.parameters
    }
    return setup.initial | {
        name: setup.initial[name] + NOISE * value.to(setup.initial[name])
        for name, value in noise.items()
    }


def _is_same(setup: Setup, state: State, samples: Tensor, width: int) -> bool:
    """Whether outputs and losses of these samples are the same at this width.

    A method with a loss of its own may look at outputs and features, so they must be the same, too;
    otherwise outputs may be those of fewer places.
    """
    whole, cut = gather(setup, samples, None), gather(setup, samples, None, width)
    outputs = [call(setup, state, batch.x).float() for batch in (whole, cut)]
    losses = [
        setup.objective.losses(output, batch.y)
        for output, batch in zip(outputs, (whole, cut), strict=True)
    ]
    pairs = [losses]
    if setup.method.overrides("loss"):
        pairs += [outputs, [features(setup, state, batch.x) for batch in (whole, cut)]]
    elif outputs[0].shape == outputs[1].shape:
        pairs += [outputs]
    return all(_are_close(*pair) for pair in pairs)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one, other, CLOSE, CLOSE * float(one.abs().max()))
