"""Flower's simulation as a contestant of the CPU race; `cpu.py` starts it inside Flower's
environment.

Message API, `flwr.simulation.run_simulation` on Ray. The strategy is Flower's FedAvg; only the
sampling is replaced by the cohorts of the workload, so that all contestants train the same clients.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import Any

import torch
from common import RaceClient, apply, workload
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()
settings: dict[str, Any] = json.loads(os.environ.get("FLOWER_PEER", "null") or "null") or {}
nets: list[torch.nn.Module] = []  # one per worker process


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A client's round."""
    work = workload(settings["folder"])
    if not nets:
        apply(settings)
        nets.append(work.network())
    net, t, client = (
        nets[0],
        message.content["config"]["server-round"] - 1,
        context.node_config["partition-id"],
    )
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(net, t, client)
    count = MetricRecord({"num-examples": work.samples(t, client)})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": count}), reply_to=message
    )


@client_app.query()
def who(message: Message, context: Context) -> Message:
    """The number of a node's client."""
    return Message(
        RecordDict({"who": ConfigRecord({"id": context.node_config["partition-id"]})}),
        reply_to=message,
    )


class FixedCohorts(FedAvg):
    """FedAvg with given cohorts."""

    def __init__(self, race: RaceClient, nodes: dict[int, int]):
        super().__init__(fraction_evaluate=0.0)
        self.race, self.nodes = race, nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        """FedAvg's messages for the given cohort."""
        self.race.begin_round()
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        chosen = [
            self.nodes[client] for client in workload(settings["folder"]).cohorts[server_round - 1]
        ]
        return self._construct_messages(record, chosen, MessageType.TRAIN)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Ask every node for its client number, then run the rounds."""
    apply({**settings, "threads": None})  # the evaluation may use all cores
    work = workload(settings["folder"])
    nodes: dict[int, int] = {}
    while len(nodes) < settings["clients"]:  # nodes appear while the simulation starts
        missing = [node for node in grid.get_node_ids() if node not in nodes.values()]
        queries = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in missing
        ]
        for reply in grid.send_and_receive(queries):
            nodes[reply.content["who"]["id"]] = reply.metadata.src_node_id
    net = work.network()
    race = RaceClient(
        versions={
            name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch", "numpy")
        }
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracy = work.accuracy(net)
        if server_round:
            race.end_round(accuracy)
        return MetricRecord({"accuracy": accuracy})

    FixedCohorts(race, nodes).start(
        grid, ArrayRecord(net.state_dict()), settings["rounds"], evaluate_fn=evaluate
    )


def main() -> None:
    """Start the simulation, with one CPU per client or with Flower's default."""
    config = None
    if settings["cpus_per_client"] is not None:
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - or they run at low priority
        config = {"client_resources": {"num_cpus": settings["cpus_per_client"], "num_gpus": 0.0}}
    run_simulation(server_app, client_app, settings["clients"], backend_config=config)


if __name__ == "__main__":
    os.environ |= {
        "FLOWER_PEER": sys.argv[1],
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # Imported by name, so that Ray's workers import it once instead of unpickling it for every
    # client.
    import flower_peer

    flower_peer.main()
