"""What the server holds back: balanced, apart from the clients, and counted."""

import numpy as np
import pytest

from fedhelix import FedAvg, GenFed, from_arrays, load, partition
from fedhelix.core.errors import UserError
from fedhelix.data.server_data import Reserve, ServerData, balanced
from helpers import small

DIGITS = load("digits")


def test_balanced_counts():
    assert balanced(10, np.array([9, 9, 9])).tolist() == [4, 3, 3]
    assert balanced(10, np.array([2, 9, 9])).tolist() == [2, 4, 4]
    assert balanced(99, np.array([2, 3])).tolist() == [2, 3]
    assert balanced(0, np.array([2, 3])).tolist() == [0, 0]


def test_the_validation_set_is_balanced_and_belongs_to_no_client():
    fed = small(FedAvg(), validation_size=100)
    assert np.bincount(DIGITS.y[fed.reserve.scoring]).tolist() == [10] * 10
    owned = np.concatenate([np.concatenate([split.train, split.valid]) for split in fed.splits])
    assert not set(owned) & set(fed.reserve.all.tolist())
    assert len(owned) == len(DIGITS.y) - 100
    assert len(small(FedAvg(), validation_size=0.1).reserve.scoring) == 144


def test_the_supplement_pool_is_a_fifth_unless_it_is_shared():
    apart = small(FedAvg(), validation_size=100, supplement_size=20).reserve
    assert (len(apart.scoring), len(apart.pool)) == (80, 20)
    assert np.bincount(DIGITS.y[apart.pool]).tolist() == [2] * 10 and not set(apart.scoring) & set(
        apart.pool
    )
    shared = small(
        FedAvg(), validation_size=100, supplement_size=20, validation_shared=True
    ).reserve
    assert np.array_equal(shared.scoring, shared.pool) and len(shared.pool) == 100
    assert len(small(FedAvg(), validation_size=100).reserve.pool) == 0


def test_small_clients_get_independent_supplements_and_their_bytes_are_counted():
    more = {"validation_size": 200, "clients": 12, "partition": "dirichlet:0.1"}
    without, fed = small(**more), small(**more, supplement_size=15, supplement_below=1)
    sizes = [len(split.train) for split in without.splits]
    expected = [client for client, size in enumerate(sizes) if size < np.mean(sizes)]
    assert list(fed.supplements) == expected and set(fed.supplements.values()) == {15}
    extras = [
        set(fed.splits[client].train) - set(without.splits[client].train) for client in expected
    ]
    assert all(len(extra) == 15 and extra <= set(fed.reserve.pool) for extra in extras)
    assert len({frozenset(extra) for extra in extras}) == len(extras) > 2
    run = fed.fit(2, quiet=True)
    # 8 × 8 pixels and a label are 65 values of 4 bytes.
    assert [record["other_bytes"] for record in run.records] == [4 * 65 * 15 * len(expected), 0]
    assert [record["other_bytes"] for record in without.fit(1, quiet=True).records] == [0]


def share_supplied(clients, alpha, below):
    """The share of clients that get a supplement from 50,000 samples of ten classes."""
    y = np.arange(50_000) % 10
    data = from_arrays(np.zeros((50_000, 1), np.float32), y, np.zeros((10, 1)), np.arange(10))
    splits = partition.dirichlet(clients, alpha, valid=0.0).split(data, 0)
    wanted = ServerData(validation_size=1000, supplement_size=50, supplement_below=below)
    held = Reserve(np.arange(1000), np.arange(1000))
    return len(held.supplement(data, splits, wanted, 0)[1]) / clients


def test_a_threshold_in_samples_shows_what_one_in_means_cannot():
    """The more clients and the smaller alpha, the more of them have fewer than 300 samples."""
    by_clients = [share_supplied(clients, 0.1, 300) for clients in (20, 100, 180)]
    assert by_clients[0] < 0.2 < by_clients[1] < 0.55 < by_clients[2]
    by_alpha = [share_supplied(100, alpha, 300) for alpha in (0.05, 0.5, 5)]
    assert by_alpha[0] > 0.45 and by_alpha[0] > by_alpha[1] > by_alpha[2] == 0
    of_the_mean = [share_supplied(clients, 0.1, 1.0) for clients in (20, 100, 180)]
    assert max(of_the_mean) - min(of_the_mean) < 0.2


def test_training_on_the_servers_samples_alone():
    fed = small(server_only=True, validation_size=100, partition="dirichlet:0.1", cohort=None)
    assert fed.cohort_size == 1
    assert all(np.array_equal(split.train, fed.reserve.all) for split in fed.splits)
    plain = small(validation_size=100, partition="dirichlet:0.1")
    for mine, theirs in zip(fed.splits, plain.splits, strict=True):
        assert np.array_equal(mine.test, theirs.test)
        assert np.array_equal(mine.valid, theirs.valid)
    assert fed.fit(1, quiet=True).records[0]["other_bytes"] == 0


def test_training_on_the_servers_samples_needs_some():
    assert len(small(server_only=True).reserve.scoring) == 144
    with pytest.raises(UserError, match="set validation_size above 0"):
        small(server_only=True, validation_size=0)


def test_up_to_one_counts_in_mean_clients():
    fed = small(
        validation_size=700, validation_shared=True, supplement_size=0.5, supplement_below=1
    )
    kept = small(validation_size=700)
    assert set(fed.supplements.values()) == {
        round(0.5 * np.mean([len(split.train) for split in kept.splits]))
    }


def test_methods_meet_the_same_samples():
    feds = [small(kind(), validation_size=0.2, supplement_size=10) for kind in (FedAvg, GenFed)]
    for one, other in zip(feds[0].splits, feds[1].splits, strict=True):
        assert np.array_equal(one.train, other.train)


def test_a_method_that_scores_gets_the_usual_size_and_others_nothing():
    assert len(small(GenFed()).reserve.scoring) == 144
    assert len(small(FedAvg()).reserve.all) == 0


def test_a_missing_class_is_named():
    x, y = np.zeros((40, 3), dtype="float32"), np.arange(40) % 4
    with pytest.warns(UserWarning, match=r"validation set has no sample of class 4, 5\."):
        Reserve.of(
            from_arrays(x, y, classes=6), partition.iid(clients=2), ServerData(validation_size=8), 0
        )
    with pytest.warns(UserWarning, match="no sample of class"):
        small(validation_size=5)
    with pytest.warns(
        UserWarning, match="no sample of class"
    ):  # what is left to score on after the supplements
        small(validation_size=10, supplement_size=1)


def test_equal_supplements_are_warned_of():
    with pytest.warns(
        UserWarning,
        match=r"has 20 samples for supplements of 50, so that every small client gets the",
    ):
        small(validation_size=100, supplement_size=50, supplement_below=5000)
    with pytest.warns(UserWarning, match="supplement_size = 1e-05 is less than one sample"):
        assert not small(supplement_size=1e-5).supplements


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"method": GenFed(), "validation_size": 0},
            "genfed scores models on validation data; set validation_size",
        ),
        (
            {"supplement_size": 10, "validation_size": 0},
            "supplements come from the validation set; set validation_size",
        ),
        (
            {"validation_size": 5000},
            "validation_size = 5000 leaves the server or the clients without samples",
        ),
        (
            {"supplement_size": 2, "validation_size": 2},
            "validation_size = 2 leaves nothing for supplements; raise it",
        ),
        (
            {"validation_size": 1.7},
            "validation_size = 1.7 is neither a share nor a whole number of samples",
        ),
        ({"validation_size": -1}, "validation_size must be at least 0"),
        (
            {"validation_sise": 1},
            "unknown key of a federation 'validation_sise'; did you mean 'validation_size'",
        ),
    ],
)
def test_bad_input(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        small(**settings)
