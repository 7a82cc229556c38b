import json
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from fedhelix.core.errors import UserError
from fedhelix.runs.apart import _end
from fedhelix.runs.jobs import Session, is_finished
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

SETTINGS = {
    "data": "digits", "partition": "iid", "clients": 4, "cohort": 2, "model": "mlp", "epochs": 1,
}  # fmt: skip


def specs(folder, seeds: int, rounds: int = 2, **more):
    settings = {**SETTINGS, "rounds": rounds, **more}
    return {
        folder / f"seed{seed}": make_spec("fedavg", {**settings, "seed": seed})
        for seed in range(seeds)
    }


def accuracies(path) -> list[float]:
    return [record["accuracy"] for record in RunFolder.open(path).records()]


def test_runs_apart_are_the_same_runs(tmp_path):
    apart, in_turn = specs(tmp_path / "apart", 3), specs(tmp_path / "in-turn", 3)
    assert Session(quiet=True, jobs=2).run_all(apart)
    assert Session(quiet=True).run_all(in_turn)
    assert list(map(accuracies, apart)) == list(map(accuracies, in_turn))


OWN = """
from dataclasses import dataclass
from fedhelix import FedAvg, register

@register("slow-ball")
@dataclass(frozen=True)
class SlowBall(FedAvg):
    beta: float = 0.9
"""


def test_a_method_of_a_file_runs_apart(tmp_path):
    (tmp_path / "ball.py").write_text(OWN)
    values = {**SETTINGS, "rounds": 1, "method.beta": 0.5}
    runs = {
        tmp_path / f"seed{seed}": make_spec(f"{tmp_path}/ball.py", {**values, "seed": seed})
        for seed in range(2)
    }
    assert Session(quiet=True, jobs=2).run_all(runs)
    for path in runs:
        assert RunFolder.open(path).config["method"]["beta"] == 0.5


def test_time_that_is_up_stops_after_a_round_and_goes_on_later(tmp_path):
    runs = specs(tmp_path, 2, rounds=400)
    assert not Session.limited(1e-3, True, 2).run_all(runs)
    begun = [RunFolder.open(path).rounds_saved for path in runs if path.exists()]
    assert begun and all(0 < count < 400 for count in begun)


def test_a_failure_ends_all_and_says_why(tmp_path):
    runs = specs(tmp_path, 3, rounds=200)
    (tmp_path / "seed0").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="seed0"):
        Session(quiet=True, jobs=2).run_all(runs)
    assert not any(map(is_finished, list(runs)[1:]))


def test_bad_numbers_of_jobs():
    for jobs in (0, -1, 100_000):
        with pytest.raises(UserError, match="jobs must lie between 1 and 1000"):
            Session.limited(None, True, jobs)


def start(tmp_path):
    """A sweep of two long runs at once in a process of its own, with at least a round done."""
    (tmp_path / "a.toml").write_text(
        'methods = ["fedavg"]\nseeds = 2\n[settings]\nrounds = 5000\nclients = 4\nmodel = "mlp"\n'
    )
    command = [sys.executable, "-m", "fedhelix", "sweep", "a.toml", "--jobs", "2", "-o", "out"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    )
    end = time.monotonic() + 90
    while len(list(tmp_path.glob("out/*/metrics.jsonl"))) < 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    return process


def workers(process) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


def gone(pids, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_ctrl_c_keeps_all_rounds_and_a_kill_leaves_nobody_behind(tmp_path):
    process = start(tmp_path)
    pids = workers(process)
    assert len(pids) >= 2
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in words
    assert gone(pids)
    kept = {path: len(path.read_text().splitlines()) for path in tmp_path.glob("out/*/*.jsonl")}
    again = start(tmp_path)
    pids = workers(again)
    again.kill()
    again.communicate()
    assert gone(pids)
    for path, count in kept.items():
        lines = path.read_text().splitlines()
        assert len(lines) >= count and json.loads(lines[count - 1])["round"] == count


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_ctrl_c_pressed_twice_ends_too(tmp_path):
    process = start(tmp_path)
    pids = workers(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and gone(pids)


def test_a_second_ctrl_c_kills_the_runs_and_nobody_else():
    class Interrupted:
        def shutdown(self, cancel_futures):
            raise KeyboardInterrupt

    context = get_context("spawn")
    mine, other = (context.Process(target=time.sleep, args=(60,)) for _ in range(2))
    mine.start()
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _end(Interrupted(), [other])
        mine.join(10)
        assert mine.exitcode == -signal.SIGKILL and other.is_alive()
    finally:
        mine.kill()
        other.kill()
