"""The gradients of one training step in many slots."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from fedhelix.core.copies import copied
from fedhelix.core.errors import UserError
from fedhelix.core.method import Batch, Local
from fedhelix.core.parts import Inputs, each
from fedhelix.core.seeds import seeded
from fedhelix.core.tree import State, clone, unflatten
from fedhelix.engines.batched.convolution import StackedConvolutions
from fedhelix.engines.batched.streams import STREAMS, fork_streams, join_streams, on_stream
from fedhelix.engines.batched.table import PhaseTask
from fedhelix.engines.blame import culprit
from fedhelix.engines.local import (
    Setup,
    base_loss,
    call,
    channels_last,
    check_gradient,
    features,
    forward,
    gather,
)

# For small networks all slots are one program, with convolutions as matrix products or as grouped
# convolutions. For large networks each slot is computed apart, on parallel streams.
Mode = Literal["products", "grouped", "apart"]


@dataclass(frozen=True, eq=False)
class Gradients:
    """Computes the method's loss and its gradients in every slot.

    All arguments have a leading axis of slots; the gradients are written to `out`, and `update` is
    called for slots whose gradients are there.
    """

    example: PhaseTask
    mode: Mode

    def __call__(
        self,
        params: State,
        fixed: State,
        context: State,
        batch: Batch,
        out: State,
        update: Callable[[slice], None],
    ) -> Tensor:
        """The losses of the slots."""
        if self.mode == "apart":
            return self._apart(params, fixed, context, batch, out, update)
        losses = self._stacked(params, fixed, context, batch, out)
        update(slice(None))
        return losses

    def _loss(
        self, params: State, fixed: State, context: State, x: Inputs, y: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The loss of one slot, as the method defines it."""
        setup = self.example.setup
        local = Local(
            unflatten(context),
            self.example.phase,
            setup.layers,
            partial(base_loss, setup),
            partial(forward, setup),
            partial(features, setup),
        )
        return setup.hooks.loss({**params, **fixed}, Batch(x, y, mask), local)

    def _stacked(
        self, params: State, fixed: State, context: State, batch: Batch, out: State
    ) -> Tensor:
        """All slots in one program.

        No slot depends on another, so the gradient of the summed losses has that of every slot.
        (`torch.func.grad` would give the same, and import PyTorch's compiler for seconds.)
        """
        axes = (0, 0, 0, 0, 0, None if batch.mask is None else 0)
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        with StackedConvolutions() if self.mode == "products" else nullcontext():
            losses = vmap(self._loss, axes, randomness="different")(leaves, fixed, context, *batch)
        check_gradient(self.example.setup, losses)
        grads = torch.autograd.grad(
            losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        torch._foreach_copy_(list(out.values()), list(grads))
        return losses.detach()

    def _apart(
        self,
        params: State,
        fixed: State,
        context: State,
        batch: Batch,
        out: State,
        update: Callable[[slice], None],
    ) -> Tensor:
        """Slot by slot, on parallel streams where there are any: there, one slot's update, which
        reads and writes memory, goes along with the others' arithmetic.
        """
        losses: list[Tensor] = []
        streams = fork_streams(batch.y.device, min(STREAMS, len(batch.y)))
        for slot in range(len(batch.y)):
            with on_stream(streams, slot):
                leaves = {
                    name: value[slot].detach().requires_grad_() for name, value in params.items()
                }
                mask = None if batch.mask is None else batch.mask[slot]
                x = each(channels_last, each(itemgetter(slot), batch.x))
                loss = self._loss(
                    leaves, _select(fixed, slot), _select(context, slot), x, batch.y[slot], mask
                )
                check_gradient(self.example.setup, loss)
                grads = torch.autograd.grad(
                    loss, list(leaves.values()), allow_unused=True, materialize_grads=True
                )
                torch._foreach_copy_([value[slot] for value in out.values()], list(grads))
                update(slice(slot, slot + 1))
                losses.append(loss.detach())
        join_streams(streams)
        return torch.stack(losses)


def _select(values: State, slot: int) -> State:
    return {name: value[slot] for name, value in values.items()}


@torch.no_grad()
def can_stack(setup: Setup) -> bool:
    """Whether several models can run as one program; some networks look at values, for example to
    see whether a mask is needed, and some do in training what cannot be stacked.
    """
    setup = replace(setup, module=copied(setup.module))
    state = {name: torch.stack([value, value]) for name, value in setup.initial.items()}
    samples = torch.arange(min(2, len(setup.data.y)), device=setup.device).expand(2, -1)
    with seeded(0, setup.device), without_fallback_warning():
        x = gather(setup, samples, None).x
        try:
            for training in (True, False):
                setup.module.train(training)
                vmap(partial(call, setup), randomness="different")(clone(state), x)
        except (RuntimeError, ValueError):
            return False
    return True


@contextmanager
def without_fallback_warning() -> Iterator[None]:
    """Leaves out PyTorch's warning that a layer, such as a transformer's in evaluation mode, is
    computed model by model; users cannot change that.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet")
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Says what a loss must not do, where PyTorch names no hook."""
    try:
        yield
    except RuntimeError as problem:
        if "calling .item()" not in str(problem):
            raise
        where = culprit(problem).partition(" of client")[0] or "the loss"
        raise UserError(
            f"{where} looks at values (.item(), if), but this engine computes many clients at "
            "once; use tensors alone (torch.where), or engine = serial."
        ) from problem
