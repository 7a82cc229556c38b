"""BlazeFL's simulation as a contestant of the CPU race; `cpu.py` starts it inside BlazeFL's
environment.

Its pool of threads or of processes (with shared memory) trains the clients, and its FedAvg averages
their parameters. Only the sampling is replaced by the cohorts of the workload, so that all
contestants train the same clients.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from blazefl.contrib.fedavg import FedAvgBaseServerHandler
from blazefl.core import (
    IPCMode,
    ProcessPoolClientTrainer,
    SHMHandle,
    ThreadPoolClientTrainer,
    deserialize_model,
    serialize_model,
)
from common import RaceClient, apply, workload

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
own = threading.local()  # a network for each thread of each process


@dataclass
class Download:
    """What the server sends."""

    parameters: torch.Tensor
    round: int


@dataclass
class Upload:
    """What a client sends."""

    parameters: torch.Tensor | SHMHandle
    samples: int


def train(client: int, payload: Download) -> Upload:
    """A client's round."""
    work = workload(SETTINGS["folder"])
    if not hasattr(own, "net"):
        apply(SETTINGS)
        own.net = work.network()
    deserialize_model(own.net, payload.parameters)
    work.train(own.net, payload.round, client)
    return Upload(serialize_model(own.net), work.samples(payload.round, client))


class Threads(ThreadPoolClientTrainer[Upload, Download]):
    """Clients on threads."""

    def __init__(self) -> None:
        self.num_parallels, self.device = SETTINGS["parallel"], "cpu"
        self.cache: list[Upload] = []
        self.stop_event = threading.Event()

    def worker(
        self, cid: int, device: str, payload: Download, stop_event: threading.Event
    ) -> Upload:
        """A client's round."""
        return train(cid, payload)


class Processes(ProcessPoolClientTrainer[Upload, Download, int]):
    """Clients in processes that are forked for a round, with their uploads in shared memory."""

    def __init__(self) -> None:
        self.num_parallels, self.device = SETTINGS["parallel"], "cpu"
        self.cache: list[Upload] = []
        self.ipc_mode = IPCMode.SHARED_MEMORY
        self.stop_event = mp.Manager().Event()
        self.empty = serialize_model(workload(SETTINGS["folder"]).network())

    def get_client_config(self, cid: int) -> int:
        """A client is its number."""
        return cid

    def prepare_uplink_package_buffer(self) -> Upload:
        """Room for an upload."""
        return Upload(self.empty.clone(), 0)

    @staticmethod
    def worker(
        config: int,
        payload: Download,
        device: str,
        stop_event: threading.Event,
        *,
        shm_buffer: Upload,
    ) -> Upload:
        """A client's round."""
        upload = train(config, payload)
        shm_buffer.parameters.copy_(upload.parameters)
        upload.parameters = SHMHandle()
        return upload


def main() -> None:
    """Run the rounds."""
    forked = SETTINGS["pool"] == "processes"
    # Threads of OpenMP would not survive a fork; otherwise the evaluation may use all cores.
    apply({**SETTINGS, "threads": 1 if forked else None})
    work = workload(SETTINGS["folder"])
    net, trainer = work.network(), Processes() if forked else Threads()
    names = ("blazefl", "torch", "numpy")
    race = RaceClient(versions={name: importlib.metadata.version(name) for name in names})
    for t in range(SETTINGS["rounds"]):
        race.begin_round()
        trainer.local_process(Download(serialize_model(net), t), work.cohorts[t])
        uploads, trainer.cache = trainer.cache, []
        mean = FedAvgBaseServerHandler.aggregate(
            [upload.parameters for upload in uploads], [upload.samples for upload in uploads]
        )
        deserialize_model(net, mean)
        race.end_round(work.accuracy(net))


if __name__ == "__main__":
    mp.set_start_method("fork")
    main()
