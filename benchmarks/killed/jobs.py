"""Commands that are killed at a moment or at a file operation, continued and compared to the bit.

Jobs are forked from a process that has imported everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedhelix.cli import app
from fedhelix.papers import STUDIES, Cell, Study
from fedhelix.papers.measures import percent
from fedhelix.runs.spec import make_spec
from in_process import InProcessDeployment

SMALL = {"clients": 4, "rounds": 4, "epochs": 1, "batch_size": 256, "kernels": "onednn"}
SMALL |= {"model": "mlp", "train_samples": 200, "test_samples": 60, "engine": "serial"}
FLAGS = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", value)]
AGAIN = 0.2  # the share of continued jobs that are killed once more
ATTEMPTS = 5
EARLIER = (1.0, 0.5, 0.25, 0.1)  # of a job's time: the next one if the kill came too late
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir"}
UNEQUAL = ("seconds", "wire")  # fields of records that no two runs have in common

SWEEP = """\
methods = ["scaffold"]
[settings]
{settings}
[grid]
lr = [0.05, 0.1]
"""
STUDIES["kills"] = Study(
    "kills",
    "two small runs",
    lambda _: [Cell(name, "digits", name, SMALL) for name in ("fedavg", "fedper")],
    {"accuracy": percent("personal_accuracy")},
)


def command(*words: object) -> None:
    """The command line, in this process."""
    sys.argv = ["fedhelix", *map(str, words)]
    app.main()


def run(folder: Path) -> None:
    begun = (folder / "config.toml").exists()
    command("resume", folder, "-q") if begun else command(
        "run", "scaffold", *FLAGS, "--out", folder, "-q"
    )


def compare(folder: Path) -> None:
    begun = (folder / "comparison.toml").exists()
    command("resume", folder, "-q") if begun else command(
        "compare", "fedavg", "fedper", *FLAGS, "--out", folder, "-q"
    )


def sweep(folder: Path) -> None:
    file = folder.parent / "sweep.toml"
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in SMALL.items())
    file.write_text(SWEEP.format(settings=settings))
    command("sweep", file, "--out", folder, "-q")


def bench(folder: Path) -> None:
    command("bench", "kills", "--out", folder, "--device", "cpu", "-q")


def deployment(folder: Path) -> None:
    """A server and three sites in one process, which is killed as a whole."""
    settings = {key: value for key, value in SMALL.items() if key != "engine"}
    spec = make_spec("fedper", settings | {"clients": 3})
    deployed = InProcessDeployment(folder, 3)
    out = folder / "run"
    begun = (out / "config.toml").exists()
    deployed.federation(spec).fit(
        4, out=out, resume=begun, config=spec.as_dict(), quiet=True
    ).federation.close()


JOBS: dict[str, Callable[[Path], None]] = {
    "run": run,
    "compare": compare,
    "sweep": sweep,
    "bench": bench,
    "deployment": deployment,
}


class Right(NamedTuple):
    """What a job does when it is left alone."""

    result: dict[str, str]
    seconds: float
    operations: int  # on files in its folder


class Kill(NamedTuple):
    """One job to be killed: at a file operation, or at a random moment."""

    job: str
    seed: int
    operation: int | None


class Outcome(NamedTuple):
    """What came of it in a word, and how often the job was killed."""

    what: str
    kills: int


def watch_files(folder: Path, act: Callable[[int], None]) -> None:
    """Call a function with the number of every file operation in a folder, before it happens."""
    count = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event in WRITES or (event == "open" and isinstance(args[2], int) and args[2] & 3)
        if writes and str(args[0]).startswith(str(folder)):
            count += 1
            act(count)

    sys.addaudithook(look)


def fork(job: str, folder: Path, act: Callable[[int], None] | None = None) -> int:
    """Start a job in a process of its own, which calls `act` at its file operations."""
    if child := os.fork():
        return child
    code = 1
    try:
        silent = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if act is not None:
            watch_files(folder, act)
        JOBS[job](folder)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int) -> int:
    """How a job has ended: its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(operation: int) -> Callable[[int], None]:
    return lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == operation else None


def killed(job: str, folder: Path, seconds: float, draw: random.Random) -> int:
    """Start a job and kill it within its time; how it has ended."""
    child = fork(job, folder)
    time.sleep(draw.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    return ended(child)


def result(folder: Path) -> dict[str, str]:
    """What a job has written, without seconds, as a checksum for each run folder's part."""
    found = {}
    for config in sorted(folder.rglob("config.toml")):
        place, lines = config.parent, []
        for line in (place / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            lines.append({k: v for k, v in record.items() if k not in UNEQUAL})
        manifest = json.loads((place / "checkpoint" / "manifest.json").read_text())
        states = {"server": manifest["server"], **manifest["clients"]}
        sums = {owner: entry["sha256"] for owner, entry in states.items()}
        text = json.dumps([lines, sums, manifest["round"]], sort_keys=True)
        found[str(place.relative_to(folder))] = hashlib.sha256(text.encode()).hexdigest()
    return found


def leftovers(folder: Path) -> list[str]:
    names = [path.name for path in folder.rglob(".*")]
    return names + [path.name for path in folder.rglob("lock")]


def left_alone(job: str) -> Right:
    """A job that is not killed."""
    with tempfile.TemporaryDirectory() as place:
        folder, counted = Path(place).resolve() / "job", Path(place).resolve() / "count"
        started = time.monotonic()
        child = fork(job, folder, lambda count: counted.write_text(str(count)))
        assert ended(child) == 0, (folder.parent / "log").read_text()
        seconds = time.monotonic() - started
        assert result(folder), job
        return Right(result(folder), seconds, int(counted.read_text()))


def trial(kill: Kill, right: Right) -> Outcome:
    """Kill a job once or several times, and continue it."""
    draw, kills, code = random.Random(kill.seed), 0, 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "job"
        if kill.operation is not None:
            code = ended(fork(kill.job, folder, die_at(kill.operation)))
        for share in EARLIER if kill.operation is None else ():
            shutil.rmtree(folder, ignore_errors=True)
            if (code := killed(kill.job, folder, share * right.seconds, draw)) < 0:
                break
        kills += code == -signal.SIGKILL
        for _ in range(ATTEMPTS):
            again = draw.random() < AGAIN
            code = (
                killed(kill.job, folder, right.seconds, draw)
                if again
                else ended(fork(kill.job, folder))
            )
            kills += code == -signal.SIGKILL
            if code >= 0:
                break
        return Outcome(_judged(folder, code, right), kills)


def _judged(folder: Path, code: int, right: Right) -> str:
    if code != 0:
        words = (folder.parent / "log").read_text().strip().splitlines()
        return f"failed: {words[-1] if words else code}"
    if result(folder) != right.result:
        return "differs"
    left = leftovers(folder)
    return f"leaves {left[0]}" if left else "equal"
