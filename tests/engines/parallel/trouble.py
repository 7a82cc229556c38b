"""Functions and a method that fail in the process that runs them; workers import them from here."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fedhelix import FedAvg
from fedhelix.core.errors import UserError
from fedhelix.core.options import option


@dataclass(frozen=True)
class Deadly(FedAvg):
    """FedAvg whose clients kill their process: client 1 once, client 2 at every attempt."""

    folder: str = option("", "where a client marks its attempts")

    def upload(self, local):
        marker = Path(self.folder) / str(local.client.id)
        if local.client.id == 2 or (local.client.id == 1 and not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().upload(local)


class Misfit(FedAvg):
    """FedAvg that sends a tensor of another shape than the network's."""

    name = "misfit"

    def download(self, server, client, ctx):
        return {"model": {"fc.bias": server["model"]["fc.bias"][:3]}}


def refuse(setup):
    raise UserError("a sentence.")


def stumble(setup):
    raise KeyError("a bug")


def happy(setup):
    return "well"
