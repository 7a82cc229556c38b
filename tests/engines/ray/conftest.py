"""Real Ray clusters on this machine, of which nothing is left afterwards."""

import pytest

from fedhelix.engines.ray import connection


def disconnect(ray):
    for holder in list(connection.HOLDERS):
        holder.close()
    connection.IDLE.clear()
    ray.shutdown()
    connection._ours.clear()


@pytest.fixture(scope="module")
def ray():
    """Ray; a cluster of this machine's own starts when an engine needs it."""
    ray = pytest.importorskip("ray")
    yield ray
    disconnect(ray)


@pytest.fixture
def cluster(ray):
    """A cluster whose head works on nothing itself."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    disconnect(ray)
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield cluster
    disconnect(ray)
    cluster.shutdown()
