"""A contestant of the CPU race: its environment, and a process that runs rounds on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure import family, peak_memory, processor_seconds

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = ("flower", "pfl", "blazefl")
# BlazeFL asks for Python 3.12, but its version 2 runs on 3.11 as well; version 3 needs 3.14.
PIP_FLAGS = {"blazefl": ["--ignore-requires-python"]}


def environment(name: str, envs: Path) -> str:
    """The Python of a peer's virtual environment, made if need be."""
    python, needs = envs / name / "bin" / "python", HERE / "peers" / f"{name}.txt"
    done = envs / name / "installed.txt"
    if not done.exists() or done.read_text() != needs.read_text():
        print(f"installing {name} under {envs}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(envs / name)], check=True)
        (envs / ".gitignore").write_text("*\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["-c", str(ROOT / "constraints.txt"), *PIP_FLAGS.get(name, [])]
        subprocess.run([*pip, "-r", str(needs)], check=True)
        done.write_text(needs.read_text())
    return str(python.absolute())


class Contestant:
    """A process that runs rounds on request, and is stopped otherwise."""

    def __init__(self, name: str, python: str, settings: dict[str, Any], log: Path):
        kind = name.partition("-")[0]
        script = HERE / "peers" / (f"{kind}_peer.py" if kind in PEERS else "own.py")
        self.name, self.settings, self.log = name, settings, log
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
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
        before = processor_seconds(family(self.process.pid))
        print(rounds, file=self.process.stdin, flush=True)
        seconds, accuracy = zip(*self.listen(), strict=True)
        used = processor_seconds(family(self.process.pid)) - before
        self.processor_seconds += [used / rounds] * rounds
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
