"""Federations of clients whose labels or images are shifted, and newcomers with few samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedhelix import UserError, load
from fedhelix.deploy.remote_data import RemotePartition
from fedhelix.deploy.submit import create
from fedhelix.federation.description import check_same
from fedhelix.runs.spec import read_spec
from fedhelix.store import RunFolder
from helpers import close, same, small, timeless, unseal

DIGITS = load("digits").subsample(400, 200)
MIXED = {"data": DIGITS, "shift": "concept:2+rotation:3"}


def test_each_client_trains_and_is_tested_on_the_data_of_its_group():
    plain, fed = small(data=DIGITS), small(**MIXED)
    assert len({*fed.shifts}) > 3
    for before, after, name in zip(plain.splits, fed.splits, fed.shifts, strict=True):
        assert len(before.train) == len(after.train) and len(before.test) == len(after.test)
        kept = torch.equal(DIGITS.y[before.train], fed.data.y[after.train])
        assert kept == ("labels" not in name)
        same_images = torch.equal(DIGITS.x_test[before.test], fed.data.x_test[after.test])
        assert same_images == ("rotation" not in name)
    assert fed.census()["shift"] == fed.shifts and "shift" not in plain.census()


@pytest.mark.parametrize("engine", ["parallel", "batched"])
def test_engines_train_alike_under_a_shift(engine):
    reference = small("fedper", "mlp", **MIXED).fit(2, quiet=True)
    other_fed = small("fedper", "mlp", **MIXED, engine=engine, workers=2)
    other = other_fed.fit(2, quiet=True)
    other_fed.close()
    assert close(reference.state.server["model"], other.state.server["model"], 1e-5)
    assert reference.records[-1]["personal"] == pytest.approx(other.records[-1]["personal"])


def test_training_sees_the_shift():
    """On labels that one client has permuted, its own model learns what the others' cannot."""
    settings = {"data": DIGITS, "partition": "iid", "clients": 2, "cohort": 2, "shift": "concept:2"}
    shared = small("fedavg", **settings, epochs=5).fit(5, quiet=True).records[-1]
    own = small("local", **settings, epochs=5).fit(5, quiet=True).records[-1]
    assert own["personal_accuracy"] > 0.8
    assert shared["personal_accuracy"] < 0.7
    # Both versions of the test set count, and they agree on no label.
    assert shared["accuracy"] <= 0.5


def test_the_servers_own_samples_are_not_shifted():
    fed = small("genfed", data=DIGITS, shift="swap:2", supplement_size=5, supplement_below=1000)
    whole = len(DIGITS.y)
    assert fed.reserve.all.max() < whole
    for client, split in enumerate(fed.splits):
        given = split.train[-fed.supplements[client] :]
        assert np.isin(given, fed.reserve.pool).all()
        place = fed.shifts[client] != "none"
        assert (split.train[: -fed.supplements[client]] // whole == place).all()


def test_a_shift_goes_with_attacks_on_samples():
    fed = small(data=DIGITS, shift="rotation:2", attack="label-flip")
    attacker = next(iter(fed.attackers.ids))
    honest = small(data=DIGITS, shift="rotation:2")
    before, after = honest.splits[attacker].train, fed.splits[attacker].train
    assert torch.equal(honest.data.x[before], fed.data.x[after])
    assert torch.equal(9 - honest.data.y[before], fed.data.y[after])
    marked = small(data=DIGITS, shift="rotation:2", attack="backdoor")
    assert len(marked.triggered) == 2 * int((DIGITS.y_test != 0).sum())
    assert "attack_success" in marked.fit(1, quiet=True).records[-1]


def test_a_run_records_its_shift_and_is_resumed_with_it_only(tmp_path):
    straight = small(**MIXED).fit(3, quiet=True)
    small(**MIXED).fit(2, out=tmp_path / "run", quiet=True)
    resumed = small(**MIXED).fit(3, out=tmp_path / "run", resume=True, quiet=True)
    assert timeless(straight.records) == timeless(resumed.records)
    assert same(straight.state.server, resumed.state.server)
    with RunFolder.open(tmp_path / "run") as folder:
        assert folder.config["shift"] == {"shift": MIXED["shift"]}
        assert folder.clients["shift"] == small(**MIXED).shifts
        with pytest.raises(UserError, match="was run with shift"):
            check_same(small(data=DIGITS, shift="concept:2"), folder)


def test_a_run_of_before_there_were_shifts_goes_on(tmp_path):
    small(data=DIGITS).fit(1, out=tmp_path / "run", quiet=True)
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    assert '[shift]\nshift = "none"\n' in text
    config.write_text(text.replace('[shift]\nshift = "none"\n', ""))
    unseal(tmp_path / "run")
    assert len(small(data=DIGITS).fit(2, out=tmp_path / "run", resume=True).records) == 2


def test_a_newcomer_with_data_of_its_own_has_no_shift():
    fed = small(**MIXED)
    run = fed.fit(1, quiet=True)
    number, _ = fed.onboard((DIGITS.x[:20], DIGITS.y[:20]), run.state)
    assert number == 6 and fed.census()["shift"][6] == "none"


LATE = {"data": DIGITS, "newcomers": 4, "newcomers_after": 1, "newcomers_classes": 0.0}


class TestNewcomers:
    def test_they_hold_at_most_so_many_samples(self):
        whole, few = (small(**LATE, newcomers_samples=most) for most in (None, 5))
        for client, (before, after) in enumerate(zip(whole.splits, few.splits, strict=True)):
            assert np.array_equal(before.test, after.test)
            if client < few.known:
                assert np.array_equal(before.train, after.train)
                continue
            assert len(after.train) == min(5, len(before.train))
            assert np.isin(after.train, before.train).all()
            assert np.isin(after.valid, before.valid).all()
            share = len(after.train) / len(before.train)
            assert len(after.valid) == np.ceil(len(before.valid) * share)
        assert len(few.fit(2, quiet=True).records) == 2

    def test_they_are_shifted_too(self):
        fed = small(**LATE, shift="concept:2")
        assert fed.shifts[fed.known :].count("none") == 2

    def test_bad_input(self):
        with pytest.raises(UserError, match="newcomers_samples = 5 needs newcomers"):
            small(newcomers_samples=5)
        with pytest.raises(UserError, match="newcomers_samples must be at least 2"):
            small(**LATE, newcomers_samples=1)
        with pytest.raises(UserError, match="set newcomers_classes to 0"):
            small(**LATE | {"newcomers_classes": 0.5}, shift="swap:2")


def test_sites_have_shifts_of_their_own(tmp_path):
    with pytest.raises(UserError, match="sites keep theirs"):
        small(data=DIGITS, partition=RemotePartition([(40, 10)] * 6, 0.1), shift="concept:2")
    for key, value in (("shift", "concept:2"), ("newcomers_samples", 5)):
        more = {"newcomers": 2, "newcomers_after": 1} if "newcomers" in key else {}
        config = {"data": "own", "method": {"name": "fedavg"}, key: value, **more}
        with pytest.raises(UserError, match=f"{key} = {value} has no effect where sites"):
            create(read_spec(config, tmp_path), tmp_path / "run")
