"""Every rule takes the steps of its twin in torch.optim, for one client and for a stack of them."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedhelix import Scaffold
from fedhelix.core.errors import UserError
from fedhelix.core.optimizers import OPTIMIZERS, OptimizerRule, StepSettings
from helpers import close, small

SHAPES = [(4, 3), (3,)]
CASES = [("sgd", momentum, decay) for momentum in (0.0, 0.9) for decay in (0.0, 0.1)] + [
    (name, 0.0, decay) for name in ("adam", "adamw") for decay in (0.0, 0.1)
]


def twin(name, params, lr, momentum, decay):
    if name == "sgd":
        return torch.optim.SGD(params, lr, momentum, weight_decay=decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return kind(params, lr, weight_decay=decay)


def trained_by_torch(name, start, grads, lr, momentum, decay):
    params = [nn.Parameter(value.clone()) for value in start]
    optimizer = twin(name, params, lr, momentum, decay)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def draws(count):
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    return start, [[torch.randn(shape) for shape in SHAPES] for _ in range(count)]


@pytest.mark.parametrize(("name", "momentum", "decay"), CASES)
def test_steps_are_those_of_torch(name, momentum, decay):
    start, grads = draws(6)
    rule, ours = OPTIMIZERS[name], [value.clone() for value in start]
    slots = [[torch.zeros_like(value) for value in ours] for _ in range(rule.slots(momentum))]
    for number, step in enumerate(grads, start=1):
        rule.update(ours, step, slots, StepSettings(0.05, momentum, decay, number))
    theirs = trained_by_torch(name, start, grads, 0.05, momentum, decay)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "momentum", "decay"), CASES)
def test_a_stack_steps_with_the_settings_of_each_client(name, momentum, decay):
    """Two clients in rows, with learning rates and step numbers of their own."""
    start, grads = draws(4)
    flat = torch.cat([value.flatten() for value in start])
    rows = torch.stack([flat, flat])
    rule, lr = OPTIMIZERS[name], torch.tensor([[0.05], [0.2]])
    slots = [[torch.zeros_like(rows)] for _ in range(rule.slots(momentum))]
    settings = (lr, torch.full((2, 1), momentum), torch.full((2, 1), decay))
    for number, step in enumerate(grads, start=1):
        gradient = torch.cat([grad.flatten() for grad in step]).expand(2, -1).contiguous()
        rule.update(
            [rows], [gradient], slots, StepSettings(*settings, torch.full((2, 1), float(number)))
        )
    for row, rate in zip(rows, (0.05, 0.2), strict=True):
        alone = trained_by_torch(name, start, grads, rate, momentum, decay)
        assert torch.allclose(
            row, torch.cat([value.flatten() for value in alone]), rtol=1e-5, atol=1e-6
        )


def test_one_step_by_hand():
    """p = 1, g = 0.5, decay = lr = 0.1. SGD: v = 0.6; Adam's first step is lr, whatever g is."""
    for name, expected in (("sgd", 1 - 0.1 * 0.6), ("adam", 1 - 0.1), ("adamw", 0.99 - 0.1)):
        rule, param = OPTIMIZERS[name], torch.tensor([1.0])
        slots = [[torch.zeros(1)] for _ in range(rule.slots(0.9))]
        rule.update([param], [torch.tensor([0.5])], slots, StepSettings(0.1, 0.9, 0.1, 1))
        assert param.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_engines_agree(name):
    runs = [
        small("fedavg", "mlp", optimizer=name, lr=0.01, weight_decay=0.01, engine=engine).fit(
            2, quiet=True
        )
        for engine in ("serial", "parallel", "batched")
    ]
    first, *others = (run.state.server["model"] for run in runs)
    assert all(close(first, other, 1e-4) for other in others)
    assert runs[0].records[-1]["train_loss"] < runs[0].records[0]["train_loss"]


@dataclass(frozen=True)
class SignSGD(OptimizerRule):
    """Steps by the sign of the gradient."""

    label = "sign-sgd"

    def update(self, params, grads, slots, step):
        for param, grad in zip(params, grads, strict=True):
            param.sub_(step.lr * grad.sign())


def test_a_rule_of_ones_own_runs_on_all_engines():
    runs = [
        small("fedavg", "linear", optimizer=SignSGD(), lr=0.01, engine=engine).fit(1, quiet=True)
        for engine in ("serial", "batched")
    ]
    one, other = (run.state.server["model"] for run in runs)
    assert close(one, other, 1e-5)


def test_what_needs_sgd_says_so():
    with pytest.raises(UserError, match="needs optimizer = sgd, not adam"):
        small(Scaffold(control="steps"), optimizer="adam").fit(1, quiet=True)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UserError, match="optimizer must be"):
        small(optimizer="lion")
    with pytest.raises(UserError, match=r"optimizer must be .*, not 'Adam'; did you mean 'adam'\?"):
        small(optimizer="Adam")


def made(**parts):
    """An optimiser with these methods."""
    return dataclass(frozen=True)(type("Mine", (OptimizerRule,), parts))()


def step(self, params, grads, slots, step):
    for param, grad in zip(params, grads, strict=True):
        param -= step.lr * grad


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"slots": 1, "update": step}, "'int' object is not callable'; slots"),
        ({"slots": lambda self: 1, "update": step}, "positional argument.*; slots"),
        ({"slots": lambda self, momentum: "one", "update": step}, "integer'; slots"),
        ({"update": lambda self, params, grads: None}, "positional arguments.*; slots"),
        ({}, r"Mine must define update\(params, grads, slots, step\)"),
        ({"update": lambda self, params, *_: [1 / 0]}, "optimizer Mine fails for one parameter"),
        ({"update": lambda self, params, *_: params}, "Mine.update returns a list; .* in place"),
    ],
)
def test_an_optimizer_that_cannot_be_called_is_refused(parts, said):
    with pytest.raises(UserError, match=said):
        small("fedavg", "linear", optimizer=made(**parts))


class Signs(OptimizerRule):
    """Keeps an option that no run could record."""

    def __init__(self, factor):
        self.factor = factor

    def update(self, params, grads, slots, step):
        step(self, params, grads, slots, step)


def test_an_optimizer_that_is_no_frozen_dataclass_has_no_options():
    with pytest.raises(UserError, match="optimizer has options of Signs, which is no frozen data"):
        small("fedavg", "linear", optimizer=Signs(2.0))


def test_an_optimizer_of_ones_own_is_accepted():
    small("fedavg", "linear", optimizer=made(update=step))
