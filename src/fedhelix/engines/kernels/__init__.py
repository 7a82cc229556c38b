"""Kernels for the CPU, that is ways to compute a network's layers; all compute the same function.

`onednn` and `native` are PyTorch's own. On some processors oneDNN takes twice as long as the native
ones for small convolutions. `tuned` helps the native ones out where they are slow, and `compiled`
is a block of convolution, ReLU and pooling in C, for machines with a C compiler. Results differ in
the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from fedhelix.engines.kernels import compiled, tuned

Kernels = Literal["onednn", "native", "tuned", "compiled"]


@contextmanager
def applied(kernels: Kernels, module: nn.Module) -> Iterator[None]:
    """Let a network compute with these kernels, in one thread.

    More threads gain next to nothing on small networks, and would make results depend on their
    number.
    """
    before, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    lent = lent_layers(kernels, module)
    own = {layer: type(layer) for layer in lent}
    torch.backends.mkldnn.enabled = kernels == "onednn"  # type: ignore[assignment]
    torch.set_num_threads(1)
    try:
        change(lent)
        yield
    finally:
        change(own)
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = before


def lent_layers(kernels: Kernels, module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """The layers that compute in another way with these kernels."""
    if kernels == "compiled":
        return compiled.layers_for(module)
    return tuned.layers_for(module) if kernels == "tuned" else {}


def change(kinds: dict[nn.Module, type[nn.Module]]) -> None:
    """Make layers compute as others do, with the weights that they have."""
    for layer, kind in kinds.items():
        layer.__class__ = kind
