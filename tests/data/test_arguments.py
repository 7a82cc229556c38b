"""Mistyped arguments of the helpers for data and partitions are answered with the nearest name."""

import warnings

import numpy as np
import pytest

from fedhelix import Dataset, UserError, add_lora, data, from_arrays, load, partition

DIRICHLET = "option of dirichlet"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partition.dirichlet(clients=5, alfa=0.1), f"{DIRICHLET} 'alfa'; .* 'alpha'"),
        (lambda: partition.dirichlet(5, valdi=0.1), f"{DIRICHLET} 'valdi'; .* 'valid'"),
        (lambda: partition.dirichlet(5, valid=0.1), "alpha, .*: missing .* 'alpha'"),
        (lambda: partition.dirichlet(5, 0.1, valdi=0.1), "dirichlet partition 'valdi'; .* 'valid'"),
        (lambda: partition.iid(client=5), "option of iid 'client'; .* 'clients'"),
        (lambda: partition.shard(5, classes=3), "missing .* 'classes_per_client'"),
        (lambda: partition.quantity(5, alfa=3), "option of quantity 'alfa'; .* 'alpha'"),
        (lambda: partition.dominant(shares=0.3), "option of dominant 'shares'; .* 'share'"),
        (lambda: partition.fedpac(shares=0.3), "option of fedpac 'shares'; .* 'share'"),
        (lambda: partition.natural(None, 3), "natural.*: too many positional arguments"),
        (lambda: partition.class_split(load(), fractoin=0.3), "'fractoin'; .* 'fraction'"),
        (lambda: from_arrays([1], [1], clases=2), "option of from_arrays 'clases'; .* 'classes'"),
        (lambda: from_arrays([1]), "from_arrays.*: missing a required argument: 'y'"),
        (lambda: data.from_clients([], tests=2), "option of from_clients 'tests'; .* 'test'"),
        (lambda: data.from_table(3, owners="a"), "option of from_table 'owners'; .* 'owner'"),
        (lambda: data.from_npz(paht="a"), "option of from_npz 'paht'; .* 'path'"),
        (lambda: data.from_leaf("a", class_=3), "option of from_leaf 'class_'; .* 'classes'"),
        (lambda: load(nam="digits"), "option of load 'nam'; did you mean 'name'"),
        (lambda: Dataset("a", X=3), "option of Dataset 'X'; did you mean 'x'"),
        (lambda: add_lora(3, rnk=2), "option of add_lora 'rnk'; did you mean 'rank'"),
    ],
)
def test_a_mistyped_argument_is_one_sentence(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_a_warning_about_arrays_points_to_the_line_that_gave_them():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_arrays(np.zeros((20, 2), np.float32), np.arange(20) % 2 + 1)
    assert [warning.filename for warning in caught] == [__file__]
