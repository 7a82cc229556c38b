"""Devices: their speeds, when they are available, and traces that are wrong."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.core.errors import UserError
from fedhelix.federation.devices import DAY, Device, DeviceModel, Devices, read_trace
from helpers import small


def model(devices, clients=20, seed=0, **more):
    return DeviceModel(Devices(devices=devices, **more), clients, seed)


def every(devices):
    return [devices.device(client) for client in range(devices.clients)]


def test_a_round_takes_the_time_of_its_bytes_and_samples():
    # 100 bytes at 50 per second, 30 samples at 10 per second, 20 bytes at 5 per second
    assert Device(speed=10, upload=5, download=50).seconds(100, 30, 20) == 2 + 3 + 4


def test_uniform_devices_are_the_usual_one():
    assert set(every(model("uniform", device_speed=7.0))) == {Device(7.0, 125_000.0, 1_250_000.0)}


def test_exactly_a_tenth_is_slow_in_everything():
    devices = every(model("slow:0.1:10", clients=50))
    usual, slow = Device(100.0, 125e3, 1.25e6), Device(10.0, 12.5e3, 125e3)
    assert (devices.count(usual), devices.count(slow)) == (45, 5)
    assert every(model("slow:0.1:10", clients=50)) == devices
    assert every(model("slow:0.1:10", clients=50, seed=1)) != devices


def test_lognormal_devices_have_the_median_and_spread_of_their_text():
    rates = np.array([device[:3] for device in every(model("lognormal:0.5", clients=2000))])
    logs = np.log(rates / [100.0, 125e3, 1.25e6])
    assert np.allclose(np.median(logs, 0), 0, atol=0.05) and np.allclose(
        logs.std(0), 0.5, atol=0.05
    )
    assert np.abs(np.corrcoef(logs.T) - np.eye(3)).max() < 0.1  # drawn independently


def test_a_device_does_not_depend_on_how_many_there_are():
    few, many = model("lognormal:1", 3), model("lognormal:1", 30)
    assert every(few) == every(many)[:3]


# Availability

OFFICE = Device(1.0, 1.0, 1.0, ((10.0, 20.0), (50.0, 60.0)), 100.0)


@pytest.mark.parametrize(
    ("now", "then"), [(0, 10), (10, 10), (19, 19), (20, 50), (60, 110), (275, 310), (355, 355)]
)
def test_a_device_is_available_again(now, then):
    assert OFFICE.next_available(now) == then


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [
        (0, 5, 15),  # it begins at 10
        (12, 8, 20),  # exactly until the window closes
        (12, 9, 51),  # one second is left for the next window
        (0, 20, 60),  # a whole period
        (0, 21, 111),
        (15, 25, 120),  # 5 until 20, 10 until 60, 10 until 120
        (0, 200, 960),  # ten periods
    ],
)
def test_work_rests_while_a_device_is_not_available(start, seconds, end):
    assert OFFICE.finish(start, seconds) == end


@given(st.integers(0, 400), st.integers(1, 90))
@settings(deadline=None)
def test_work_ends_when_the_seconds_have_been_counted(start, seconds):
    now, left = start, seconds
    while left:
        left -= any(begin <= now % 100 < end for begin, end in OFFICE.windows)
        now += 1
    assert OFFICE.finish(start, seconds) == now


def test_a_share_of_the_day_begins_at_a_random_hour():
    devices = every(model("uniform", clients=200, availability=0.25))
    open_for = [sum(end - start for start, end in device.windows) for device in devices]
    assert np.allclose(open_for, DAY / 4)
    for hour in range(24):  # at any time about a quarter of them
        there = np.mean([device.next_available(hour * 3600.0) == hour * 3600 for device in devices])
        assert 0.1 < there < 0.4


# Traces


def test_a_trace_as_csv_and_as_json(tmp_path):
    table, objects = tmp_path / "trace.csv", tmp_path / "trace.json"
    table.write_text("client,speed,upload,available\n1,2,3,0-3600 7200-9000\n0,5,,\n")
    rows = [
        {"client": 1, "speed": 2, "upload": 3, "available": [[0, 3600], [7200, 9000]]},
        {"client": 0, "speed": 5},
    ]
    objects.write_text(json.dumps(rows))
    usual = Devices(devices="uniform", device_upload=11.0, device_download=13.0)
    expected = {
        1: Device(2.0, 3.0, 13.0, ((0.0, 3600.0), (7200.0, 9000.0))),
        0: Device(5.0, 11.0, 13.0),
    }
    assert read_trace(table, usual) == read_trace(objects, usual) == expected


def test_a_trace_of_a_week_repeats_after_a_week(tmp_path):
    path = tmp_path / "week.csv"
    path.write_text(f"client,speed,available\n0,1,0-10 {6.5 * DAY}-{7 * DAY}\n")
    device = read_trace(path, Devices(devices="uniform"))[0]
    assert device.period == 7 * DAY and device.next_available(20.0) == 6.5 * DAY


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("client,speed\n0,-1\n", "gives client 0 the speed -1; it must be above 0"),
        ("client,speed,upload\n0,1,0\n", "gives client 0 the upload 0; it must be above 0"),
        ("client,speed\n0,nan\n", "speed in '.*' must be|the speed nan"),
        ("client,speed\n0,fast\n", "speed in '.*' must be a number, not 'fast'"),
        ("client,speed\n0,1\n", "no device for client 1; add a line for it"),
        ("client,speed\n0,1\n0,1\n", "names client '0', which is no new number"),
        ("client,upload\n0,1\n", "lacks the speed of a device"),
        ("client,sped\n0,1\n", "unknown column of '.*' 'sped'; did you mean 'speed'"),
        ("client,speed,available\n0,1,9-3\n", "available at '9-3'; it must be rising seconds"),
        ("", "no device for client 0"),
    ],
)
def test_a_wrong_trace_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence) as refusal:
        small(devices=str(path))
    assert str(refusal.value).count(". ") == 0


@pytest.mark.parametrize("text", ["{", "3", "[3]", '{"client": 0}'])
def test_json_that_is_no_trace(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is no trace of devices"):
        small(devices=str(path))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"devices": "slo:0.1:10"}, "unknown kind of devices 'slo'; did you mean 'slow'"),
        ({"devices": "slow:0.1"}, "should be slow:SHARE:FACTOR"),
        ({"devices": "slow:1:10"}, "the share of slow devices must be less than 1"),
        ({"devices": "lognormal:-1"}, "needs numbers above 0"),
        ({"devices": "missing.csv"}, "'missing.csv' cannot be read: No such file"),
        ({"devices": "uniform", "target": 80}, "between 0 and 1, and 80 % is 0.8"),
        ({"deadline": 5.0}, "deadline needs simulated devices; set devices, such as uniform"),
        ({"devices": "uniform", "over_select": 0.5}, "over_select must be at least 1"),
        ({"devices": "uniform", "deadline": 0.0}, "deadline must be greater than 0"),
    ],
)
def test_wrong_settings_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        small(**options)


def test_infinite_speeds_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"client,speed\n0,{math.inf}\n")
    with pytest.raises(UserError, match="the speed inf; it must be above 0"):
        small(devices=str(path))
