"""The CPU races: fedhelix's parallel engine against pfl, Flower's simulation, BlazeFL and a plain
PyTorch loop.

    python benchmarks/speed/cpu.py --data-dir DIR
    make race DATA=DIR    # fewer rounds, under ten minutes on two idle cores

Linux only. Makes a virtual environment for each peer (once, under --envs), writes partition,
cohorts, batches and initial weights of each workload to files that all contestants read, tries
their settings (threads, processes, oneDNN on and off), and then runs one round of each contestant
in turn. A contestant that is not running is stopped with all its processes (SIGSTOP), so that its
bookkeeping does not disturb the others. One more round measures memory. The plain loop and the
peers as installed run the first rounds only. All of it takes about a quarter of an hour on two
cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from contestant import PEERS, ROOT, Contestant, environment
from measure import machine, spread
from plot import draw_race
from workloads import W1, W2, federation

from fedhelix import Federation, load
from fedhelix.core.method import Phase
from fedhelix.engines.local import ClientTask, batch_schedule
from fedhelix.federation.provenance import versions

WORKLOADS = {"W1": W1, "W2": W2}
MEMORY_ROUNDS = 1
OURS = {"median": 1.0}
# All train the same batches from the same weights, so this is far below the noise between seeds.
EQUAL = 0.01

# Contestants with the settings to try; the fastest goes into the race. Where nothing is tried, it
# is the last one, which was the fastest in most races.
DEFAULT = {"threads": None, "onednn": True, "processes": 1, "cpus_per_client": None}  # as installed
X86 = platform.machine() in ("x86_64", "AMD64")  # oneDNN is made for it, and slower elsewhere
ONEDNN = ({"onednn": not X86}, {"onednn": X86})
CONTESTANTS: dict[str, list[dict[str, Any]]] = {
    "fedhelix": [{}],
    "flower": [{"cpus_per_client": 1, "threads": 1} | kernels for kernels in ONEDNN],
    "pfl": [
        {"processes": processes, "threads": threads} | kernels
        for (processes, threads), kernels in itertools.product([(1, 2), (2, 1)], ONEDNN)
    ],
    "blazefl": [
        {"pool": pool, "parallel": 2, "threads": 1} | kernels
        for pool, kernels in itertools.product(("processes", "threads"), ONEDNN)
    ],
    "plain": [{"threads": 2} | kernels for kernels in ONEDNN],
    "flower-default": [{}],
    "pfl-default": [{}],
}
# The packages of which the version is shown.
VERSIONED = {"fedhelix": "fedhelix", "flower": "flwr", "pfl": "pfl", "blazefl": "blazefl"}
FIRST_ROUNDS_ONLY = ("plain", "flower-default", "pfl-default")


def export(fed: Federation, settings: dict[str, Any], rounds: int, folder: Path) -> None:
    """Write what determines the race, for contestants that cannot import this library."""
    setup = fed.engine.setup
    for name in ("x", "y", "x_test", "y_test"):
        np.save(folder / f"{name}.npy", getattr(setup.data, name).numpy())
    np.savez(folder / "weights.npz", **{name: value.numpy() for name, value in fed.initial.items()})
    orders: dict[str, np.ndarray] = {}
    for t in range(rounds):
        for client in fed.cohort(t):
            schedule = batch_schedule(setup, ClientTask(client, t, {}, {}), Phase(), "batches")
            samples = [batch.numpy() for batch, *_ in schedule.steps()]
            orders[f"{t}-{client}"] = np.concatenate(samples).astype(np.int32)
    np.savez(folder / "orders.npz", **orders)
    facts = {
        **settings,
        "cohorts": [fed.cohort(t) for t in range(rounds)],
        "mean": setup.data.mean,
        "std": setup.data.std,
    }
    (folder / "settings.json").write_text(json.dumps(facts))


Start = Callable[[str, dict[str, Any]], Contestant]


def trials(name: str, start: Start, rounds: int) -> list[dict[str, Any]]:
    """A contestant's settings with their seconds, where there is something to try."""
    tried: list[dict[str, Any]] = []
    for choice in CONTESTANTS[name] if len(CONTESTANTS[name]) > 1 and rounds else []:
        one = start(name, choice)
        try:
            seconds = one.run_rounds(1 + rounds)[1:]
        finally:
            one.stop()
        tried.append({**choice, "seconds": seconds})
        print("trying", name, choice, [round(value, 2) for value in seconds], flush=True)
    return tried


def fastest(name: str, tried: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings with which a contestant runs."""
    best = min(tried, key=lambda trial: min(trial["seconds"]), default=CONTESTANTS[name][-1])
    return {key: value for key, value in best.items() if key != "seconds"}


def compete(workload: str, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One workload: calibration, race, memory."""
    settings, total = WORKLOADS[workload], args.rounds + MEMORY_ROUNDS
    kinds = {name.partition("-")[0] for name in names}
    pythons = {name: environment(name, args.envs) for name in PEERS if name in kinds}
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        place = Path(folder)
        fed = federation(
            load("fashion-mnist", args.data_dir), settings, device="cpu", engine="serial"
        )
        export(fed, settings, total, place)
        del fed
        common = {
            "folder": folder, "rounds": total, "clients": settings["clients"], "workload": settings,
            "data_dir": args.data_dir and str(Path(args.data_dir).absolute()),
        }  # fmt: skip

        def start(name: str, choice: dict[str, Any]) -> Contestant:
            python = pythons.get(name.partition("-")[0], sys.executable)
            return Contestant(name, python, {**common, **DEFAULT, **choice}, place / f"{name}.log")

        tried = {name: trials(name, start, args.calibrate) for name in names}
        chosen = {name: fastest(name, tried[name]) for name in names}
        crowd: list[Contestant] = []
        busy: list[float] = []
        with ExitStack() as ends:  # each is stopped, even where stopping another one fails
            for name in names:
                crowd.append(start(name, chosen[name]))
                ends.callback(crowd[-1].stop)
            for t in range(args.rounds):
                early = t < args.guest_rounds
                on = [one for one in crowd if early or one.name not in FIRST_ROUNDS_ONLY]
                for one in on[t % len(on) :] + on[: t % len(on)]:
                    one.run_rounds()
                busy.append(os.getloadavg()[0])
                times = {one.name: round(one.seconds[-1], 2) for one in on}
                accuracies = {one.name: round(one.accuracy[-1], 4) for one in on}
                print(workload, t + 1, times, accuracies, flush=True)
            seconds = {one.name: list(one.seconds) for one in crowd}
            processor = {one.name: list(one.processor_seconds) for one in crowd}
            accuracy = {one.name: list(one.accuracy) for one in crowd}
            peaks = {one.name: one.peak(MEMORY_ROUNDS) for one in crowd}
    timed = {name: values[args.warm_up :] for name, values in seconds.items()}
    used = {name: values[args.warm_up :] for name, values in processor.items()}
    ratios = ratios_to_ours(timed)
    last = {name: values[-1] for name, values in accuracy.items() if len(values) == args.rounds}
    furthest = max(
        abs(values[-1] - accuracy["fedhelix"][len(values) - 1]) for values in accuracy.values()
    )
    peers = [name for name in PEERS if name in timed]
    rival = min(peers, key=lambda name: statistics.median(timed[name]), default=None)
    result = {
        "settings": settings,
        "rounds": args.rounds,
        "rounds_timed": {name: len(values) for name, values in timed.items()},
        "seconds_per_round": {name: spread(values) for name, values in timed.items()},
        "ratio_to_fedhelix": ratios,
        "processor_seconds_per_round": {name: spread(values) for name, values in used.items()},
        "processor_ratio_to_fedhelix": ratios_to_ours(used),
        "better_peer": rival,
        "ratio_to_better_peer": ratios[rival]["of_medians"] if rival else None,
        "accuracy_after": last,
        "largest_difference_of_accuracy": furthest,
        "accuracy_is_equal": furthest <= EQUAL,
        "load_average": busy,
        "peak_memory_MiB": peaks,
        "chosen": {
            one.name: chosen[one.name] | {k: v for k, v in one.facts.items() if k != "versions"}
            for one in crowd
        },
        "tried": tried,
        "versions": {one.name: one.facts["versions"] for one in crowd},
        "all_seconds": seconds,
        "all_accuracies": accuracy,
    }
    rounded = {name: round(value["of_medians"], 2) for name, value in ratios.items()}
    equal = "equal" if furthest <= EQUAL else "NOT EQUAL"
    mebibytes = {name: round(value["pss"]) for name, value in peaks.items()}
    print(workload, rounded, "accuracy", last, equal, "MiB", mebibytes, flush=True)
    return result


def ratios_to_ours(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How many times as much as fedhelix each of the others needed, round by round."""
    ours = values["fedhelix"]
    return {
        name: spread([theirs / mine for theirs, mine in zip(its, ours, strict=False)])
        | {"of_medians": statistics.median(its) / statistics.median(ours)}
        for name, its in values.items()
        if name != "fedhelix"
    }


def rows(report: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    """What a workload measured: a row for each contestant, with the commit and the device."""
    race, place = report[workload], report["machine"]
    return [
        {
            "workload": workload,
            "contestant": name,
            "version": race["versions"][name].get(VERSIONED.get(name.partition("-")[0], "torch")),
            "seconds_per_round": seconds["median"],
            "relative_to_fedhelix": race["ratio_to_fedhelix"].get(name, OURS)["median"],
            "processor_seconds_per_round": race["processor_seconds_per_round"][name]["median"],
            "processor_relative_to_fedhelix": race["processor_ratio_to_fedhelix"].get(name, OURS)[
                "median"
            ],
            "commit": report["versions"].get("commit"),
            "device": f"{place['cores']} cores of {place['processor']}",
        }
        for name, seconds in race["seconds_per_round"].items()
    ]


def command(arguments: list[str]) -> str:
    """The command line, without the names of this machine's folders."""
    places = {"--data-dir", "--envs", "--out"}
    shown = [
        "DIR" if before in places else word for before, word in itertools.pairwise(["", *arguments])
    ]
    return shlex.join(["python", "benchmarks/speed/cpu.py", *shown])


def main() -> None:
    """Run the races, write the numbers and the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with fashion_mnist.npz")
    parser.add_argument(
        "--envs", type=Path, default=ROOT / ".peers", help="where the peers' environments live"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/race.json")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="first rounds that are not timed")
    parser.add_argument(
        "--guest-rounds", type=int, default=5, help="first rounds, which all contestants run"
    )
    parser.add_argument(
        "--calibrate",
        type=int,
        default=1,
        help="rounds that each setting is tried for, after one; 0: the usually fastest, untried",
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    args = parser.parse_args()
    if (
        not 0 <= args.warm_up < min(args.rounds, args.guest_rounds)
        or not 0 <= args.calibrate < args.rounds
    ):
        parser.error(
            "--rounds and --guest-rounds must be more than --warm-up, and --calibrate at least 0"
        )
    if "fedhelix" not in args.contestants:
        parser.error("fedhelix takes part")
    # Exit through `finally`, so that no stopped process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    report = {"command": command(sys.argv[1:]), "machine": machine(), "versions": versions()}
    if os.getloadavg()[0] > 0.5:
        print("the machine is busy: the numbers will not be reliable", flush=True)
    report["rows"] = []
    for workload in args.workloads:
        report[workload] = compete(workload, args.contestants, args)
        report["rows"] += rows(report, workload)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    draw_race(report, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
