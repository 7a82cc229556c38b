"""What groups of clients may do to labels and images; see `shifts`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def permuted(order: np.ndarray, group: int) -> np.ndarray:
    """Every class becomes the one `group` places later in a random order: no two groups agree on
    the label of any class.
    """
    return order[(np.argsort(order) + group) % len(order)]


def swapped(order: np.ndarray, group: int) -> np.ndarray:
    """Two classes of a random order change places, other ones in every group."""
    table = np.arange(len(order))
    if group:
        pair = order[2 * group - 2 : 2 * group]
        table[pair] = pair[::-1]
    return table


def rotated(x: Tensor, turn: float) -> Tensor:
    """Images turned counter-clockwise by a share of the full circle; the corners become zero."""
    height, width = x.shape[-2:]
    angle = torch.tensor(2 * torch.pi * turn, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    zero = torch.zeros((), dtype=torch.float64)
    rows = [torch.stack([cos, -sin * height / width, zero])]
    rows.append(torch.stack([sin * width / height, cos, zero]))
    matrix = torch.stack(rows).to(x.device, x.dtype).expand(len(x), 2, 3)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def blurred(x: Tensor, deviation: float) -> Tensor:
    """Images under a Gaussian of this many pixels; the border repeats."""
    if not deviation:
        return x
    radius = max(1, round(3 * deviation))
    along = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device)
    kernel = torch.exp(-0.5 * (along / deviation) ** 2)
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    flat = x.reshape(-1, 1, *x.shape[-2:])
    flat = F.conv2d(F.pad(flat, [radius, radius, 0, 0], mode="replicate"), kernel)
    flat = F.conv2d(F.pad(flat, [0, 0, radius, radius], mode="replicate"), kernel.transpose(2, 3))
    return flat.reshape(x.shape)


def faded(x: Tensor, factor: float) -> Tensor:
    """Images with less contrast: differences from an image's mean are so many times smaller."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (x - mean) / factor


def recoloured(x: Tensor, turn: float) -> Tensor:
    """Images with all hues turned: by a third of the circle red becomes green, green blue."""
    angle = 2 * torch.pi * (turn + torch.arange(3, dtype=torch.float64) / 3)
    first = (1 + 2 * angle.cos()) / 3  # what red, green and blue add to the new red
    matrix = torch.stack([first[[0, 1, 2]], first[[2, 0, 1]], first[[1, 2, 0]]])
    return torch.einsum("ij,njhw->nihw", matrix.to(x.device, x.dtype), x)
