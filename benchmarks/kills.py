"""Runs, comparisons, sweeps and deployments that are killed, resumed and compared to the bit.

    python benchmarks/kills.py [--kills 100] [--minutes N] [--out FILE.json]

Half of the kills come at a random moment, half at the n-th file operation in the run's folder, with
n counted up from one. Each job is then continued (and sometimes killed again) until it is done; its
records, but for seconds, and its checkpoints must equal those of a job that was left alone, and no
temporary file may be left. Jobs are forked from one process that has imported everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from fedhelix.cli import app
from fedhelix.runs.provenance import versions
from fedhelix.runs.spec import make_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from in_process import InProcessDeployment

SMALL = {"clients": 4, "rounds": 4, "epochs": 1, "batch_size": 256, "kernels": "onednn"}
SMALL |= {"model": "mlp", "train_samples": 200, "test_samples": 60, "engine": "serial"}
FLAGS = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", value)]
AGAIN = 0.2  # the share of continued jobs that are killed once more
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir"}

SWEEP = """\
methods = ["fedavg", "scaffold"]
[settings]
{settings}
[grid]
lr = [0.05, 0.1]
"""


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
    "deployment": deployment,
}


def stop_at(count: int, folder: Path) -> None:
    """Kill this process at its n-th file operation in a folder."""
    left = count

    def look(event: str, args: tuple) -> None:
        nonlocal left
        writes = event in WRITES or (event == "open" and isinstance(args[2], int) and args[2] & 3)
        if writes and str(args[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def fork(job: str, folder: Path, at: int | None = None) -> int:
    """Start a job in a process of its own; with `at` it dies at that file operation."""
    if child := os.fork():
        return child
    code = 1
    try:
        silent = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if at is not None:
            stop_at(at, folder)
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


def result(folder: Path) -> dict[str, str]:
    """What a job has written, without seconds, as a checksum for each run folder's part."""
    found = {}
    for config in sorted(folder.rglob("config.toml")):
        place, lines = config.parent, []
        for line in (place / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            lines.append({k: v for k, v in record.items() if k not in ("seconds", "wire")})
        manifest = json.loads((place / "checkpoint" / "manifest.json").read_text())
        states = {"server": manifest["server"], **manifest["clients"]}
        sums = {owner: entry["sha256"] for owner, entry in states.items()}
        text = json.dumps([lines, sums, manifest["round"]], sort_keys=True)
        found[str(place.relative_to(folder))] = hashlib.sha256(text.encode()).hexdigest()
    return found


def leftovers(folder: Path) -> list[str]:
    names = [path.name for path in folder.rglob(".*")]
    return names + [path.name for path in folder.rglob("lock")]


def trial(job: str, seconds: float, at: int | None, draw: random.Random, right: dict) -> str:
    """Kill a job once or several times, and continue it; what came of it in a word."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "job"
        child = fork(job, folder, at)
        if at is None:
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        code = ended(child)
        if at is not None and code == 0:
            return "over"  # the job has fewer file operations
        for _ in range(5):
            child = fork(job, folder)
            if draw.random() < AGAIN:
                time.sleep(draw.uniform(0, seconds))
                os.kill(child, signal.SIGKILL)
            code = ended(child)
            if code >= 0:
                break
        if code != 0:
            words = (folder.parent / "log").read_text().strip().splitlines()
            return f"failed: {words[-1] if words else code}"
        if result(folder) != right:
            return "differs"
        left = leftovers(folder)
        return f"leaves {left[0]}" if left else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, help="FILE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun, draw = time.monotonic(), random.Random(0)
    right, seconds, operation = {}, {}, dict.fromkeys(JOBS, 0)
    for job in JOBS:
        place = Path(tempfile.mkdtemp()).resolve()
        started = time.monotonic()
        assert ended(fork(job, place / "job")) == 0, (place / "log").read_text()
        seconds[job], right[job] = time.monotonic() - started, result(place / "job")
        assert right[job]
        shutil.rmtree(place)
    outcomes = {job: Counter[str]() for job in JOBS}
    done = 0
    while done < arguments.kills and time.monotonic() - begun < 60 * arguments.minutes:
        job = list(JOBS)[done % len(JOBS)]
        at = None
        if done // len(JOBS) % 2:
            operation[job] += 1
            at = operation[job]
        outcome = trial(job, seconds[job], at, draw, right[job])
        if outcome == "over":
            operation[job] = 0
            continue
        outcomes[job][outcome] += 1
        done += 1
        if outcome != "equal":
            print(job, at, outcome, flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
        "command": f"python benchmarks/kills.py {' '.join(sys.argv[1:])}",
        "commit": commit,
        "machine": platform.machine(),
        "versions": versions(),
        "kills": done,
        "outcomes": {job: dict(counts) for job, counts in outcomes.items()},
        "last_file_operation": operation,
        "wall_seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(report["outcomes"]))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
