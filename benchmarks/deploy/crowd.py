"""Several sites in one process, each with its own connection and key, which may send bad answers.

    python crowd.py FOLDER ADDRESS HARM SITE [SITE ...]

The fault matrix starts it instead of `fedhelix site` where a site has to misbehave, or where there
are many.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedhelix.core.seeds import numpy_draw
from fedhelix.deploy import messages
from fedhelix.deploy.node import connect
from fedhelix.deploy.site import Site

LONG = 50.0  # seconds: more than the deadline of the row


def spoilt(content: bytes, spoil: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """An answer whose tensors are changed."""
    header, body = messages.read(content)
    model = {name: spoil(value) for name, value in body["model"].items()}
    return messages.write(header, {"model": model})


def third(site: str, round: int, of: int = 10) -> bool:
    """Whether a site is among the 30 % that are missing in a round."""
    missing = numpy_draw(0, "missing", round).choice(of, round_half_up(0.3 * of), replace=False)
    return int(site.rpartition("-")[2]) in missing


def round_half_up(value: float) -> int:
    return int(value + 0.5)


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda answer: answer,
    "nan": lambda answer: spoilt(answer, lambda value: torch.full_like(value, float("nan"))),
    "shapes": lambda answer: spoilt(answer, lambda value: value[..., None]),
    "huge": lambda answer: spoilt(answer, lambda value: value.repeat(11, *[1] * (value.dim() - 1))),
    "garbage": lambda answer: b"\x80\x04\x95garbage" * 100,  # how a pickle begins
}


class FaultySite:
    """A site that is honest in round 1, and in its answers to all requests but training."""

    def __init__(self, site: Site, harm: str):
        self.site, self.harm = site, harm

    def start(self) -> None:
        """Nothing to prepare."""

    def answer(self, content: bytes) -> bytes:
        header = messages.read(content).header
        training = header["kind"] == "train"
        if self.harm == "missing" and training and third(self.site.name, header["round"]):
            time.sleep(LONG)
        honest = self.site.answer(content)
        if self.harm in HARMS and training and header["round"] > 0:
            return HARMS[self.harm](honest)
        return honest


def main(folder: str, address: str, harm: str, *names: str) -> None:
    torch.set_num_threads(1)
    keys = Path(folder) / "keys"
    for name in names:
        site = Site(name, "digits", Path(folder) / "sites")
        node_file = Path(folder) / "sites" / f"{name}.node"
        handler = FaultySite(site, harm)
        arguments = (address, keys / "ca.pem", keys / f"{name}.key", handler, node_file)
        connected = threading.Event()
        threading.Thread(target=connect, args=(*arguments, connected), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
