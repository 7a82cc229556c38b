from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_data import held, in_tests, labelled, table

from fedhelix.core.errors import UserError
from fedhelix.core.options import option
from fedhelix.data import Dataset, class_split, from_arrays, from_clients, load
from fedhelix.data.partitions import (
    Partition,
    as_text,
    dirichlet,
    dominant,
    fedpac,
    iid,
    natural,
    parse,
    quantity,
    shard,
)
from fedhelix.data.sampling import affordable, apportion

quick = settings(max_examples=40, deadline=None)


CIFAR_LIKE = labelled([5000] * 10, [1000] * 10, (3, 32, 32))
ALL_RULES = ["iid", "shard:2", "dirichlet:0.1", "dominant:20"]
EMNIST_LIKE = labelled([300] * 62, [100] * 62)


@pytest.mark.parametrize("text", ALL_RULES)
def test_the_same_seed_gives_the_same_partition(text):
    data = load("digits")
    first, again, other = (parse(text, 7).split(data, seed) for seed in (3, 3, 4))
    for left, right in zip(first, again, strict=True):
        assert np.array_equal(left.train, right.train)
        assert np.array_equal(left.valid, right.valid)
        assert np.array_equal(left.test, right.test)
    assert any(
        not np.array_equal(left.train, right.train)
        for left, right in zip(first, other, strict=True)
    )


@pytest.mark.parametrize("text", ALL_RULES)
def test_no_client_holds_a_sample_twice(text):
    data = load("digits")
    for split in parse(text, 20).split(data, 0):
        assert len(np.unique(held(split))) == len(held(split)) > 0
        assert len(np.unique(split.test)) == len(split.test) > 0
        assert held(split).dtype == split.test.dtype == np.int64


class TestRules:
    @given(
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
        clients=st.integers(1, 12),
        alpha=st.floats(1e-6, 100),
        seed=st.integers(0, 2**31),
    )
    @quick
    def test_iid_and_dirichlet_use_every_sample_once(self, sizes, clients, alpha, seed):
        data = labelled(sizes)
        for partition in (iid(clients), dirichlet(clients, alpha)):
            if clients > sum(sizes):
                with pytest.raises(UserError, match="clients cannot share"):
                    partition.split(data, seed)
                continue
            splits = partition.split(data, seed)
            everything = np.concatenate([held(split) for split in splits])
            assert np.array_equal(np.sort(everything), np.arange(sum(sizes)))
            assert min(len(held(split)) for split in splits) >= min(10, sum(sizes) // clients)

    @given(
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
        clients=st.integers(1, 12),
        per_client=st.integers(1, 6),
        seed=st.integers(0, 2**31),
    )
    @quick
    def test_shards_are_of_distinct_classes(self, sizes, clients, per_client, seed):
        data = labelled(sizes)
        possible = (
            per_client <= len(sizes)
            and sum(min(clients, size) for size in sizes) >= clients * per_client
        )
        if not possible:
            with pytest.raises(UserError, match=r"distinct classes|shards"):
                shard(clients, per_client).split(data, seed)
            return
        splits = shard(clients, per_client).split(data, seed)
        counts = table(data, splits)
        assert ((counts > 0).sum(1) == per_client).all()
        everything = np.concatenate([held(split) for split in splits])
        assert len(np.unique(everything)) == len(everything)
        for one_class in counts.T:
            shards = one_class[one_class > 0]
            assert len(shards) == 0 or shards.max() - shards.min() <= 1

    def test_shard_of_half_of_cifar(self):
        known, unseen = class_split(CIFAR_LIKE, seed=1)
        for half in (known, unseen):
            counts = table(CIFAR_LIKE, shard(50, 4, classes=half).split(CIFAR_LIKE, 0))
            assert set(np.unique(counts)) == {0, 125}
            assert (counts.sum(1) == 500).all()
            assert np.flatnonzero(counts.sum(0)).tolist() == half.tolist()

    def test_shards_mix_classes_freely(self):
        counts = table(CIFAR_LIKE, shard(100, 2).split(CIFAR_LIKE, 0))
        assert (counts.sum(1) == 500).all()
        assert len({tuple(row) for row in counts > 0}) > 25  # of 45 pairs of classes

    def test_unequal_classes_give_about_equal_shards(self):
        counts = table(data := labelled([4000, 1000, 1000, 2000]), shard(20, 2).split(data, 0))
        assert counts.sum() == 8000
        assert (counts > 0).sum(0).tolist() == [20, 5, 5, 10]
        assert set(counts[counts > 0]) == {200}

    def test_dirichlet_tops_up_from_the_largest(self):
        splits = dirichlet(50, 0.01, min_samples=20).split(CIFAR_LIKE, 0)
        sizes = np.array([len(held(split)) for split in splits])
        assert sizes.min() == 20
        assert sizes.sum() == 50_000
        assert sizes.max() > 2000

    def test_dirichlet_gets_even_with_a_large_alpha(self):
        counts = table(CIFAR_LIKE, dirichlet(10, 1e6).split(CIFAR_LIKE, 0))
        assert (abs(counts - 500) < 10).all()

    def test_golden_dominant(self):
        splits = dominant(100, share=0.2, samples=600).split(CIFAR_LIKE, 0)
        counts = table(CIFAR_LIKE, splits)
        assert counts[0].tolist() == [172] * 3 + [12] * 7
        for client, group in enumerate([[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]] * 2):
            assert np.flatnonzero(counts[client] == 172).tolist() == sorted(group)
        assert in_tests(CIFAR_LIKE, splits)[0].tolist() == [86] * 3 + [6] * 7
        assert len(dominant(5).split(labelled([800] * 10), 0)[0].test) == 600

    def test_dominant_shares_samples_only_when_the_supply_is_used_up(self):
        few = np.concatenate([held(split) for split in dominant(10).split(CIFAR_LIKE, 0)])
        assert len(np.unique(few)) == len(few) == 6000
        many = np.concatenate([held(split) for split in dominant(100).split(CIFAR_LIKE, 0)])
        assert len(many) == 60_000
        assert np.bincount(many).max() == 2

    def test_shared_samples_are_told_with_how_many_would_be_apart(self, recwarn):
        said = (
            "clients share samples of 5 of 10 classes, which have too few for all (validation "
            "samples, too); take fewer clients, or give each 395 samples, the most that fit: "
            "partition.dominant(samples=395), on the command line dominant:0.2:395."
        )
        dominant(100).split(CIFAR_LIKE, 0)
        assert [str(one.message) for one in recwarn] == [said]
        recwarn.clear()
        apart = dominant(100, samples=395).split(CIFAR_LIKE, 0)
        held_once = np.concatenate([held(split) for split in apart])
        assert len(np.unique(held_once)) == len(held_once) and not recwarn.list
        dominant(100, samples=396).split(CIFAR_LIKE, 0)
        assert len(recwarn.list) == 1
        dominant(10).split(CIFAR_LIKE, 0)
        assert len(recwarn.list) == 1

    def test_where_sizes_differ_is_told_with_samples_that_make_them_equal(self, recwarn):
        data, size = labelled([70, 20, 10]), lambda split: len(held(split))
        assert [*map(size, dominant(3).split(data, 0))] == [80, 80, 23]
        assert [str(one.message) for one in recwarn] == [
            "clients share samples of 3 of 3 classes, which have too few for all (validation "
            "samples, too), and have 23 to 80 samples instead of 600 each, since groups have too "
            "few of their classes; give each 20 samples, the most that fit: "
            "partition.dominant(samples=20), on the command line dominant:0.2:20."
        ]
        recwarn.clear()
        assert [*map(size, parse("dominant:0.2:20", 3).split(data, 0))] == [20] * 3
        assert not recwarn.list
        dominant(3, samples=21).split(data, 0)
        assert len(recwarn.list) == 1
        recwarn.clear()
        apart = dominant(2, share=0, samples=30, groups=[[0], [2]])
        assert [*map(size, apart.split(data, 0))] == [30, 10]
        assert [str(one.message) for one in recwarn] == [
            "clients have 10 to 30 samples instead of 30 each, since groups have too few of their "
            "classes; give each 10 samples, the most that fit: partition.dominant(samples=10)."
        ]

    def test_dominant_emnist_groups_and_own_groups(self):
        data = labelled([100] * 62)
        counts = table(data, dominant(4, samples=310).split(data, 0))
        for client, group in enumerate([range(10), range(10, 36), range(36, 62), range(10)]):
            assert set(np.argsort(-counts[client], kind="stable")[: len(group)]) == set(group)
        data = labelled([100] * 4)
        counts = table(data, dominant(2, share=0, samples=30, groups=[[0, 1], [3]]).split(data, 0))
        assert counts.tolist() == [[15, 15, 0, 0], [0, 0, 0, 30]]

    def test_golden_fedpac(self):
        """FedPAC's code on EMNIST: 1,000 training and 600 test samples a client.

        Training: 200 = 61 x 3 + 17 over all classes, 800 = 10 x 80 or 25 x 30 + 50 over the
        dominant ones. Test: 120 = 61 x 1 + 59, and 480 = 10 x 48 or 25 x 18 + 30.
        """
        splits = parse("fedpac:20", 3).split(EMNIST_LIKE, 0)
        digits = [83] * 10 + [3] * 51 + [17]
        upper = [3] * 10 + [33] * 25 + [53] + [3] * 25 + [17]
        lower = [3] * 36 + [33] * 25 + [67]
        assert table(EMNIST_LIKE, splits).tolist() == [digits, upper, lower]
        digits = [49] * 10 + [1] * 51 + [59]
        upper = [1] * 10 + [19] * 25 + [31] + [1] * 25 + [59]
        lower = [1] * 36 + [19] * 25 + [89]
        assert in_tests(EMNIST_LIKE, splits).tolist() == [digits, upper, lower]

    def test_fedpac_tests_on_fewer_where_a_class_is_small(self):
        """40 = 4 x 2 over all classes, 32 over the dominant two; 41 would ask for 16 + 1 + 2 of one
        that has 18.
        """
        data = labelled([400] * 4, [18] * 4)
        groups = [[0, 1], [2, 3]]
        parts = in_tests(data, fedpac(2, groups=groups, samples=40).split(data, 0))
        assert parts.tolist() == [[18, 18, 2, 2], [2, 2, 18, 18]]

    def test_fedpac_is_dominant_where_nothing_is_left_over(self):
        ten = labelled([800] * 10)
        exact = fedpac(5, samples=600).split(ten, 0)
        usual = dominant(5, samples=600).split(ten, 0)
        assert np.array_equal(table(ten, exact), table(ten, usual))
        assert np.array_equal(in_tests(ten, exact), in_tests(ten, usual))

    def test_fedpac_refuses_classes_that_are_too_small(self):
        with pytest.raises(UserError, match="a class that has 20"):
            fedpac(3).split(labelled([20] * 10), 0)

    def test_dominant_gives_fewer_where_a_class_is_small(self):
        counts = table(data := labelled([100] * 10), dominant(5).split(data, 0))
        assert (counts.max(1) <= 100).all()
        assert abs(counts[0, 0] / counts[0].sum() - 172 / 600) < 0.01

    @pytest.mark.parametrize("classes", [1, 2, 3, 7, 100])
    def test_dominant_works_with_any_number_of_classes(self, classes):
        data = labelled([50] * classes)
        assert len(dominant(6, samples=40).split(data, 0)) == 6

    def test_natural(self):
        clients = [(np.full((n, 1), n), np.arange(n) % 2) for n in (10, 20, 30)]
        data = from_clients(clients)
        splits = natural(valid=0).split(data, 0)
        for split, n in zip(splits, (10, 20, 30), strict=True):
            assert set(data.x[split.train].flatten().tolist()) == {n}
            assert set(data.x_test[split.test].flatten().tolist()) == {n}
            assert len(split.test) == n // 5
        assert [len(split.test) for split in natural(test_samples=3).split(data, 0)] == [2, 3, 3]

    def test_natural_with_ids(self):
        data = labelled([10, 10], [40, 40])
        splits = natural(ids=["b"] * 10 + ["a"] * 10, test_samples=5).split(data, 0)
        assert table(data, splits).tolist() == [[0, 10], [10, 0]]
        assert in_tests(data, splits).tolist() == [[0, 5], [5, 0]]

    def test_natural_client_without_own_test_samples(self):
        data = from_clients([(np.zeros((1, 1)), [0]), (np.ones((20, 1)), [0, 1] * 10)])
        with pytest.warns(UserWarning, match="1 of the 2 clients"):
            splits = natural().split(data, 0)
        assert [len(split.test) for split in splits] == [0, 4]

    def test_regression(self):
        data = from_arrays(np.zeros((100, 2)), np.linspace(0, 1, 100))
        splits = iid(4).split(data, 0)
        assert [len(held(split)) for split in splits] == [20] * 4
        assert [len(np.unique(split.test)) for split in splits] == [20] * 4
        assert len(natural(ids=np.arange(80) % 5).split(data, 0)) == 5
        for partition in (dirichlet(4, 1), shard(4, 1), dominant(4)):
            with pytest.raises(
                UserError, match="needs classes, but 'data' has none; use iid, quantity or natural"
            ):
                partition.split(data, 0)


class TestParts:
    @pytest.mark.parametrize(
        "text", ["shard:2", "dirichlet:0.1", "dirichlet:1", "dominant:20", "iid"]
    )
    def test_test_parts_follow_the_training_parts(self, text):
        splits = parse(text, 20).split(CIFAR_LIKE, 0)
        train, test = table(CIFAR_LIKE, splits), in_tests(CIFAR_LIKE, splits)
        wanted = train / train.sum(1, keepdims=True) * test.sum(1, keepdims=True)
        assert (abs(test - wanted) <= 1).all()

    def test_size_of_test_parts(self):
        assert {len(split.test) for split in iid(20).split(CIFAR_LIKE, 0)} == {500}
        assert {len(split.test) for split in iid(1000).split(CIFAR_LIKE, 0)} == {100}
        assert {len(split.test) for split in iid(20, test_samples=7).split(CIFAR_LIKE, 0)} == {7}
        scarce = labelled([100, 100], [30, 3])
        assert in_tests(scarce, iid(1).split(scarce, 0)).tolist() == [[3, 3]]
        assert in_tests(scarce, shard(2, 1).split(scarce, 0)).sum(0).tolist() == [30, 3]

    def test_a_class_without_test_samples(self):
        data = labelled([50, 50, 50], [40, 40, 1])
        data = Dataset("toy", data.x, data.y, data.x_test[:-1], data.y_test[:-1], 3)
        assert in_tests(data, iid(1).split(data, 0)).tolist() == [[40, 40, 0]]
        with pytest.raises(UserError, match="no sample of any class that client"):
            shard(3, 1).split(data, 0)

    @given(valid=st.floats(0, 0.9), samples=st.integers(3, 200), clients=st.integers(1, 3))
    @quick
    def test_validation_part(self, valid, samples, clients):
        for split in iid(clients, valid=valid).split(labelled([samples]), 0):
            size = len(held(split))
            assert len(split.train) >= 1
            assert not set(split.train) & set(split.valid)
            if valid == 0 or size < 2:
                assert len(split.valid) == 0
            else:
                assert len(split.valid) == min(max(round(valid * size), 1), size - 1)

    def test_excluded_samples_and_other_classes_are_left_out(self):
        data = labelled([40] * 5)
        exclude = np.arange(0, 200, 2)
        for partition in (
            iid(4),
            dirichlet(4, 0.5),
            shard(4, 2),
            natural(ids=np.arange(200) // 2 % 4),
        ):
            splits = partition.split(data, 0, exclude=exclude)
            everything = np.concatenate([held(split) for split in splits])
            assert sorted(everything) == list(range(1, 200, 2))
        counts = table(data, splits := iid(4, classes=[1, 3]).split(data, 0))
        assert counts.sum(0).tolist() == [0, 40, 0, 40, 0]
        assert in_tests(data, splits).sum(0)[[0, 2, 4]].tolist() == [0, 0, 0]

    def test_class_split(self):
        known, unseen = class_split(CIFAR_LIKE)
        assert len(known) == len(unseen) == 5
        assert sorted([*known, *unseen]) == list(range(10))
        assert np.array_equal(known, class_split(CIFAR_LIKE)[0])
        assert any(
            not np.array_equal(known, class_split(CIFAR_LIKE, seed=seed)[0]) for seed in (1, 2)
        )
        with pytest.raises(UserError, match="leaves one side"):
            class_split(CIFAR_LIKE, 0.01)


def test_parse():
    assert parse("shard:4", 8) == shard(8, 4)
    assert parse("dirichlet:0.1", 8, valid=0.2) == dirichlet(8, 0.1, valid=0.2)
    assert parse("dominant:20", 8) == dominant(8, 0.2)
    assert parse("fedpac:20", 8) == fedpac(8, 0.2)
    assert parse("dominant:20:35", 8) == dominant(8, 0.2, samples=35)
    assert parse("fedpac:20:35", 8) == fedpac(8, 0.2, samples=35)
    assert parse(" iid ", 8) == iid(8)
    assert parse("natural", 8) == natural()
    assert parse("natural:5", 8) == natural(min_samples=5)
    assert parse("natural", 8).name == "natural"


@dataclass(frozen=True)
class Halves(Partition):
    cut: float = option(0.5, "where")
    weights: np.ndarray | None = None


@pytest.mark.parametrize(
    ("partition", "text"),
    [
        (shard(8, 4), "shard:4"),
        (shard(8, 2), "shard:2"),
        (dirichlet(8, 0.1, valid=0.2), "dirichlet:0.1"),
        (dirichlet(8, 1), "dirichlet:1"),
        (quantity(8, 0.123456), "quantity:0.123456"),
        (dominant(8, 20), "dominant:0.2"),
        (fedpac(8, 0.3), "fedpac:0.3"),
        (fedpac(8, 0.3, samples=300), "fedpac:0.3:300"),
        (dominant(8, samples=35, valid=0.2), "dominant:0.2:35"),
        (dominant(8, 20, groups=[[0], [1]]), "Dominant(groups=((0,), (1,)))"),
        (iid(8), "iid"),
        (natural(["a", "b"]), "natural"),
        (natural(["a", "b"], min_samples=5), "natural:5"),
        (dirichlet(8, 0.1, min_samples=3), "Dirichlet(min_samples=3)"),
        (dirichlet(8, 0.2, min_samples=3), "Dirichlet(min_samples=3, alpha=0.2)"),
        (iid(8, classes=[0, 1]), "Iid(classes=(0, 1))"),
        (Halves(8), "Halves()"),
        (Halves(8, weights=np.eye(2)), "Halves(weights=array([[1., 0.], [0., 1.]]))"),
    ],
)
def test_a_partition_has_the_text_of_the_command_line(partition, text):
    assert as_text(partition) == text
    if "(" not in text:
        assert as_text(parse(text, 8)) == text


@given(
    weights=st.lists(
        st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any), min_size=1, max_size=5
    ),
    supply=st.lists(st.integers(1, 500), min_size=4, max_size=4),
    wanted=st.integers(1, 1000),
)
@quick
def test_apportionment(weights, supply, wanted):
    shares, available = np.array(weights), np.array(supply)
    totals = affordable(wanted, shares, available)
    counts = apportion(totals, shares)
    assert (totals >= 1).all()
    assert (counts.sum(1) == totals).all()
    assert (counts <= available).all()
    assert (abs(counts - totals[:, None] * shares / shares.sum(1, keepdims=True)) < 1).all()
