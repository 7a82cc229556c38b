"""Partitions that cannot be made or carried out say so in one sentence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from labelled_data import labelled

from fedhelix.core.errors import UserError
from fedhelix.data import Dataset, load
from fedhelix.data.partitions import Partition, dirichlet, dominant, iid, natural, parse, shard


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: dirichlet(10, 0), "alpha must be greater than 0, not 0"),
            (lambda: dirichlet(10, -1), "alpha must be greater than 0"),
            (lambda: dirichlet(10, float("inf")), "alpha must be at most"),
            (lambda: iid(0), "clients must be at least 1"),
            (lambda: iid(10, valid=1.5), "valid must be at most 0.9"),
            (
                lambda: iid(10, test_sample=5),
                "unknown key of the iid partition 'test_sample'; did you mean",
            ),
            (lambda: iid(10, classes="all"), "classes must be a list of classes"),
            (lambda: dominant(10, share=120), "share must be at most 100"),
            (lambda: dominant(10, share=-0.1), "share must be at least 0"),
            (lambda: dominant(10, groups=[[]]), "each of groups must be a list of classes"),
            (
                lambda: parse("dirichlt:0.1", 10),
                "unknown partition 'dirichlt'; did you mean 'dirichlet'",
            ),
            (lambda: parse("dirichlet", 10), "lacks its alpha"),
            (lambda: parse("dirichlet=0.1", 10), "'dirichlet=0.1'; did you mean 'dirichlet:0.1'"),
            (lambda: parse("dirichlet:x", 10), "alpha must be a number, not 'x'"),
            (lambda: parse("shard:1.5", 10), "classes_per_client must be a whole number"),
            (lambda: parse("iid:3", 10), "iid takes no number"),
            (lambda: parse("natural:", 10), "lacks its min_samples; 'natural:' and a number"),
            (lambda: parse("dominant:20:", 10), "lacks its samples; 'dominant:20:' and a number"),
            (lambda: parse("dominant:20:0", 10), "samples must be at least 1"),
            (lambda: parse("dominant:20:3:4", 10), "too many .*; 'dominant:SHARE:SAMPLES' is"),
            (lambda: parse("shard:2:3", 10), "too many .*; 'shard:CLASSES_PER_CLIENT' is right"),
        ],
    )
    def test_when_made(self, make, message):
        with pytest.raises(UserError, match=message):
            make()

    @pytest.mark.parametrize(
        ("partition", "message"),
        [
            (iid(31), "31 clients cannot share 30 samples"),
            (dirichlet(31, 0.1), "31 clients cannot share 30 samples"),
            (shard(2, 4), "4 distinct classes, but there are only 3"),
            (shard(2, 3, classes=(0, 1)), "3 distinct classes, but there are only 2"),
            (
                shard(20, 2),
                "20 clients with 2 classes each need 40 shards, but the 30 samples give only 30",
            ),
            (iid(2, classes=[5]), "there is no class 5 in 'toy'; its classes are 0 to 2"),
            (dominant(2, groups=[[0], [7]]), r"group 1 is \[7\]"),
            (natural(), "does not say who owns which sample"),
            (natural(ids=[1, 2, 3]), r"30 training samples, but ids has the shape \(3,\)"),
            (
                natural(ids=[0] * 10 + [1] * 20, classes=[0]),
                "client '1' of 'toy' has no training samples left",
            ),
        ],
    )
    def test_when_impossible(self, partition, message):
        with pytest.raises(UserError, match=message):
            partition.split(labelled([10, 10, 10]), 0)

    @pytest.mark.parametrize(
        "text", ["iid", "shard:2", "dirichlet:1", "quantity:1", "dominant:20", "fedpac:20"]
    )
    def test_too_few_samples_for_every_client(self, text):
        size = {"samples": 24} if text in ("dominant:20", "fedpac:20") else {}
        usual, data = parse(text, 4, **size), labelled([32] * 3)
        with pytest.raises(
            UserError,
            match=f"the partition {usual.name} gives client . .* samples, fewer than min_samples = "
            "25; lower min_samples" + (r"\." if size else " or clients"),
        ):
            replace(usual, min_samples=25).split(data, 0)
        for least in (None, 20):
            assert len(replace(usual, min_samples=least).split(data, 0)) == 4

    def test_exclude(self):
        data = labelled([10])
        with pytest.raises(UserError, match="whole numbers from 0 to 9"):
            iid(2).split(data, 0, exclude=[10])
        with pytest.raises(UserError, match="no training samples"):
            iid(2).split(data, 0, exclude=np.arange(10))

    def test_test_owner_without_training_samples(self):
        x, y = torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)
        data = Dataset(
            "toy", x, y, x, y, 1, owners=np.array([0, 0, 1, 1]), owners_test=np.array([0, 1, 1, 2])
        )
        with pytest.raises(
            UserError, match="owner '2' of 'toy' has test samples but no training samples"
        ):
            natural().split(data, 0)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        (
            np.ones((2, 10)),
            r"must be whole numbers of the shape \(2, 10\), .*, not float64 of the shape \(2, 10\)",
        ),
        (
            np.ones((10, 2), dtype=int),
            r"of the shape \(2, 10\), clients × classes, not int64 of the shape \(10, 2\)",
        ),
        (None, "must be whole numbers of the shape"),
        (np.full((2, 10), 1000), "gives client 0 1000 samples of a class that has"),
        (np.full((2, 10), -1), "gives client 0 -1 samples of a class that has"),
        (np.repeat([[3], [0]], 10, axis=1), "the partition mine gives client 1 no samples"),
    ],
)
def test_a_rule_of_ones_own_is_checked(counts, sentence):
    mine = type("Mine", (Partition,), {"counts": lambda *_: counts})(clients=2)
    with pytest.raises(UserError, match=sentence):
        mine.split(load("digits"), seed=0)


def test_a_partition_has_a_rule():
    with pytest.raises(UserError, match="the partition mine has no rule; write its counts"):
        type("Mine", (Partition,), {})(clients=2).split(load("digits"), seed=0)
