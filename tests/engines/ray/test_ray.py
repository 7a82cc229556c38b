"""Runs on real Ray clusters, all of them on this machine."""

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedhelix import FedAvg
from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.options import option
from fedhelix.engines.ray import connection
from helpers import small, timeless

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    disconnect()


def disconnect():
    for holder in list(connection.HOLDERS):
        holder.close()
    connection.IDLE.clear()
    ray.shutdown()
    connection._ours.clear()


@pytest.fixture
def cluster():
    """A cluster whose head works on nothing itself."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    disconnect()
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield cluster
    disconnect()
    cluster.shutdown()


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
        if ray.is_initialized():
            (Path(self.folder) / ray.get_runtime_context().get_node_id()).touch()
            time.sleep(0.4)
        return super().upload(local)


def records(fed, rounds=2):
    return timeless([record for record, _ in fed.run_rounds(rounds)])


def close_to(left, right):
    """Whether the records of two runs are equal up to rounding."""
    keys = ("train_loss", "loss", "accuracy", "personal_accuracy", "valid_accuracy", "personal")
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys() and one["participants"] == other["participants"]
        assert one["uplink_bytes"] == other["uplink_bytes"]
        for key in keys:
            if key in other and other[key] is not None:
                assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5, nan_ok=True)


@pytest.mark.timeout(400)
def test_ray_ends_as_serial_does_with_any_number_of_actors():
    for actors in (4, 2, 1):
        for method in ("fedavg", "scaffold", "helix", "gene-fl"):
            fed = small(method, "mlp", engine="ray", workers=actors, cohort=6)
            close_to(records(fed), records(small(method, "mlp", cohort=6)))
            assert len(fed.engine._cluster.members) <= actors
            personal = fed.engine.personal([])
            assert personal == [] and fed.engine.name == "ray"


@pytest.mark.timeout(300)
def test_a_killed_actor_costs_no_round(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    fed = small(Mortal(folder=str(tmp_path / "a")), engine="ray", workers=2, cohort=6)
    close_to(records(fed), records(small(cohort=6)))
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
    close_to(timeless([record for record, _ in states]), expected)
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


@pytest.mark.timeout(200)
def test_nodes_with_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(connection, "versions", lambda: {"fedhelix": "9.9", "torch": "1.0"})
    with pytest.raises(UserError, match=r"the Ray node .* has .*, and this machine"):
        small(engine="ray")


def test_an_address_without_ray_is_refused_soon(cli):
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
            assert "Traceback" not in done.err and time.monotonic() - began < 10
