"""What clients' devices are like: how fast they train and send, and when they are available."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.method import Method
from fedhelix.core.options import Checked, convert, option
from fedhelix.core.seeds import numpy_draw

DAY = 86_400.0  # seconds, after which the hours of availability repeat
FILES = (".csv", ".json")
RATES = ("speed", "upload", "download")
COLUMNS = ("client", *RATES, "available")
# The numbers in the text of each distribution.
KINDS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "lognormal": ("SIGMA",),
    "slow": ("SHARE", "FACTOR"),
}
NEED_DEVICES = ("deadline", "over_select", "availability", "late", "target")


def check_level(what: str, level: float | None, metric: str) -> None:
    """Refuse a level of the accuracy that nobody can reach."""
    if level is not None and level > 1 and metric == "accuracy":
        raise UserError(
            f"{what} = {level:g} is never reached: an accuracy lies between 0 and 1, and "
            f"{level:g} % is {level / 100:g}."
        )


@dataclass(frozen=True)
class Devices(Checked):
    """Devices that differ, and how long the server waits for them, in simulated seconds."""

    devices: str | None = option(
        None,
        "simulate the time of devices: uniform, lognormal:SIGMA, slow:SHARE:FACTOR, or a trace in "
        "FILE.csv or FILE.json (auto: no clock)",
    )
    device_speed: float = option(
        100.0, "samples that a usual device trains on in a second", above=0, needs="devices"
    )
    device_upload: float = option(
        125_000.0, "bytes that a usual device sends per second", above=0, needs="devices"
    )
    device_download: float = option(
        1_250_000.0, "bytes that a usual device receives per second", above=0, needs="devices"
    )
    availability: float = option(
        1.0, "share of each day in which a device is available", above=0, high=1
    )
    deadline: float | None = option(
        None, "simulated seconds after which a round ends (auto: it waits)", above=0
    )
    late: Literal["drop", "keep"] = option(
        "drop",
        "work that is not done when the round ends is lost, or counts once it arrives",
        needs=("deadline", "over_select"),
    )
    over_select: float = option(
        1.0, "start so many times the cohort; the round ends with the first cohort", low=1, high=100
    )
    target: float | None = option(
        None, "accuracy (or score) whose simulated time the summary gives (none: no such time)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices is not None:
            parse(self.devices)
            return
        for name in NEED_DEVICES:
            if getattr(self, name) != getattr(Devices, name):
                raise UserError(f"{name} needs simulated devices; set devices, such as uniform.")

    def places(self, cohort: int) -> int:
        """How many clients are at work at once."""
        return math.ceil(self.over_select * cohort)


class Device(NamedTuple):
    """One client's device; without windows it is always available."""

    speed: float  # samples per second
    upload: float  # bytes per second
    download: float
    windows: tuple[tuple[float, float], ...] = ()  # in order, in seconds since the period began
    period: float = DAY

    def seconds(self, received: int, samples: int, sent: int) -> float:
        """How long a round takes it: bytes in, training, bytes out."""
        return received / self.download + samples / self.speed + sent / self.upload

    def next_available(self, now: float) -> float:
        """When it is available again, which may be now."""
        if not self.windows:
            return now
        began, since = now - now % self.period, now % self.period
        for start, end in self.windows:
            if since < end:
                return max(now, began + start)
        return began + self.period + self.windows[0][0]

    def finish(self, start: float, seconds: float) -> float:
        """When work of that many seconds is done, if it rests while the device is not available."""
        if not self.windows:
            return start + seconds
        daily = sum(end - begin for begin, end in self.windows)
        whole = max(0, math.ceil(seconds / daily) - 1)  # periods that the work fills
        left, since = seconds - whole * daily, start % self.period
        began = start - since + whole * self.period
        while True:
            for begin, end in self.windows:
                here = end - max(since, begin)
                if 0 < left <= here:
                    return began + max(since, begin) + left
                left -= max(here, 0.0)
            began, since = began + self.period, 0.0


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """The devices of a federation's clients; each is a function of the seed and its number."""

    settings: Devices
    clients: int
    seed: int

    def __post_init__(self) -> None:
        for client in range(self.clients):  # a trace may lack one
            self.device(client)

    @cached_property
    def _kind(self) -> tuple[str, tuple[float, ...]]:
        return parse(self.settings.devices or "uniform")

    @cached_property
    def _trace(self) -> dict[int, Device]:
        return read_trace(Path(self._kind[0]), self.settings)

    @cached_property
    def _slow(self) -> frozenset[int]:
        """The slow clients: exactly their share, but at least one."""
        count = max(1, round(self._kind[1][0] * self.clients))
        draw = numpy_draw(self.seed, "slow devices")
        return frozenset(draw.choice(self.clients, count, replace=False).tolist())

    @cache  # noqa: B019 - there is one for each federation
    def device(self, client: int) -> Device:
        """The device of one client."""
        kind, numbers = self._kind
        if kind not in KINDS:
            if client not in self._trace:
                raise UserError(f"'{kind}' has no device for client {client}; add a line for it.")
            return self._trace[client]
        usual = [getattr(self.settings, f"device_{name}") for name in RATES]
        factors = [1.0, 1.0, 1.0]
        if kind == "lognormal":
            draw = numpy_draw(self.seed, "device", client)
            factors = draw.lognormal(0.0, numbers[0], len(RATES)).tolist()
        elif kind == "slow" and client in self._slow:
            factors = [1 / numbers[1]] * len(RATES)
        speed, upload, download = (
            rate * factor for rate, factor in zip(usual, factors, strict=True)
        )
        return Device(speed, upload, download, self._windows(client))

    def _windows(self, client: int) -> tuple[tuple[float, float], ...]:
        """The same hours of every day, which begin at a random one."""
        if self.settings.availability == 1:
            return ()
        start = float(numpy_draw(self.seed, "availability", client).random()) * DAY
        end = start + self.settings.availability * DAY
        return ((start, end),) if end <= DAY else ((0.0, end - DAY), (start, DAY))


def devices_for(settings: Devices, method: Method, clients: int, seed: int) -> DeviceModel | None:
    """The devices of all clients; None without a clock, which an asynchronous method always has."""
    capabilities = method.capabilities
    if settings.devices is None and capabilities.buffer is None:
        return None
    if capabilities.buffer is not None and capabilities.packed_downloads:
        raise UserError(
            f"{method.label} cannot read where updates began: what its clients receive is packed."
        )
    if capabilities.masks is not None and settings.late == "keep":
        raise UserError("masks cancel within a round only; run secure with late = drop.")
    return DeviceModel(settings, clients, seed)


def parse(text: str) -> tuple[str, tuple[float, ...]]:
    """The name of a distribution and its numbers, or the path of a trace."""
    if text.endswith(FILES):
        return text, ()
    kind, *parts = text.strip().split(":")
    if kind not in KINDS:
        raise unknown("kind of devices", kind, [*KINDS, *(f"FILE{end}" for end in FILES)])
    names = KINDS[kind]
    if len(parts) != len(names):
        raise UserError(f"devices '{text}' should be {':'.join([kind, *names])}.")
    numbers = tuple(
        convert(f"{name} of devices {kind}", part, float)
        for name, part in zip(names, parts, strict=True)
    )
    if not all(0 < number < math.inf for number in numbers):
        raise UserError(f"devices '{text}' needs numbers above 0.")
    if kind == "slow" and not numbers[0] < 1:
        raise UserError(f"devices '{text}': the share of slow devices must be less than 1.")
    return kind, numbers


def read_trace(path: Path, usual: Devices) -> dict[int, Device]:
    """The devices in a file, by client: a line or an object for each.

    Only `client` and `speed` are needed; other rates are the usual ones where they are missing.
    """
    devices: dict[int, Device] = {}
    rows = _rows(path)
    windows = [_windows(path, row) for row in rows]
    days = max((math.ceil(pairs[-1][1] / DAY) for pairs in windows if pairs), default=1)
    for row, pairs in zip(rows, windows, strict=True):
        client = _number(path, row, "client")
        if not client.is_integer() or client < 0 or int(client) in devices:
            raise UserError(f"'{path}' names client {row['client']!r}, which is no new number.")
        given = {"upload": usual.device_upload, "download": usual.device_download, **row}
        rates = [_number(path, given, name) for name in RATES]
        for name, rate in zip(RATES, rates, strict=True):
            if not 0 < rate < math.inf:
                raise UserError(
                    f"'{path}' gives client {client:.0f} the {name} {rate:g}; it must be above 0."
                )
        speed, upload, download = rates
        devices[int(client)] = Device(speed, upload, download, pairs, days * DAY)
    return devices


def _rows(path: Path) -> list[dict[str, Any]]:
    """One table per device, without empty entries."""
    try:
        text = path.read_text(encoding="utf-8")
        found = (
            json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.split("\n")))
        )
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None
    except (ValueError, csv.Error) as problem:
        raise UserError(f"'{path}' is no trace of devices: {problem}.") from None
    if not isinstance(found, list) or not all(isinstance(row, Mapping) for row in found):
        raise UserError(f"'{path}' is no trace of devices: it must hold one object per client.")
    for name in (str(name) for row in found for name in row if name not in COLUMNS):
        raise unknown(f"column of '{path}'", name, COLUMNS)
    return [{key: value for key, value in row.items() if value not in (None, "")} for row in found]


def _number(path: Path, row: Mapping[str, Any], name: str) -> float:
    if name not in row:
        raise UserError(f"'{path}' lacks the {name} of a device; each needs client and speed.")
    return float(convert(f"{name} in '{path}'", row[name], float))


def _windows(path: Path, row: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """When a device is available: pairs of seconds, in text as `0-3600 7200-9000`."""
    given = row.get("available", ())
    try:
        pairs: Sequence[Any] = (
            [part.split("-") for part in given.split()] if isinstance(given, str) else given
        )
        windows = tuple((float(start), float(end)) for start, end in pairs)
    except (TypeError, ValueError):
        windows = ((1.0, 0.0),)
    times = [time for window in windows for time in window]
    rising = all(before < after for before, after in itertools.pairwise(times))
    if not rising or not all(0 <= time < math.inf for time in times):
        raise UserError(
            f"'{path}' says that client {row.get('client')} is available at {given!r}; "
            "it must be rising seconds, such as 0-3600 7200-9000."
        )
    return windows
