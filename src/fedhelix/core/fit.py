"""Does a network fit the data? One pass tells, and leaves the network as it was."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedhelix.core.copies import copied
from fedhelix.core.errors import UserError
from fedhelix.core.parts import MASK, Inputs, arguments, each, in_order, output_of, shapes

CASTS = {torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}
TYPES = re.compile(r"dtype|scalar type|type \(|Double")  # what PyTorch says of two types
LENT = threading.RLock()
"""Held while PyTorch's default generator, which is one for all threads, is lent a seed."""


def probe(module: nn.Module, example: Inputs) -> Any:
    """The output for a batch in evaluation mode, without gradients; modes, statistics and
    generators stay untouched.
    """
    copied = each(torch.clone, example)
    modes, (args, keywords) = {p: p.training for p in module.modules()}, arguments(copied)
    buffers = [
        (part, name, value, value.clone())
        for part in modes
        for name, value in part._buffers.items()
        if value is not None
    ]
    _check_names(module, keywords)
    module.eval()
    try:
        with LENT, torch.no_grad(), torch.random.fork_rng(devices=[]):
            returned = module(*args, **keywords)
    except Exception as problem:  # a user's own network may fail in any way
        reason = str(problem).strip().partition("\n")[0].rstrip(".") or type(problem).__name__
        raise UserError(
            f"the model does not fit the data: a batch of shape {shapes(example)} fails "
            f"with '{reason}'{_advice(module, example, reason)}."
        ) from problem
    finally:
        for part, training in modes.items():
            part.training = training
        for part, name, value, before in buffers:  # a forward may change or replace them
            part._buffers[name] = value.copy_(before)
    if any(part._version for part in in_order(copied)):  # it counts changes in place
        raise UserError(
            "the model changes its inputs in place; let its forward begin with x = x.clone(), or "
            "leave out inplace=True in its first layer."
        )
    return returned


def _advice(module: nn.Module, example: Inputs, reason: str) -> str:
    """What to change, where samples that are no floats are the likely cause."""
    parts, keywords = arguments(example)
    names = list(inspect.signature(module.forward).parameters)
    if len(parts) > 1 and MASK in names[len(parts) :]:  # the padding's mask came as another one
        return (
            f"; its argument {len(parts)} is '{names[len(parts) - 1]}': give x as "
            f"{{'{names[0]}': x}}, or a table the columns '{names[0]}' and '{MASK}', so that it "
            f"gets a mask as '{MASK}'"
        )
    given = [CASTS[weight.dtype] for weight in module.parameters() if weight.dtype in CASTS]
    types = [*given, *(cast for cast in CASTS.values() if cast in reason.lower())]
    if types and TYPES.search(reason):
        cast = types[0]
        return (
            f"; samples are float32: leave .{cast}() out, or let its forward begin with x.{cast}()"
        )
    if "missing" in reason and "positional argument" in reason:
        got = ", ".join(keywords) or f"{len(parts)}, a mask only with sequences to pad"
        return f"; give samples a part for each argument of its forward, which gets {got}"
    if len(parts) > 1 and "positional argument" in reason:
        return (
            f"; its forward gets {len(parts)} arguments: sequences of different lengths are padded "
            "and come with a mask as the last one"
        )
    if "index out of range" in reason:
        tokens = [part for part in in_order(example) if part.dtype == torch.int64]
        if tokens and (largest := max(int(part.max()) for part in tokens)) >= 0:
            return f"; tokens go up to {largest}, so an embedding needs {largest + 1} rows"
    if "indices" in reason and "Long" in reason and "Float" in reason:  # for an embedding
        return (
            "; tokens are whole numbers of any type but uint8, which is pixels: give them as int64"
        )
    if TYPES.search(reason) and any(part.dtype == torch.int64 for part in parts):
        return "; whole numbers are tokens: give features as floats, and pixels as uint8 or floats"
    return ""


def _check_names(module: nn.Module, keywords: Iterable[str]) -> None:
    """Refuse samples with parts that the network's `forward` does not take."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if unknown := [name for name in keywords if name not in parameters]:
        raise UserError(
            f"the model does not take the part '{unknown[0]}' of a sample; it takes "
            f"{', '.join(parameters)}: give the parts these names, or leave the others out."
        )


def _check_ignored(module: nn.Module, keywords: dict[str, Tensor], output: Tensor) -> None:
    """Refuse parts that only the `**kwargs` of a network takes and that change nothing."""
    named = {
        name for part in module.modules() for name in inspect.signature(part.forward).parameters
    }
    for name in [name for name in keywords if name not in named]:
        others = {other: value for other, value in keywords.items() if other != name}
        if others and _gives(module, others, output):
            raise UserError(
                f"the model ignores the part '{name}' of a sample; leave it out, or give it a name "
                "that the model knows."
            )


def check_constant_buffers(module: nn.Module, example: Inputs, who: str) -> None:
    """Refuse a network whose training changes a buffer, for `who` needs samples apart."""
    (args, keywords), trained = arguments(each(torch.clone, example)), copied(module).train()
    with LENT, torch.no_grad(), torch.random.fork_rng(devices=[]):
        trained(*args, **keywords)
    after = dict(trained.named_buffers())
    for name, before in module.named_buffers():
        if before.is_floating_point() and not torch.equal(before, after[name]):
            raise UserError(
                f"{who} needs the gradient of each sample alone, and training changes the "
                f"network's buffer '{name}'; use a network without it."
            )


def _gives(module: nn.Module, example: Inputs, output: Tensor) -> bool:
    """Whether these are the outputs for a batch."""
    try:
        return torch.equal(output_of(probe(module, example)), output)
    except UserError:
        return False


def check_fits(module: nn.Module, example: Inputs, outputs: int | None = None) -> Tensor:
    """Refuse a network that fails on a prepared batch, or that does not give `outputs` numbers per
    sample; returns its outputs.
    """
    output = output_of(probe(module, example))
    args, keywords = arguments(example)
    _check_ignored(module, keywords, output)
    size = len(next(iter((*args, *keywords.values()))))
    if outputs is not None and tuple(output.shape) != (size, outputs):
        of_pixels = "; give masks of pixels as integers, y.long()" if output.dim() > 2 else ""
        raise UserError(
            f"the model's output does not fit the targets: a batch of {size} gives shape "
            f"{tuple(output.shape)}, and {(size, outputs)} is needed{of_pixels}."
        )
    return output
