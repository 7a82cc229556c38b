"""CPU kernels: several ways to compute a network's layers, equal up to the last bits.

`onednn` and `native` are PyTorch's own. On some processors oneDNN takes twice as long as the native
kernels for small convolutions. `tuned` replaces the native kernels where they are slow, and
`compiled` is a block of convolution, ReLU and pooling in C, for machines with a C compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from fedhelix.core.cpu import one_thread
from fedhelix.engines.kernels import compiled, tuned

Kernels = Literal["onednn", "native", "tuned", "compiled"]


@contextmanager
def applied(kernels: Kernels, module: nn.Module) -> Iterator[None]:
    """Let a network compute with these kernels, in one thread.

    More threads gain little on small networks, and results would depend on their number.
    """
    replaced = replaced_layers(kernels, module)
    original = {layer: type(layer) for layer in replaced}
    try:
        change_types(replaced)
        with one_thread(onednn=kernels == "onednn"):
            yield
    finally:
        change_types(original)


def replaced_layers(kernels: Kernels, module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """The layers that these kernels replace, with their new types."""
    if kernels == "compiled":
        return compiled.layers_for(module)
    return tuned.layers_for(module) if kernels == "tuned" else {}


def change_types(kinds: dict[nn.Module, type[nn.Module]]) -> None:
    """Give layers another type; they keep their weights."""
    for layer, kind in kinds.items():
        layer.__class__ = kind
