"""One-shot clusters: clients whose data span similar spaces belong together (Eqs. 11 and 12).

What a client reveals for this is its top singular vectors: directions of its data in the space of
features, not samples, but for images the first one looks like their mean. That is a privacy cost,
paid once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.errors import UserError

Distance = Literal["flat", "projection", "pacfl"]
Algorithm = Literal["kmeans", "hierarchical", "nearest"]

PER_CLASS = 3  # singular vectors of each class, in PACFL


def principal_vectors(samples: Tensor, count: int) -> Tensor:
    """The first `count` left singular vectors of the matrix whose columns are the samples: features
    x count.

    Each is defined up to its sign, so its entry of largest magnitude is made positive.
    """
    matrix = samples.flatten(1).double().T
    if min(matrix.shape) < count:
        raise UserError(
            f"{matrix.shape[1]} samples of {matrix.shape[0]} features have no {count} singular "
            f"vectors; set vectors to {min(matrix.shape)} or less"
            f"{', or give every client more samples' if matrix.shape[0] >= count else ''}."
        )
    # The eigenvectors of the smaller Gram matrix give the same, and much faster.
    if matrix.shape[0] <= matrix.shape[1]:
        vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)[:, :count]
    else:
        values, right = torch.linalg.eigh(matrix.T @ matrix)
        singular = values.flip(0)[:count].clamp_min(1e-24).sqrt()
        vectors = matrix @ right.flip(1)[:, :count] / singular
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * torch.where(largest < 0, -1.0, 1.0)).float()


def class_vectors(samples: Tensor, labels: Tensor, classes: int, count: int = PER_CLASS) -> Tensor:
    """PACFL's: singular vectors of each class beside each other; zeros for classes that the client
    lacks.
    """
    vectors = torch.zeros(samples[0].numel(), classes * count, device=samples.device)
    for label in labels.unique().tolist():
        mine = samples[labels == label]
        width = min(count, len(mine), mine[0].numel())
        vectors[:, label * count : label * count + width] = principal_vectors(mine, width)
    return vectors


def distances(prints: Tensor, others: Tensor, how: Distance) -> Tensor:
    """How far clients are from others, given their vectors (clients x features x vectors)."""
    if how == "flat":
        return torch.cdist(prints.flatten(1).double(), others.flatten(1).double())
    products = torch.einsum("ifv,jfw->ijvw", prints.double(), others.double())
    if how == "projection":
        span = 2 * prints.shape[2] - 2 * products.square().sum((2, 3))
        return span.clamp_min(0).sqrt()
    return products.amax((2, 3)).clamp(-1, 1).arccos().rad2deg()


def cluster(
    prints: Tensor, count: int, how: Distance, algorithm: Algorithm, seed: int
) -> list[int]:
    """Which of `count` clusters each client belongs to; they are numbered in the order of their
    first clients.
    """
    if len(prints) < count:
        raise UserError(f"{len(prints)} clients cannot form {count} clusters; lower clusters.")
    if count == 1:
        return [0] * len(prints)
    apart = distances(prints, prints, how).cpu()
    labels = _fit(prints, apart, count, how, algorithm, seed)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(int(label), len(numbers)) for label in labels]


def _fit(
    prints: Tensor, apart: Tensor, count: int, how: Distance, algorithm: Algorithm, seed: int
) -> Sequence[int] | np.ndarray:
    from sklearn import cluster as sk  # slow to import, and most runs need none of it

    seed %= 2**32  # scikit-learn takes no others
    if algorithm == "hierarchical":
        return sk.AgglomerativeClustering(
            count, metric="precomputed", linkage="average"
        ).fit_predict(apart.numpy())
    if algorithm == "nearest":
        graph = sk.SpectralClustering(
            count,
            affinity="precomputed_nearest_neighbors",
            n_neighbors=min(5, len(prints) - 1),
            assign_labels="cluster_qr",
            random_state=seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # a graph in several pieces is what we hope for
            return graph.fit_predict(apart.numpy())
    # K-means needs points: the vectors themselves, or points with the same distances (kernel
    # K-means).
    points = prints.flatten(1).double().cpu() if how == "flat" else layout(apart, len(prints) - 1)
    return sk.KMeans(count, n_init=10, random_state=seed).fit_predict(points.numpy())


def layout(apart: Tensor, dimensions: int = 2) -> Tensor:
    """Points whose distances are those given, as far as so few dimensions allow (classical
    scaling).
    """
    squares = apart.double().square()
    centred = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    values, vectors = torch.linalg.eigh(-centred / 2)
    best = values.argsort(descending=True)[:dimensions]
    points = vectors[:, best] * values[best].clamp_min(0).sqrt()
    return torch.nn.functional.pad(points, (0, dimensions - points.shape[1]))


def nearest(newcomer: Tensor, prints: Tensor, member: Sequence[int], how: Distance) -> int:
    """The cluster of a newcomer: that of the nearest mean vectors, or without means the least mean
    distance.
    """
    labels = torch.as_tensor(member, device=prints.device)
    groups = [prints[labels == label] for label in range(int(labels.max()) + 1)]
    if how == "flat":
        means = torch.stack([group.mean(0) for group in groups])
        return int(distances(newcomer[None], means, how)[0].argmin())
    return int(
        torch.stack([distances(newcomer[None], group, how).mean() for group in groups]).argmin()
    )
