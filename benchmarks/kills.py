"""Runs, comparisons, sweeps, benches and deployments that are killed and compared to the bit.

    python benchmarks/kills.py [--kills 100] [--workers 1] [--minutes N] [--out FILE.json]

Commands are forked; most of their first kills come at a file operation in the job's folder, every
one of them in turn, the others at a random moment. Each job is then continued (and sometimes killed
again at a random moment) until it is done; its
records, but for seconds, and its checkpoints must equal those of a job that was left alone, and no
temporary file may be left. One kill in ten concerns a deployment of real processes, of which the
server app, the SuperLink, a site, its worker or the network dies, several times in one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from killed import jobs
from killed.jobs import JOBS, Kill, Outcome, Right
from measured import origin, write

HERE = Path(__file__).parent
END_SECONDS = 300.0  # that a run of a deployment may take after its last kill
REAL = "processes"  # a deployment of real ones
REAL_KILLS = 5  # in one run
REAL_SHARE = 0.1  # of all kills
REAL_WORKERS = 2 / 3  # at most
MOMENTS = 10  # one kill of so many comes at a random moment
LAST_SECONDS = 150.0  # before the time is up, in which no new run of a deployment begins


class Session(NamedTuple):
    """A deployment of real processes, and how often it is hit."""

    kills: int
    seed: int
    seconds: float


def prepare() -> None:
    """A worker imports what commands need, so that what it forks begins at once."""
    torch.set_num_threads(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    with tempfile.TemporaryDirectory() as place, suppress(SystemExit):
        jobs.run(Path(place) / "job")


def session(wanted: Session) -> dict[str, Any]:
    """A run of a deployment of real processes whose parts are killed."""
    place = Path(tempfile.mkdtemp(prefix="fedhelix-kills-")).resolve()
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    command = [sys.executable, "-m", "killed.deployments", str(place)]
    options = {"--kills": wanted.kills, "--seed": wanted.seed, "--seconds": wanted.seconds}
    try:
        done = subprocess.run(
            [*command, *(str(word) for pair in options.items() for word in pair)],
            capture_output=True,
            text=True,
            check=False,
            timeout=wanted.seconds + END_SECONDS,
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(programs(place / "bin"))]),
                "OMP_NUM_THREADS": "1",
            },
        )
    except subprocess.TimeoutExpired:
        return {"killed": [], "failed": "the run does not end"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"killed": [], "failed": lines[-1] if lines else done.returncode}
    shutil.rmtree(place, ignore_errors=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def programs(folder: Path) -> Path:
    """A folder with Flower's programs, in case that only its packages are installed."""
    folder.mkdir()
    for entry in entry_points(group="console_scripts"):
        if entry.name.startswith(("flower-", "flwr")):
            text = f"#!{sys.executable}\nimport sys\nfrom {entry.module} import {entry.attr}\n"
            path = folder / entry.name
            path.write_text(f"{text}sys.exit({entry.attr}())\n")
            path.chmod(0o755)
    return folder


def judged(found: dict[str, Any], calm: dict[str, Any]) -> str:
    """What came of a session, in a word, or where it differs and who was missing."""
    if "failed" in found:
        return f"failed: {found['failed']}"
    parts = {**calm["result"], **found["result"]}
    if odd := [name for name in parts if found["result"].get(name) != calm["result"].get(name)]:
        return f"differs in {', '.join(odd)}; missing: {found['missing']}"
    return f"leaves {found['leftovers'][0]}" if found["leftovers"] else "equal"


def planned(right: dict[str, Right]) -> Iterator[Kill]:
    """Every file operation of every job, in any order, and now and then a random moment."""
    everything = [(job, n + 1) for job, alone in right.items() for n in range(alone.operations)]
    random.Random(0).shuffle(everything)
    for number, (job, operation) in enumerate(itertools.cycle(everything)):
        yield Kill(job, number, operation if number % MOMENTS else None)


class Tally:
    """What came of all kills so far."""

    def __init__(self, right: dict[str, Right]):
        self.right = right
        self.kills = Counter[str]()
        self.outcomes = {name: Counter[str]() for name in (*right, REAL)}
        self.parts = Counter[str]()  # of deployments of real processes
        self.operations: dict[str, set[int]] = {name: set() for name in right}
        self.begun = time.monotonic()

    def add(self, job: str, outcome: Outcome) -> None:
        self.kills[job] += outcome.kills
        self.outcomes[job][outcome.what] += 1
        if outcome.what != "equal":
            print(job, outcome.what, flush=True)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kills": self.kills.total(),
            "kills_by_job": dict(self.kills),
            "killed_processes": dict(self.parts),
            "outcomes": {job: dict(counts) for job, counts in self.outcomes.items()},
            "file_operations": {job: alone.operations for job, alone in self.right.items()},
            "killed_at": {job: len(known) for job, known in self.operations.items()},
            "wall_seconds": round(time.monotonic() - self.begun, 1),
        }


class Plan:
    """Which task comes next: as many real kills as their share, as long as there is time."""

    def __init__(self, right: dict[str, Right], arguments: argparse.Namespace, until: float):
        self.commands, self.until = planned(right), until
        self.real = int(REAL_SHARE * arguments.kills)
        self.left = arguments.kills - self.real
        self.right = right
        self.most = max(1, int(REAL_WORKERS * arguments.workers))

    def task(
        self, pool: ProcessPoolExecutor, running: Collection[Kill | str]
    ) -> tuple[Kill | str, Future[Any]] | None:
        """The next task, if there is one, given those that are running."""
        now = time.monotonic()
        room = self.left <= 0 or list(running).count(REAL) < self.most
        if self.real > 0 and room and now < self.until - LAST_SECONDS:
            count = min(REAL_KILLS, self.real)
            self.real -= count
            seconds = min(self.until - now, 600.0)
            return REAL, pool.submit(session, Session(count, self.real, seconds))
        if self.left > 0 and now < self.until:
            self.left -= 1
            kill = next(self.commands)
            return kill, pool.submit(jobs.trial, kill, self.right[kill.job])
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, help="FILE.json, written as results come")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the order of sums
    until = time.monotonic() + 60 * arguments.minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, spawn, prepare) as pool:
        alone = pool.submit(session, Session(0, 0, 0.0))
        right = dict(zip(JOBS, pool.map(jobs.left_alone, JOBS), strict=True))
        calm = alone.result()
        assert "failed" not in calm, calm
        tally, plan = Tally(right), Plan(right, arguments, until)
        tasks: dict[Future[Any], Kill | str] = {}
        while True:
            while len(tasks) < arguments.workers and (task := plan.task(pool, tasks.values())):
                tasks[task[1]] = task[0]
            if not tasks:
                break
            for done in wait(tasks, return_when=FIRST_COMPLETED).done:
                kill, found = tasks.pop(done), done.result()
                if isinstance(kill, Kill):
                    plan.left += 1 - found.kills  # one that came too late is made up for
                    tally.operations[kill.job] |= {kill.operation} - {None}
                    tally.add(kill.job, found)
                else:
                    tally.parts.update(found["killed"])
                    tally.add(REAL, Outcome(judged(found, calm), len(found["killed"])))
                write(arguments.out, {**origin(), **tally.as_dict()})
    print(json.dumps(tally.as_dict()), flush=True)


if __name__ == "__main__":
    main()
