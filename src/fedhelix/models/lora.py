"""LoRA: a frozen linear layer plus a trained product of two small matrices (arXiv:2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from fedhelix.core.errors import UserError
from fedhelix.core.options import checks_arguments
from fedhelix.models.dense import mlp


class LoRALinear(nn.Linear):
    """A frozen layer with `alpha / rank * B A x` added; B starts at zero, so nothing changes."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0):
        inputs, outputs = base.in_features, base.out_features
        super().__init__(inputs, outputs, base.bias is not None, device="meta")
        if not 1 <= rank <= min(inputs, outputs):
            raise UserError(
                f"rank {rank} does not fit a layer of {inputs} inputs and {outputs} outputs; "
                f"take 1 to {min(inputs, outputs)}."
            )
        self.weight, self.bias, self.scale = base.weight, base.bias, alpha / rank
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, inputs))
        self.lora_B = nn.Parameter(base.weight.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """The layer with its adapter."""
        return super().forward(x) + self.scale * ((x @ self.lora_A.T) @ self.lora_B.T)


@checks_arguments
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


def lora_mlp(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The `mlp` frozen as it was drawn, with adapters of rank 4; its last layer trains."""
    return add_lora(mlp(shape, outputs), train=["fc3"])
