"""Trains the networks of a generative model: AdamW along a cosine, with averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fedhelix.core.cpu import all_threads, one_thread
from fedhelix.core.cuda import recording

Watch = Callable[[range, str], Iterable[int]]  # yields the steps and shows progress

WEIGHT_DECAY = 2e-6
SMALL = 1_000_000  # parameters, below which threads and oneDNN cost more than they save
WARM_UP = 3  # steps before a graph is recorded: they choose kernels and allocate workspaces


def unwatched(steps: range, title: str) -> Iterable[int]:
    """No progress display."""
    return steps


def train(
    module: nn.Module,
    loss: Callable[[], Tensor],
    draws: torch.Generator,
    steps: int,
    lr: float,
    average: float = 0.0,
    watch: Watch = unwatched,
    title: str = "training",
) -> None:
    """Minimise a loss that draws its own batches; the module ends with averaged weights.

    `draws` is the generator that the loss draws from. A step never waits for the device. On a GPU
    it is recorded once as a CUDA graph, which costs no Python.
    """
    parameters = list(module.parameters())
    device = parameters[0].device
    done, rate = torch.zeros((), device=device), torch.tensor(lr, device=device)
    on_gpu = device.type == "cuda"
    optimise = adamw(parameters, rate)
    smooth = [parameter.detach().clone() for parameter in parameters]

    def step() -> None:
        grads = torch.autograd.grad(loss(), parameters)
        rate.copy_(lr * (1 + torch.cos(done * (math.pi / steps))) / 2)
        optimise(grads)
        done.add_(1)
        torch._foreach_lerp_(smooth, [parameter.detach() for parameter in parameters], 1 - average)

    module.train()
    run = step
    with plain_kernels(sum(parameter.numel() for parameter in parameters)):
        for number in watch(range(steps), title):
            if number == WARM_UP and on_gpu:
                run = recorded(step, draws)
            run()
    for parameter, value in zip(parameters, smooth, strict=True):
        parameter.data.copy_(value)
    module.eval()


def plain_kernels(parameters: int) -> AbstractContextManager[None]:
    """One thread and PyTorch's own kernels while a small network computes on a CPU.

    Its steps are too short to be shared, and oneDNN prepares longer than it computes.
    """
    return all_threads() if parameters >= SMALL else one_thread(onednn=False)


def adamw(parameters: Sequence[nn.Parameter], rate: Tensor) -> Callable[[Sequence[Tensor]], None]:
    """A step of AdamW along given gradients: that of `torch.optim`, whose import takes longer than
    the training of a small network.
    """
    values = [parameter.detach() for parameter in parameters]
    means, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
    counts = [torch.zeros((), device=value.device) for value in values]

    def step(grads: Sequence[Tensor]) -> None:
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            values, list(grads), means, squares, [], counts, lr=rate, beta1=0.9, beta2=0.999,
            weight_decay=WEIGHT_DECAY, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def recorded(step: Callable[[], None], draws: torch.Generator) -> Callable[[], None]:
    """A step as a CUDA graph; recording does not execute it."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(draws)
    with recording(graph, stream=torch.cuda.Stream()):
        step()
    return graph.replay


def noise(like: Tensor, draws: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape of a tensor."""
    return torch.randn(like.shape, generator=draws, device=like.device)


def rows(table: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """Random rows, drawn with replacement."""
    return table[torch.randint(len(table), (count,), generator=draws, device=table.device)]
