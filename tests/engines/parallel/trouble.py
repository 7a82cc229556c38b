"""What makes trouble in the process that runs it; worker processes import it from here."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fedhelix import FedAvg
from fedhelix.core.errors import UserError
from fedhelix.core.options import option


@dataclass(frozen=True)
class Deadly(FedAvg):
    """FedAvg whose clients kill their process: client 1 at its first try, client 2 at every try."""

    folder: str = option("", "where a client notes its tries")

    def upload(self, local):
        note = Path(self.folder) / str(local.client.id)
        if local.client.id == 2 or (local.client.id == 1 and not note.exists()):
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().upload(local)


def refuse(setup):
    raise UserError("a sentence.")


def stumble(setup):
    raise KeyError("a bug")
