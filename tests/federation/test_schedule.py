"""The virtual clock: whose work ends in which round, on devices of known speeds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedhelix import FedAvg, FedBuff, load, partition
from fedhelix.core.errors import UserError
from fedhelix.data import Dataset
from fedhelix.store import RunFolder
from helpers import check_resumed, same, small, timeless

DIGITS = load("digits").subsample(300, 100)
# Three clients with two samples each train two epochs: 4 samples in 1, 2 and 4 seconds. The model
# weighs 4 bytes, and one second each way. So their rounds take 3, 4 and 6 seconds.
TRACE = "client,speed,upload,download\n0,4,4,4\n1,2,4,4\n2,1,4,4\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def three(method=None, **more):
    """Clients that want the weight to be 1, 2 and 3; two steps go 36 % of the way from 0."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    x, y = torch.ones(6, 1), torch.tensor([1.0, 1, 2, 2, 3, 3])
    owners = torch.tensor([0, 0, 1, 1, 2, 2]).numpy()
    data = Dataset("three", x, y, x, y, classes=None, owners=owners)
    usual = {"cohort": 3, "epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0}
    return small(method, weight, data=data, partition=partition.natural(valid=0), **usual | more)


def weight_of(state):
    return state.server["model"]["weight"].item()


def played(fed, rounds):
    """Weight, clock, participants and late clients after every round."""
    return [
        (weight_of(state), record["clock"], record["participants"], record["late"])
        for record, state in fed.run_rounds(rounds)
    ]


def test_a_round_lasts_as_long_as_its_slowest_client(trace):
    assert played(three(devices=trace), 2) == [
        (pytest.approx(0.72), 6.0, [0, 1, 2], []),
        (pytest.approx(0.64 * 0.72 + 0.72), 12.0, [0, 1, 2], []),
    ]


def test_uploads_are_timed_as_they_travel(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "client,speed,upload,download\n" + "".join(f"{i},1e9,1e3,1e9\n" for i in range(4))
    )
    options = {
        "devices": str(path),
        "clients": 4,
        "cohort": 4,
        "data": DIGITS,
        "model": "digits-cnn",
    }
    for method in ("fedavg", "compact"):
        (record, _), *_ = small(method, **options).run_rounds(1)
        assert record["clock"] == pytest.approx(record["uplink_bytes"] / 4 / 1e3, rel=1e-3)


def test_late_clients_are_dropped_at_the_deadline(trace):
    fed = three(devices=trace, deadline=5.0)
    assert played(fed, 2) == [
        (pytest.approx(0.54), 5.0, [0, 1], [2]),
        (pytest.approx(0.64 * 0.54 + 0.54), 10.0, [0, 1], [2]),
    ]
    (record, _), *_ = fed.run_rounds(1)
    assert record["started"] == [0, 1, 2]
    # All three have received the model, and two uploads have arrived.
    assert (record["downlink_bytes"], record["uplink_bytes"]) == (12, 8)


def test_late_clients_go_on_into_the_next_round(trace):
    # At 5 seconds clients 0 and 1 begin anew, until 8 and 9; client 2 brings its old model at 6.
    fed = three(devices=trace, deadline=5.0, late="keep")
    first, second = fed.run_rounds(2)
    assert (first[0]["participants"], first[0]["clock"]) == ([0, 1], 5.0)
    assert (second[0]["participants"], second[0]["clock"]) == ([0, 1, 2], 9.0)
    assert second[0]["staleness"] == [0, 0, 1]
    mean = (0.64 * 0.54 + 0.36 + 0.64 * 0.54 + 0.72 + 1.08) / 3
    assert weight_of(second[1]) == pytest.approx(mean)
    # Client 2 received nothing in the second round.
    assert (second[0]["downlink_bytes"], second[0]["uplink_bytes"]) == (8, 12)


def test_over_selection_takes_the_first_of_more_clients(trace):
    fed = three(devices=trace, cohort=2, over_select=1.5)
    assert played(fed, 1) == [(pytest.approx(0.54), 4.0, [0, 1], [2])]


def test_a_deadline_that_nobody_meets(trace):
    with pytest.raises(UserError, match=r"meets the deadline of 2 .*; the fastest needs 3\."):
        three(devices=trace, deadline=2.0).fit(1, quiet=True)


def test_a_dropped_client_keeps_what_it_had(trace):
    fed = three("compact", devices=trace, deadline=5.0)
    *_, (_, state) = fed.run_rounds(1)
    assert set(state.client_states) == {0, 1}


def test_the_server_waits_until_somebody_is_available(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "client,speed,upload,download,available\n"
        "0,4,4,4,100-200\n1,2,4,4,50-52 300-400\n2,1,4,4,1000-2000\n"
    )
    # Client 1 alone is there at 50, rests from 52 until 300, and then needs 2 more seconds. At 302
    # nobody else is there. It begins again, and is done at 306.
    fed = three(FedAvg(), devices=str(path))
    rounds = [(clock, who) for _, clock, who, _ in played(fed, 2)]
    assert rounds == [(302.0, [1]), (306.0, [1])]


# Asynchronous servers


def test_fedbuff_by_hand(trace):
    """A buffer of one: each update counts 1 / sqrt(1 + the versions since it began)."""
    half = 2**-0.5
    first, second = 0.36, 0.36 + 0.72 * half
    third = second + 0.36 * (1 - 0.36) * half
    fourth = third + 1.08 * 0.5
    # Client 0 is done at 3 and again at 6, before client 2, which is then three versions behind.
    fed = three(FedBuff(buffer=1), devices=trace)
    assert played(fed, 4) == [
        (pytest.approx(first), 3.0, [0], []),
        (pytest.approx(second), 4.0, [1], []),
        (pytest.approx(third), 6.0, [0], []),
        (pytest.approx(fourth), 6.0, [2], []),
    ]
    assert [record["staleness"] for record, _ in fed.run_rounds(4)] == [[0], [1], [1], [3]]


def test_whoever_is_done_makes_room_for_another_before_the_buffer_is_full(trace):
    """One client at a time and a buffer of two: the second begins when the first has arrived, but
    with the same model.
    """
    fed, seconds = three(FedBuff(buffer=2), devices=trace, cohort=1), (3, 4, 6)
    clock = weight = 0.0
    for record, state in fed.run_rounds(3):
        one, other = record["participants"]
        clock += seconds[one] + seconds[other]
        weight = 0.64 * weight + 0.36 * (one + 1 + other + 1) / 2
        assert record["clock"] == clock and record["staleness"] == [0, 0]
        assert weight_of(state) == pytest.approx(weight) and not state.pending


@pytest.mark.parametrize("cohort", [2, 3])
def test_equal_devices_and_a_buffer_for_all_are_fedavg_to_the_bit(cohort):
    one, other = (
        three(method, devices="uniform", cohort=cohort).fit(4, quiet=True)
        for method in (FedAvg(), FedBuff(buffer=cohort))
    )
    assert timeless(one.records) == timeless(other.records)
    assert same(one.state.server, other.state.server)


def test_without_devices_those_of_an_asynchronous_method_are_alike():
    plain, alike = (three(FedBuff(buffer=1), **more) for more in ({}, {"devices": "uniform"}))
    assert played(plain, 3) == played(alike, 3)


def test_a_clock_alone_changes_nothing_but_the_record():
    one, other = (
        small(data=DIGITS, **more).fit(3, quiet=True) for more in ({}, {"devices": "lognormal:1"})
    )
    new = {"clock", "started", "staleness", "late"}
    kept = [{key: record[key] for key in record if key not in new} for record in other.records]
    assert timeless(kept) == timeless(one.records)
    assert all(new <= record.keys() for record in other.records)
    assert same(one.state.server, other.state.server)


@given(
    devices=st.sampled_from(["uniform", "lognormal:1.5", "slow:0.3:20"]),
    method=st.sampled_from(["fedavg", "fedbuff", "fedasync", "fedbuff+scaffold", "local"]),
    deadline=st.sampled_from([None, 4.0]),
    late=st.sampled_from(["drop", "keep"]),
    over=st.sampled_from([1.0, 1.7]),
    availability=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 3),
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:late = keep does nothing")
def test_the_clock_never_goes_back(devices, method, deadline, late, over, availability, seed):
    fed = small(
        method, data=DIGITS, devices=devices, late=late, over_select=over, seed=seed,
        availability=availability, deadline=None if deadline is None else deadline * 3600,
    )  # fmt: skip
    clock = 0.0
    for t, (record, state) in enumerate(fed.run_rounds(4, eval_every=4)):
        assert record["clock"] >= clock and state.clock == record["clock"]
        assert all(work.arrives >= state.clock for work in state.pending)
        assert len(set(record["participants"])) == len(record["participants"])
        assert not {work.task.client for work in state.pending} & set(record["participants"])
        assert all(0 <= age <= t for age in record["staleness"])
        clock = record["clock"]


@pytest.mark.parametrize("method", ["fedavg", "fedbuff+compact"])
def test_a_run_that_is_stopped_in_mid_flight_goes_on_to_the_bit(method, tmp_path):
    def fed():
        return small(method, data=DIGITS, devices="slow:0.5:10", late="keep", deadline=1.0)

    run = check_resumed(fed, tmp_path, 6, after=3)
    assert list((tmp_path / "part" / "checkpoint").glob("timing-*"))
    assert any(max(record["staleness"], default=0) for record in run.records)
    moved, straight = (RunFolder(tmp_path / name).timing() for name in ("moved", "straight"))
    assert straight["pending"] and same(moved, straight)


@pytest.mark.parametrize("engine", ["parallel", "batched"])
def test_engines_keep_the_same_time(engine):
    runs = []
    for name in ("serial", engine):
        fed = small("fedbuff+helix", data=DIGITS, devices="lognormal:1", engine=name, workers=2)
        runs.append(fed.fit(3, quiet=True, eval_every=3))
        fed.close()
    one, other = (
        [(r["clock"], r["participants"], r["staleness"]) for r in run.records] for run in runs
    )
    assert one == other


def test_the_time_to_a_level_is_in_the_summary(trace):
    fed = three(devices=trace, target=-1.0)  # R² of the server's model
    run = fed.fit(4, quiet=True)
    reached = next(r["clock"] for r in run.records if r["personal_score"] >= -1.0)
    assert run.summary["time_to_target"] == run.time_to(-1.0) == reached
    assert run.summary["clock"] == 24.0 and run.time_to(2.0) is None
    with pytest.raises(UserError, match="level must be a number, not 'a'"):
        run.time_to("a")
