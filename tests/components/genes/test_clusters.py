"""Singular vectors against scipy; clusters that do not depend on the order of
samples; newcomers.
"""

import numpy as np
import pytest
import scipy.linalg
import torch

from fedhelix.components.genes import (
    class_vectors,
    cluster,
    distances,
    layout,
    nearest,
    principal_vectors,
)
from fedhelix.core.errors import UserError


def sample(seed: int, count: int = 40, features: int = 12, kind: int = 0) -> torch.Tensor:
    """Samples that lie along three directions of very different lengths, which differ from kind to
    kind.
    """
    directions = scipy.linalg.qr(np.random.default_rng(kind).normal(size=(features, features)))[0][
        :3
    ]
    draw = np.random.default_rng(1000 + seed)
    lengths = draw.normal(size=(count, 3)) * np.array([9, 3, 1])
    return torch.tensor(lengths @ directions + 0.02 * draw.normal(size=(count, features))).float()


@pytest.mark.parametrize("count", [40, 8])  # more samples than features, and fewer
def test_vectors_are_those_of_scipy(count):
    x = sample(0, count)
    left = scipy.linalg.svd(x.double().numpy().T)[0][:, :3]
    left *= np.sign(left[np.abs(left).argmax(0), range(3)])
    np.testing.assert_allclose(principal_vectors(x, 3).numpy(), left, atol=1e-5)


def test_pictures_are_flattened_and_order_does_not_matter():
    x = sample(1).view(40, 3, 2, 2)
    shuffled = x[torch.randperm(40, generator=torch.Generator().manual_seed(3))]
    torch.testing.assert_close(
        principal_vectors(x, 2), principal_vectors(shuffled, 2), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("how", ["flat", "projection", "pacfl"])
@pytest.mark.parametrize("algorithm", ["kmeans", "hierarchical", "nearest"])
def test_every_way_finds_the_groups_whatever_the_order_of_samples(how, algorithm):
    kinds = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    labels = torch.arange(40) % 2

    def prints(shuffle):
        order = (
            torch.randperm(40, generator=torch.Generator().manual_seed(5))
            if shuffle
            else torch.arange(40)
        )
        samples = [sample(seed, kind=kind) for seed, kind in enumerate(kinds)]
        if how == "pacfl":
            return torch.stack([class_vectors(x[order], labels[order], 2) for x in samples])
        return torch.stack([principal_vectors(x[order], 3) for x in samples])

    found = cluster(prints(False), 3, how, algorithm, seed=0)
    assert found == kinds
    assert cluster(prints(True), 3, how, algorithm, seed=0) == found


def test_distances_by_hand():
    x = torch.eye(3)[:, :2][None]  # the plane of the first two axes
    turned = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])[
        None
    ]  # the same plane, its axes exchanged
    other = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])[None]  # the first axis in common
    assert float(distances(x, turned, "flat")) == pytest.approx(2)
    assert float(distances(x, turned, "projection")) == pytest.approx(0, abs=1e-6)
    assert float(distances(x, other, "projection")) == pytest.approx(
        2**0.5
    )  # squared: 2 * 2 - 2 * 1
    assert float(distances(x, other, "pacfl")) == pytest.approx(
        0, abs=1e-3
    )  # they share a direction
    tilted = torch.tensor([[0.5], [0.0], [3**0.5 / 2]])[None]
    assert float(distances(torch.eye(3)[:, :1][None], tilted, "pacfl")) == pytest.approx(
        60, abs=1e-3
    )


def test_layout_keeps_distances():
    points = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    found = layout(torch.cdist(points, points))
    torch.testing.assert_close(torch.cdist(found, found), torch.cdist(points, points).double())
    assert layout(torch.zeros(1, 1)).tolist() == [[0, 0]]


@pytest.mark.parametrize("how", ["flat", "projection"])
def test_a_newcomer_joins_its_own_kind_and_moves_the_mean(how):
    kinds = [0, 0, 1, 1]
    prints = torch.stack(
        [principal_vectors(sample(seed, kind=kind), 3) for seed, kind in enumerate(kinds)]
    )
    newcomer = principal_vectors(sample(9, kind=1), 3)
    assert nearest(newcomer, prints, kinds, how) == 1
    # The mean over members is the running mean (N u + u') / (N + 1).
    running = (2 * prints[2:].mean(0) + newcomer) / 3
    torch.testing.assert_close(running, torch.cat([prints[2:], newcomer[None]]).mean(0))


def test_bad_clusters_are_refused():
    with pytest.raises(UserError, match="3 samples of 12 features have no 5 singular vectors"):
        principal_vectors(sample(0, 3), 5)
    with pytest.raises(UserError, match="2 clients cannot form 3 clusters"):
        cluster(torch.zeros(2, 4, 1), 3, "flat", "kmeans", 0)
    assert cluster(torch.zeros(2, 4, 1), 1, "flat", "kmeans", 0) == [0, 0]
