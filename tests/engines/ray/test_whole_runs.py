"""Comparisons, sweeps and benches whose runs go to actors in one piece."""

import json
import threading
import time
from pathlib import Path

import pytest

from fedhelix.federation.state import FederationState
from fedhelix.runs.comparison import compare
from fedhelix.runs.config import Config
from fedhelix.runs.jobs import Session, _spread_groups
from fedhelix.runs.remote import RoundResult
from helpers import agree, on_disk

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.xdist_group("ray"),  # one cluster at a time
]

QUICK = {
    "rounds": 3,
    "clients": 4,
    "cohort": 3,
    "model": "linear",
    "epochs": 1,
    "kernels": "onednn",
}
MORTAL = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from fedhelix import FedAvg, option, register

@register("mortal")
@dataclass(frozen=True)
class Mortal(FedAvg):
    "Kills its process so many times in the second round."
    folder: str = option("", "where it marks its attempts")
    deaths: int = option(0, "how often", low=0)

    def upload(self, local):
        attempts = len(list(Path(self.folder).iterdir())) if self.deaths else 0
        if local.client.round == 1 and attempts < self.deaths:
            (Path(self.folder) / str(attempts)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().upload(local)
"""
SLOW = """
import time
from dataclasses import dataclass
from pathlib import Path
from fedhelix import FedAvg, option, register

@register("slow")
@dataclass(frozen=True)
class Slow(FedAvg):
    "Takes its time, and says on which node."
    folder: str = option("", "where it says so")

    def upload(self, local):
        if self.folder:
            import ray
            (Path(self.folder) / ray.get_runtime_context().get_node_id()).touch()
            time.sleep(0.3)
        return super().upload(local)
"""


def compared(methods, out, **more):
    quiet = Session(quiet=True)
    return compare(methods, QUICK | more, 2, out, quiet)


def assert_equal(left, right):
    """Whether the runs of two comparisons are, whatever their methods are called."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert agree(on_disk(one.path), on_disk(other.path))


def test_only_several_runs_on_one_cluster_are_spread():
    def config(engine, address=None):
        return Config(engine=engine, address=address)

    configs = {
        Path("a"): config("ray"),
        Path("b"): config("serial"),
        Path("c"): config("ray"),
        Path("d"): config("ray", "far:1"),
    }
    assert _spread_groups(configs) == [[Path("a"), Path("c")]]


def test_progress_is_what_has_changed():
    there = FederationState(2, {"w": 2}, {0: {"a": 1}, 1: {"a": 2}}, {1}, 5, 7.5)
    progress = RoundResult.of({"round": 2}, there)
    assert progress.client_states == {1: {"a": 2}} and not there.changed
    here = progress.after(FederationState(1, {"w": 1}, {0: {"a": 1}, 1: {"a": 0}}, {0}))
    assert (here.round, here.server, here.setup_bytes) == (2, {"w": 2}, 5)
    assert here.client_states == there.client_states and here.changed == {0, 1}
    assert here.timing() == there.timing() == {"clock": 7.5, "pending": {}}


@pytest.mark.timeout(400)
def test_runs_on_actors_end_as_they_do_here(ray, tmp_path):
    methods = ["helix", "gene-fl", "fedper@newcomers=1,newcomers_after=1"]
    methods += ["fedbuff@devices=slow:0.5:10,cohort=2"]
    spread = compared(methods, tmp_path / "ray", engine="ray", workers=2, model="mlp")
    straight = compared(methods, tmp_path / "serial", engine="serial", model="mlp")
    assert_equal(spread, straight)
    for folder in spread:
        assert folder.summary["engine"] == "ray (the whole run on one actor)"
        assert folder.rounds_saved == 3


@pytest.mark.timeout(400)
def test_a_lost_actor_costs_a_run_no_round(ray, cli, tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "marks").mkdir()
    file, marks = tmp_path / "mortal.py", tmp_path / "marks"
    clock = "devices=slow:0.5:10,deadline=1e-9,late=keep"
    plain = compared([f"{file}@{clock}", f"{file}@lr=0.2"], tmp_path / "a", engine="serial")
    mortal = [f"{file}@{clock},deaths=2,folder={marks}", f"{file}@lr=0.2"]
    spread = compared(mortal, tmp_path / "b", engine="ray", workers=2)
    assert len(list(marks.iterdir())) == 2
    assert_equal(spread, plain)
    words = ("--rounds", 3, "--engine", "ray", "--workers", 2, "--model", "linear")
    done = cli("compare", f"{file}@deaths=99,folder={marks}", "fedavg", *words, "--out", "c")
    assert done.code == 1 and "died again and again in round 2" in " ".join(done.err.split())


@pytest.mark.timeout(400)
def test_a_killed_node_costs_a_sweep_no_round(cluster, cli, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "seen").mkdir()
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in QUICK.items())
    for name, more in {"ray": f'"slow.folder" = "{tmp_path / "seen"}"', "serial": ""}.items():
        text = f'methods = ["slow.py"]\nseeds = 2\n[settings]\n{settings}\n{more}\n'
        (tmp_path / f"{name}.toml").write_text(text + "[grid]\nlr = [0.1, 0.2]\n")
    cluster.add_node(num_cpus=1)
    second = cluster.add_node(num_cpus=1)

    def kill_when_busy():
        until = time.monotonic() + 120
        while len(list((tmp_path / "seen").iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    where = ("--engine", "ray", "--address", cluster.address)
    done = cli("sweep", "ray.toml", *where, "--out", "spread", "--json")
    killer.join()
    assert done.code == 0, done.err
    assert cli("sweep", "serial.toml", "--engine", "serial", "--out", "serial").code == 0
    runs = sorted(path.parent.name for path in Path("serial").glob("*/summary.json"))
    assert len(runs) == 4
    for run in runs:
        [other] = Path("spread").glob(f"{run}*")
        assert agree(on_disk(Path("serial") / run), on_disk(other))


@pytest.mark.timeout(400)
def test_runs_stop_when_the_time_is_up_and_go_on_elsewhere(ray, tmp_path):
    out, methods = tmp_path / "a", ["fedavg", "fedprox"]
    values, session = QUICK | {"rounds": 60, "checkpoint_every": 20}, Session(quiet=True)

    def rounds():
        return [len(on_disk(path.parent)) for path in out.glob("*/metrics.jsonl")]

    def stop_early():
        until = time.monotonic() + 120
        while max(rounds(), default=0) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        session.ends = time.monotonic()

    stopper = threading.Thread(target=stop_early)
    stopper.start()
    compare(methods, values | {"engine": "ray", "workers": 2}, 1, out, session)
    stopper.join()
    assert 3 <= max(rounds()) < 60 and not list(out.glob("*/lock"))
    here = values | {"engine": "serial"}
    straight = compare(methods, here, 1, tmp_path / "b", Session(quiet=True))
    assert_equal(compare(methods, here, 1, out, Session(quiet=True)), straight)
