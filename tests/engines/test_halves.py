"""Mixed precision: weights are cast in one go, with the results of casting them one by one."""

import torch
from torch import nn

from fedhelix import Federation
from fedhelix.core.method import Batch
from fedhelix.engines.local.network import base_loss, call


class Mixed(nn.Module):
    """Layers that autocast casts, one that it does not, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4 * 64, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.scale * self.head(self.again(self.again(x)).flatten(1))


def federation(model: nn.Module) -> Federation:
    torch.manual_seed(0)
    x, y = torch.randn(60, 1, 8, 8), torch.randint(0, 3, (60,))
    return Federation([(x, y)], model=model, engine="serial", precision="bfloat16")


def test_values_and_gradients_are_those_of_autocast() -> None:
    setup = federation(Mixed()).engine.setup
    assert set(setup.cast) == {
        "conv.weight",
        "conv.bias",
        "again.weight",
        "head.weight",
        "head.bias",
    }
    batch = Batch(torch.randn(16, 1, 8, 8), torch.randint(0, 3, (16,)))
    found = []
    for whole in (True, False):
        state = {name: value.clone() for name, value in setup.initial.items()}
        leaves = {name: state[name].requires_grad_() for name in setup.layers.parameters}
        if whole:
            loss = base_loss(setup, state, batch)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = call(setup, state, batch.x)
            loss = setup.objective.mean_loss(outputs.float(), batch.y)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        assert all(grad.dtype == torch.float32 for grad in grads)
        found.append([loss, *grads, *(state[name] for name in setup.layers.buffers)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_weights_with_two_names_are_left_to_autocast() -> None:
    class Tied(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.other.weight = self.again.weight

    assert federation(Tied()).engine.setup.cast == ()
