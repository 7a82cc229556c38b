"""A network as a function of its state: outputs, features before the head, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from fedhelix.core.cpu import prepare_bfloat16
from fedhelix.core.errors import UserError
from fedhelix.core.layers import WHOLE, Layer, Layers
from fedhelix.core.method import Batch, Local, Phase
from fedhelix.core.parts import Inputs, arguments, output_of
from fedhelix.core.shift import is_extended, shifted, unshifted, without_shift
from fedhelix.core.tree import State, wide
from fedhelix.data import rows_of
from fedhelix.engines.kernels import applied
from fedhelix.engines.local.batches import samples_of
from fedhelix.engines.local.setup import Setup, Subset

# Samples on a CPU, whose caches they should fit, and on a GPU, which needs many to be busy.
EVALUATED_AT_ONCE = (1000, 10_000)
RECORDED_AT_ONCE = 512  # samples that a GPU evaluates sooner than Python starts its kernels


def base_loss(setup: Setup, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """The mean loss of a model on a batch; updates BatchNorm statistics in `params` in place."""
    return setup.objective.mean_loss(forward(setup, params, batch.x), batch.y, batch.mask)


def check_gradient(setup: Setup, loss: Tensor) -> None:
    """Refuse a loss from which no gradient can be computed."""
    if not loss.requires_grad:
        where = f"{setup.method.label}.loss" if setup.method.overrides("loss") else "the loss"
        raise UserError(
            f"{where} has no gradient with respect to the model; compute it without argmax, "
            ".item(), .detach() and torch.no_grad()."
        )


def forward(setup: Setup, params: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """A model's outputs for prepared samples, in training precision."""
    device, half = setup.device.type, setup.training.precision == "bfloat16"
    if half and device == "cpu":
        prepare_bfloat16()
    if half and not torch._C._are_functorch_transforms_active():
        params = _halved(setup, params)
    with torch.autocast(device, torch.bfloat16) if half else nullcontext():
        outputs = call(setup, params, x)
    return outputs.float()


def channels_last(x: Tensor) -> Tensor:
    """On a GPU, large convolutions are fastest with the channels of a pixel side by side."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.dim() == 4 else x


def _halved(setup: Setup, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same model with what `autocast` would cast tensor by tensor cast in one go."""
    names = [name for name in setup.cast if name in params]
    if not names:
        return params
    halves = _Halves.apply(*(params[name] for name in names))
    return {**params, **dict(zip(names, halves, strict=True))}


class _Halves(torch.autograd.Function):
    """Tensors in bfloat16, and their gradients in float32."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        """One kernel for all."""
        return _converted(values, torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        """One kernel for all."""
        return _converted(slopes, torch.float32)


def _converted(values: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tensors in another type, in the same layout."""
    results = [torch.empty_like(value, dtype=dtype) for value in values]
    torch._foreach_copy_(results, list(values))
    return tuple(results)


def call(setup: Setup, params: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """A model's outputs, not below float32; changes its buffers as the network does.

    PyTorch's search for tied weights is as slow as a small layer, and does not put the weights of a
    module with two names back, so `Layers` has looked for them.
    """
    entries = without_shift(params)
    tied = {name: entries[first] for name, first in setup.layers.aliases.items()}
    replaced = entries | tied if tied else entries
    outputs = functional_call(setup.module, replaced, *arguments(x), tie_weights=False)
    for name in setup.layers.buffers:
        if name in params and replaced[name] is not params[name]:
            _keep(name, replaced[name], params[name])
    return shifted(params, wide(output_of(outputs)))


@torch.no_grad()
def _keep(name: str, assigned: Tensor, buffer: Tensor) -> None:
    """Write what `forward` has assigned to a buffer into the model's, as a change in place is."""
    if assigned.shape != buffer.shape:
        raise UserError(
            f"the model's forward changes the shape of its buffer '{name}' from "
            f"{tuple(buffer.shape)} to {tuple(assigned.shape)}; keep the shape, or register the "
            "buffer with persistent=False if no other client needs it."
        )
    buffer.copy_(assigned)


def use(setup: Setup, state: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """A model's outputs for prepared samples as its method uses it."""
    if not setup.method.overrides("predict") or not is_extended(state):
        return call(setup, state, x)

    def outputs(params: Mapping[str, Tensor], x: Inputs) -> Tensor:
        return call(setup, params, x).float()  # as in training, and as features are

    known = partial(features, setup)
    local = Local({}, Phase(), setup.layers, partial(base_loss, setup), outputs, known)
    return setup.hooks.predict(state, x, local)


class UsedModel(nn.Module):
    """A client's model as its method uses it, for prepared samples."""

    def __init__(self, setup: Setup, state: State):
        super().__init__()
        self.setup, self.names = setup, list(state)
        for number, value in enumerate(state.values()):
            self.register_buffer(f"entry{number}", value)

    def forward(self, *args: Tensor, **parts: Tensor) -> Tensor:
        """The outputs."""
        x: Inputs = parts or (args[0] if len(args) == 1 else args)
        self.setup.module.eval()
        state = {name: self.get_buffer(f"entry{n}") for n, name in enumerate(self.names)}
        return shifted(state, use(self.setup, unshifted(state), x))


def features(setup: Setup, params: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """The inputs of the head for prepared samples, one row each."""
    seen: list[Tensor] = []
    head = module_of(setup, setup.layers.weighted[-1])
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        forward(setup, params, x)
    finally:
        handle.remove()
    return seen[-1].float()


def module_of(setup: Setup, layer: Layer) -> nn.Module:
    """The module that a layer describes."""
    return setup.module if layer.name == WHOLE else setup.module.get_submodule(layer.name)


def part_of(layers: Layers, phase: Phase) -> list[str]:
    """The entries that a phase trains."""
    parts = {"all": layers.names, "head": layers.head, "body": layers.body}
    chosen = set(parts[phase.part]) - set(phase.frozen)
    trained = [name for name in layers.parameters if name in chosen]
    return list(dict.fromkeys([*trained, *phase.extra]))


def predict(setup: Setup, state: State, subset: Subset, indices: Tensor) -> Tensor:
    """A model's outputs for some samples of a subset, in evaluation mode."""
    return predict_all(setup, [state], subset, indices)[0]


@torch.no_grad()
def predict_all(
    setup: Setup, states: Sequence[State], subset: Subset, indices: Tensor
) -> list[Tensor]:
    """The outputs of several models for the same samples of a subset, in evaluation mode."""
    batch = EVALUATED_AT_ONCE[setup.device.type == "cuda"]
    setup.module.eval()
    x, indices = samples_of(setup, subset)[0], indices.to(setup.device)
    models = list(states)  # which may be means that are computed here
    outputs: list[list[Tensor]] = [[] for _ in models]
    with applied(setup.kernels, setup.module):
        for part in indices.split(batch):
            prepared = setup.data.prepare(rows_of(x, part))
            for state, parts in zip(models, outputs, strict=True):
                parts.append(_outputs(setup, state, prepared))
    return [torch.cat(parts) for parts in outputs]


def _outputs(setup: Setup, state: State, x: Inputs) -> Tensor:
    """What `use` gives; where an engine records programs, that of a small evaluation is one."""
    small = isinstance(x, Tensor) and len(x) <= RECORDED_AT_ONCE
    if setup.programs is None or not small or setup.method.overrides("predict"):
        return use(setup, state, x)
    names = tuple(state)

    def program(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return (call(setup, dict(zip(names, values, strict=True)), x),)

    return setup.recorded(("outputs", names), program)(x, *state.values())[0]


@torch.no_grad()
def training_features(setup: Setup, state: State, indices: Tensor) -> Tensor:
    """The inputs of a model's head for some training samples, in evaluation mode."""
    setup.module.eval()
    at_once = EVALUATED_AT_ONCE[setup.device.type == "cuda"]
    with applied(setup.kernels, setup.module):
        parts = [
            features(setup, state, setup.data.prepare(rows_of(setup.data.x, part)))
            for part in indices.to(setup.device).split(at_once)
        ]
    return torch.cat(parts)
