"""Does a network fit the data? One pass tells, and leaves the network as it was."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from fedhelix.core.errors import UserError

LENT = threading.RLock()
"""Held while PyTorch's default generator, which is one for all threads, is lent a seed."""


def probe(module: nn.Module, example: Tensor) -> Any:
    """The output for a batch in evaluation mode, without gradients; modes, statistics and
    generators stay untouched.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with LENT, torch.no_grad(), torch.random.fork_rng(devices=[]):
            return module(example)
    except Exception as problem:  # a user's own network may fail in any way
        reason = str(problem).strip().partition("\n")[0].rstrip(".") or type(problem).__name__
        raise UserError(
            f"the model does not fit the data: a batch of shape {tuple(example.shape)} fails "
            f"with '{reason}'."
        ) from problem
    finally:
        for part, training in modes.items():
            part.training = training


def check_fits(module: nn.Module, example: Tensor, outputs: int | None = None) -> None:
    """Refuse a network that fails on a prepared batch, or that does not give `outputs` numbers per
    sample.
    """
    output = probe(module, example)
    if not isinstance(output, Tensor):
        raise UserError(f"the model must return one tensor, not {type(output).__name__}.")
    expected = (len(example), outputs)
    if outputs is not None and tuple(output.shape) != expected:
        raise UserError(
            f"the model's output does not fit the classes: a batch of {len(example)} gives shape "
            f"{tuple(output.shape)}, and {expected} is needed."
        )
