"""A model may carry a shift: one value per output, added to what the network returns.

A client that knows how common each class is among its samples expresses that as a shift, whatever
the network looks like: it needs no head with a bias. In a state it is one more entry. Methods may
add further ones, which only their losses look at; all these names are in parentheses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedhelix.core.copies import copied
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers, difference
from fedhelix.core.parts import Inputs, arguments, output_of
from fedhelix.core.tree import State, wide

SHIFT = "(shift)"  # the name of the entry


def without_shift(state: Mapping[str, Tensor]) -> State:
    """The entries of the network alone; those that a method added have names in parentheses."""
    return {name: value for name, value in state.items() if not name.startswith("(")}


def unshifted(state: Mapping[str, Tensor]) -> State:
    """All entries but the shift."""
    return {name: value for name, value in state.items() if name != SHIFT}


def is_extended(state: Mapping[str, Tensor]) -> bool:
    """Whether a method has added entries of its own to the network's and the shift."""
    return any(name.startswith("(") for name in unshifted(state))


def shifted(state: Mapping[str, Tensor], outputs: Tensor) -> Tensor:
    """The outputs of a network with this state, after its shift."""
    return outputs + state[SHIFT] if SHIFT in state else outputs


def all_shifted(states: Sequence[State]) -> Sequence[State]:
    """The states, all with a shift if any of them has one: zeros where there was none."""
    shift = next((state[SHIFT] for state in states if SHIFT in state), None)
    if shift is None:
        return states
    return [{SHIFT: torch.zeros_like(shift), **state} for state in states]


class Shifted(nn.Module):
    """A network whose outputs are shifted."""

    shift: Tensor

    def __init__(self, network: nn.Module, shift: Tensor):
        super().__init__()
        self.network = network
        self.register_buffer("shift", shift)

    def forward(self, *args: Tensor, **keywords: Tensor) -> Tensor:
        """The shifted outputs."""
        return wide(output_of(self.network(*args, **keywords))) + self.shift


@torch.no_grad()
def load_shifted(network: nn.Module, state: State, layers: Layers, example: Inputs) -> nn.Module:
    """A copy of the network with this state, in evaluation mode.

    A shift goes into the bias of the head, where that gives the same outputs for an example;
    otherwise, as where half precision would round it, the network is wrapped.
    """
    own = without_shift(state)
    if other := difference(layers.shapes, {name: value.shape for name, value in own.items()}):
        raise UserError(f"the network is not that of the run: {other}; give it as it was then.")
    module = copied(network).eval()
    module.load_state_dict(own, strict=False)  # frozen and tied entries are in no state
    if SHIFT not in state:
        return module
    shift, (args, keywords) = state[SHIFT], arguments(example)
    expected = wide(output_of(module(*args, **keywords))) + shift
    biases = [name for name in layers.head if state[name].shape == shift.shape]
    if biases:
        folded = copied(module)
        folded.load_state_dict({biases[-1]: state[biases[-1]] + shift}, strict=False)
        outputs = output_of(folded(*args, **keywords)).to(expected.dtype)
        if torch.allclose(outputs, expected, rtol=1e-4, atol=1e-4):
            return folded
    return Shifted(module, shift).eval()
