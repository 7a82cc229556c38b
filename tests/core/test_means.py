"""Means of groups of models: the same whoever computes them."""

import pickle

import pytest
import torch

from fedhelix.core.means import means_by_group, tensors_of
from fedhelix.core.tree import masked_mean
from helpers import same

WEIGHTS, GROUPS = [1.0, 2.0, 0.0, 5.0], [(0, 1, 2, 3), (1, 3), (2, 3), (2,), (1,)]


@pytest.fixture
def models():
    draws = torch.Generator().manual_seed(0)
    return [
        {
            "a": torch.randn(3, 4, generator=draws),
            "count": torch.tensor(7 - i),
            "half": torch.randn(5, generator=draws).half(),
        }
        for i in range(4)
    ]


def test_by_hand():
    models = [{"w": torch.tensor([value])} for value in (1.0, 4.0, 10.0)]
    means = means_by_group(models, [1, 2, 3])([(0, 1), (1, 2)])
    assert means[0]["w"].item() == pytest.approx((1 + 2 * 4) / 3)
    assert means[1]["w"].item() == pytest.approx((2 * 4 + 3 * 10) / 5)


def test_several_groups_are_as_one_after_the_other(models):
    found = means_by_group(models, WEIGHTS)(GROUPS)
    assert len(found) == len(GROUPS)
    for mean, group in zip(found, GROUPS, strict=True):
        chosen = [models[i] for i in group], [WEIGHTS[i] for i in group]
        expected = masked_mean(*chosen, models[0])
        assert mean.keys() == expected.keys()
        for name, value in expected.items():
            assert mean[name].dtype == value.dtype
            torch.testing.assert_close(mean[name], value)


def test_some_of_the_means_are_the_same_to_the_last_bit(models):
    found = means_by_group(models, WEIGHTS)(GROUPS)
    for at in range(-len(GROUPS), len(GROUPS)):
        assert same(found[at], list(found)[at])
    assert [same(*pair) for pair in zip(found[1:4], list(found)[1:4], strict=True)] == [True] * 3
    assert same(found.rows([4, 0])[1], found[0])
    with pytest.raises(IndexError):
        found[len(GROUPS)]


def test_they_travel_as_the_models_they_are_made_of(models):
    found = means_by_group(models, WEIGHTS)(GROUPS)
    assert [len(tensor) for tensor in tensors_of(found)] == [len(models), len(models)]
    arrived = pickle.loads(pickle.dumps(found[2:]))
    assert same(arrived[0], found[2])
    assert same(found.replaced(torch.clone)[3], found[3])
    assert len(tensors_of(models)) == 3 * len(models)
