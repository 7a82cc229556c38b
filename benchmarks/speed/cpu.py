"""The CPU races: fedhelix's parallel engine against Flower's simulation, pfl and a plain PyTorch
loop.

    python benchmarks/speed/cpu.py --data-dir DIR

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
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from measure import family, machine, peak_memory, spread
from plot import draw_race
from workloads import W1, W2, federation

from fedhelix import Federation, load
from fedhelix.core.method import Phase
from fedhelix.engines.local import ClientTask, batch_schedule
from fedhelix.runs.provenance import versions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKLOADS = {"W1": W1, "W2": W2}
MEMORY_ROUNDS = 1
# All train the same batches from the same weights, so this is far below the noise between seeds.
EQUAL = 0.01

# Contestants with the settings to try; the fastest goes into the race. Where there is one only,
# nothing is tried.
DEFAULT = {"threads": None, "onednn": True, "processes": 1, "cpus_per_client": None}  # as installed
ONEDNN = ({"onednn": True}, {"onednn": False})
CONTESTANTS: dict[str, list[dict[str, Any]]] = {
    "fedhelix": [{}],
    "flower": [{"cpus_per_client": 1, "threads": 1} | kernels for kernels in ONEDNN],
    "pfl": [
        {"processes": processes, "threads": threads} | kernels
        for (processes, threads), kernels in itertools.product([(1, 2), (2, 1)], ONEDNN)
    ],
    "plain": [{"threads": 2} | kernels for kernels in ONEDNN],
    "flower-default": [{}],
    "pfl-default": [{}],
}
FIRST_ROUNDS_ONLY = ("plain", "flower-default", "pfl-default")


def environment(name: str, envs: Path) -> str:
    """The Python of a peer's virtual environment, made if need be."""
    python, needs = envs / name / "bin" / "python", HERE / "peers" / f"{name}.txt"
    done = envs / name / "installed.txt"
    if not done.exists() or done.read_text() != needs.read_text():
        print(f"installing {name} under {envs}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(envs / name)], check=True)
        (envs / ".gitignore").write_text("*\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "-r", str(needs)], check=True)
        done.write_text(needs.read_text())
    return str(python.absolute())


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
            samples = [batch.numpy() for batch, _ in schedule.steps()]
            orders[f"{t}-{client}"] = np.concatenate(samples).astype(np.int32)
    np.savez(folder / "orders.npz", **orders)
    facts = {
        **settings,
        "cohorts": [fed.cohort(t) for t in range(rounds)],
        "mean": setup.data.mean,
        "std": setup.data.std,
    }
    (folder / "settings.json").write_text(json.dumps(facts))


class Contestant:
    """A process that runs rounds on request, and is stopped otherwise."""

    def __init__(self, name: str, python: str, settings: dict[str, Any], log: Path):
        kind = name.partition("-")[0]
        script = (
            HERE / "peers" / {"flower": "flower_peer.py", "pfl": "pfl_peer.py"}.get(kind, "own.py")
        )
        self.name, self.settings, self.log = name, settings, log
        self.seconds: list[float] = []
        self.accuracy: list[float] = []
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [python, str(script), json.dumps({**settings, "contestant": kind})],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                cwd=log.parent,
            )
        try:
            self.facts = self.listen()
        except BaseException:
            self.stop()
            raise
        self.signal(signal.SIGSTOP)

    def listen(self) -> Any:
        """The next message."""
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        for pid in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def run_rounds(self, rounds: int = 1) -> list[float]:
        """Some rounds; returns their seconds."""
        self.signal(signal.SIGCONT)
        time.sleep(0.3)  # to wake up
        print(rounds, file=self.process.stdin, flush=True)
        seconds, accuracy = zip(*self.listen(), strict=True)
        self.signal(signal.SIGSTOP)
        self.seconds += seconds
        self.accuracy += accuracy
        return list(seconds)

    def peak(self, rounds: int) -> dict[str, float]:
        """The most memory seen during some more rounds."""
        with peak_memory(self.process.pid) as most:
            self.run_rounds(rounds)
        return most

    def stop(self) -> None:
        """End it, by closing its input or, after a while, by a kill."""
        processes = family(self.process.pid)
        self.signal(signal.SIGCONT)
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for pid in processes:
            with suppress(OSError):
                # The folder shows that the number still belongs to the same process.
                if Path(f"/proc/{pid}/cwd").readlink() == self.log.parent:
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def compete(workload: str, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One workload: calibration, race, memory."""
    settings, total = WORKLOADS[workload], args.rounds + MEMORY_ROUNDS
    pythons = {name: environment(name, args.envs) for name in ("flower", "pfl")}
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

        chosen: dict[str, dict[str, Any]] = {}
        tried: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            choices, tried[name] = CONTESTANTS[name], []
            for choice in choices if len(choices) > 1 else []:
                one = start(name, choice)
                try:
                    seconds = one.run_rounds(1 + args.calibrate)[1:]
                finally:
                    one.stop()
                tried[name].append({**choice, "seconds": seconds})
                print(
                    workload,
                    "trying",
                    name,
                    choice,
                    [round(value, 2) for value in seconds],
                    flush=True,
                )
            best = min(tried[name], key=lambda trial: min(trial["seconds"]), default={})
            chosen[name] = {key: value for key, value in best.items() if key != "seconds"}
        crowd: list[Contestant] = []
        try:
            crowd.extend(start(name, chosen[name]) for name in names)
            for t in range(args.rounds):
                early = t < args.guest_rounds
                on = [one for one in crowd if early or one.name not in FIRST_ROUNDS_ONLY]
                for one in on[t % len(on) :] + on[: t % len(on)]:
                    one.run_rounds()
                times = {one.name: round(one.seconds[-1], 2) for one in on}
                accuracies = {one.name: round(one.accuracy[-1], 4) for one in on}
                print(workload, t + 1, times, accuracies, flush=True)
            seconds = {one.name: list(one.seconds) for one in crowd}
            accuracy = {one.name: list(one.accuracy) for one in crowd}
            peaks = {one.name: one.peak(MEMORY_ROUNDS) for one in crowd}
        finally:
            for one in crowd:
                one.stop()
    timed = {name: values[args.warm_up :] for name, values in seconds.items()}
    ratios = {
        name: spread(
            [theirs / ours for theirs, ours in zip(values, timed["fedhelix"], strict=False)]
        )
        | {"of_medians": statistics.median(values) / statistics.median(timed["fedhelix"])}
        for name, values in timed.items()
        if name != "fedhelix"
    }
    last = {name: values[-1] for name, values in accuracy.items() if len(values) == args.rounds}
    furthest = max(
        abs(values[-1] - accuracy["fedhelix"][len(values) - 1]) for values in accuracy.values()
    )
    peers = [name for name in ("flower", "pfl") if name in timed]
    rival = min(peers, key=lambda name: statistics.median(timed[name]), default=None)
    result = {
        "settings": settings,
        "rounds": args.rounds,
        "rounds_timed": {name: len(values) for name, values in timed.items()},
        "seconds_per_round": {name: spread(values) for name, values in timed.items()},
        "ratio_to_fedhelix": ratios,
        "better_peer": rival,
        "ratio_to_better_peer": ratios[rival]["of_medians"] if rival else None,
        "accuracy_after": last,
        "largest_difference_of_accuracy": furthest,
        "accuracy_is_equal": furthest <= EQUAL,
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
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/speed-cpu.json")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="first rounds that are not timed")
    parser.add_argument(
        "--guest-rounds", type=int, default=5, help="first rounds, which all contestants run"
    )
    parser.add_argument(
        "--calibrate", type=int, default=1, help="rounds that each setting is tried for, after one"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    args = parser.parse_args()
    if (
        not 0 <= args.warm_up < min(args.rounds, args.guest_rounds)
        or not 1 <= args.calibrate < args.rounds
    ):
        parser.error(
            "--rounds and --guest-rounds must be more than --warm-up, and --calibrate at least 1"
        )
    if "fedhelix" not in args.contestants:
        parser.error("fedhelix takes part")
    # Exit through `finally`, so that no stopped process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    report = {"command": command(sys.argv[1:]), "machine": machine(), "versions": versions()}
    if os.getloadavg()[0] > 0.5:
        print("the machine is busy: the numbers will not be reliable", flush=True)
    for workload in args.workloads:
        report[workload] = compete(workload, args.contestants, args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    draw_race(report, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
