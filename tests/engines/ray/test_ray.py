"""Runs on real Ray clusters, all of them on this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedhelix import METHODS, FedAvg
from fedhelix.core.errors import EngineFailure
from fedhelix.core.means import means_by_group
from fedhelix.core.options import option
from helpers import NETWORKS, agree, cheap, small

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.xdist_group("ray"),  # one cluster at a time
]


@pytest.fixture(scope="module", autouse=True)
def _methods_travel(ray):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Mortal(FedAvg):
    """FedAvg whose client 1 kills its process so many times."""

    folder: str = option("", "where a client marks its attempts")
    deaths: int = option(1, "how often", low=0)

    def upload(self, local):
        attempts = len(list(Path(self.folder).iterdir()))
        if local.client.id == 1 and attempts < self.deaths:
            (Path(self.folder) / str(attempts)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().upload(local)


@dataclass(frozen=True)
class Slow(FedAvg):
    """FedAvg whose clients take their time, and say on which node."""

    folder: str = option("", "where a client says so")

    def upload(self, local):
        import ray

        if ray.is_initialized():
            (Path(self.folder) / ray.get_runtime_context().get_node_id()).touch()
            time.sleep(0.4)
        return super().upload(local)


PRESSED = """
import os, signal, sys
import ray._raylet
from fedhelix.cli.app import main

signal.signal(signal.SIGINT, signal.default_int_handler)
made = ray._raylet.CoreWorker

def press(*args, **more):
    worker = made(*args, **more)
    os.kill(os.getpid(), signal.SIGINT)
    return worker

ray._raylet.CoreWorker = press
sys.argv = ["fedhelix", "run", "fedavg", "--engine", "ray", "--workers", "1", "--out", sys.argv[1]]
main()
"""


def test_ctrl_c_while_ray_begins_ends_as_usual(tmp_path):
    command = [sys.executable, "-c", PRESSED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "stopped; nothing was written yet.\n"


def records(fed, rounds=2):
    return [record for record, _ in fed.run_rounds(rounds)]


def assert_equal_to_serial(method, actors, model="mlp"):
    fed = small(method, model, engine="ray", workers=actors, cohort=6)
    assert agree(records(fed), records(small(method, model, cohort=6)))
    assert len(fed.engine._cluster.members) <= actors


def test_ray_ends_as_serial_does():
    for method in ("fedavg", "scaffold", "helix"):
        assert_equal_to_serial(method, actors=2)


@pytest.mark.timeout(400)
def test_the_number_of_actors_does_not_matter():
    for actors in (4, 1):
        for method in ("fedavg", "genfed", "compact+scaffold"):
            assert_equal_to_serial(method, actors)


def test_means_are_scored_as_serial_does_it():
    serial, fed = small(), small(engine="ray", workers=2)
    states = [{name: value * k for name, value in serial.initial.items()} for k in (1, 2, -1)]
    means = means_by_group(states, [1, 2, 3])([(0, 1), (1,), (0, 2), (0, 1, 2), (2,)])
    for models in (means, list(means), means[:1]):
        found = fed.engine.score(models, "test")
        assert found == [pytest.approx(one) for one in serial.engine.score(list(models), "test")]
    fed.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_equal_on_ray(name):
    assert_equal_to_serial(cheap(name), 2, NETWORKS.get(name, "mlp"))


@pytest.mark.timeout(300)
def test_a_killed_actor_costs_no_round(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    fed = small(Mortal(folder=str(tmp_path / "a")), engine="ray", workers=2, cohort=6)
    assert agree(records(fed), records(small(cohort=6)))
    assert list((tmp_path / "a").iterdir())
    fed = small(Mortal(folder=str(tmp_path / "b"), deaths=99), engine="ray", workers=2, cohort=6)
    with pytest.raises(EngineFailure, match="died again and again with client 1"):
        records(fed)


@pytest.mark.timeout(400)
def test_a_killed_node_costs_no_round_and_nodes_come_and_go(cluster, tmp_path):
    first = cluster.add_node(num_cpus=1)
    second = cluster.add_node(num_cpus=1)
    fed = small(Slow(folder=str(tmp_path)), engine="ray", address=cluster.address, cohort=6)

    def kill_when_busy():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    rounds = fed.run_rounds(100)
    states = [next(rounds) for _ in range(2)]
    killer.join()
    expected = records(small(cohort=6), 2)
    assert agree([record for record, _ in states], expected)
    third = cluster.add_node(num_cpus=1)
    until = time.monotonic() + 60
    while len(nodes := {member.node for member in fed.engine._cluster.members}) < 2:
        assert time.monotonic() < until
        time.sleep(1.1)
        next(rounds)
    assert len(nodes) == 2
    for node in (first, third):
        cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(EngineFailure, match="can be resumed"):
        fed.engine.run_clients(fed.tasks(states[-1][1], range(6), fed.context(2, 100)))


@pytest.mark.timeout(300)
def test_nodes_with_other_versions_are_refused(cluster, tmp_path, cli):
    fake = tmp_path / "site" / "fedhelix-9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: fedhelix\nVersion: 9.9\n")
    path = os.pathsep.join([str(fake.parent), os.environ.get("PYTHONPATH", "")])
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    run = ("run", "fedavg", "--engine", "ray", "--address", cluster.address, "--rounds", 1)
    done = cli(*run)
    words = " ".join(done.err.split())
    assert done.code == 2 and "has fedhelix 9.9, and this machine" in words, done
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    fed = small(engine="ray", address=cluster.address)
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
    with pytest.warns(UserWarning, match="a node is left out: the Ray node .* has fedhelix 9.9"):
        records(fed)
    assert len(fed.engine._cluster.members) == 1


def test_an_address_without_ray_is_refused_soon(cli, ray):
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))
        for place, words in {
            f"127.0.0.1:{silent.getsockname()[1]}": "no Ray answers at",
            f"127.0.0.1:{closed.getsockname()[1]}": "no Ray answers at",
            "127.0.0.1:99999": "no Ray answers at",
            "nowhere": "an address is HOST:PORT or auto",
            "ray://127.0.0.1:10001": "not ray://",
        }.items():
            began = time.monotonic()
            done = cli("run", "fedavg", "--engine", "ray", "--address", place, "--rounds", 1)
            assert done.code == 2 and words in " ".join(done.err.split()), done
            assert "Traceback" not in done.err
            assert time.monotonic() - began < 60, "Ray itself would try for minutes"


SCRIPT = """
import os, signal, sys
from fedhelix import Federation
Federation(clients=4, model="linear", engine="ray", workers=1).fit(1, quiet=True)
import ray
print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", ["done", "killed"])
def test_no_process_is_left_behind(end, ray):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, end], stdout=subprocess.PIPE, text=True, check=False
    )
    [session] = done.stdout.split()
    until = time.monotonic() + 60
    while left := processes_with(Path(session).name):
        assert time.monotonic() < until, left
        time.sleep(0.5)


def processes_with(word):
    """The command lines, in which there is a word, of the processes of this machine."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if word in line else []
    return found
