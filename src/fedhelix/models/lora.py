"""LoRA: a frozen linear layer plus a trained product of two small matrices (arXiv:2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from fedhelix.core.errors import UserError


class LoRALinear(nn.Module):
    """`base(x) + alpha / rank * B A x`; B starts at zero, so that it first computes `base(x)`."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        if not 1 <= rank <= min(base.in_features, base.out_features):
            raise UserError(
                f"rank {rank} does not fit a layer of {base.in_features} inputs and "
                f"{base.out_features} outputs; take 1 to {min(base.weight.shape)}."
            )
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """The layer with its adapter."""
        added: Tensor = (x @ self.lora_A.T) @ self.lora_B.T
        return self.base(x) + self.scale * added


def add_lora(
    module: nn.Module,
    rank: int = 4,
    alpha: float = 8.0,
    *,
    layers: Iterable[str] | None = None,
    train: Iterable[str] = (),
) -> nn.Module:
    """Freeze a network and give its linear layers adapters, in place.

    `layers` are endings of the names of the linear layers that get one, such as "query" (None:
    all), `train` those of modules that train as they are, such as "head".
    """
    module.requires_grad_(False)
    kept = [name for name, _ in module.named_modules() if name and name.endswith(tuple(train))]
    for name in kept:
        module.get_submodule(name).requires_grad_(True)
    chosen = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and name
        and not any(name == other or name.startswith(other + ".") for other in kept)
        and (layers is None or name.endswith(tuple(layers)))
    ]
    if not chosen:
        raise UserError("the model has no linear layer of these names to give an adapter to.")
    for name in chosen:
        parent, _, last = name.rpartition(".")
        adapted = LoRALinear(module.get_submodule(name), rank, alpha)  # type: ignore[arg-type]
        setattr(module.get_submodule(parent), last, adapted)
    return module
