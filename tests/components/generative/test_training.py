"""The training of generative networks against PyTorch's own optimiser."""

import torch
from torch import nn

from fedhelix.components.generative.training import WEIGHT_DECAY, adamw


def test_steps_are_those_of_torch():
    torch.manual_seed(0)
    mine, its, inputs = nn.Linear(5, 3), nn.Linear(5, 3), torch.randn(8, 5)
    its.load_state_dict(mine.state_dict())
    rate = torch.tensor(0.01)
    step = adamw(list(mine.parameters()), rate)
    reference = torch.optim.AdamW(its.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, fused=True)
    for number in range(20):
        rate.fill_(0.01 * (1 - number / 20))
        step(torch.autograd.grad(mine(inputs).square().mean(), list(mine.parameters())))
        reference.zero_grad()
        its(inputs).square().mean().backward()
        reference.step()
    for one, other in zip(mine.parameters(), its.parameters(), strict=True):
        assert torch.equal(one, other)
