"""What secure aggregation costs in a round: processor time of a client and the server, and bytes.

    python benchmarks/masking.py [--values 100000] [--out benchmarks/results/masking.json]

All clients run in this process, one after the other. A tenth of them drops out after sharing keys,
which is the dearest moment for the server: it removes their masks from everybody else's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "speed"))
from measure import machine

from fedhelix.components.masking import MaskingClient, Unmasking
from fedhelix.components.secure_sum import protocol_bytes
from fedhelix.federation.provenance import versions

CASES = [(10, None), (50, None), (50, 20), (100, None), (100, 20)]
ROUND, THRESHOLD = "round", 2 / 3


class Clock:
    """Processor seconds by stage, of all clients together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        """Do some work on the clock."""
        begun = time.process_time()
        done = work()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - begun
        return done


def one_round(number: int, degree: int | None, values: int) -> dict[str, Any]:
    """A round of so many clients; the sum is checked."""
    clock, gone = Clock(), set(range(number // 10))
    clients = {i: MaskingClient(i, ROUND, THRESHOLD, degree) for i in range(number)}
    words = np.arange(values, dtype=np.uint32)
    keys = {i: clock("keys", client.advertise) for i, client in clients.items()}
    shares = {i: clock("shares", lambda i=i: clients[i].share(keys)) for i in clients}
    received = {i: {j: sent[i] for j, sent in shares.items() if i in sent} for i in clients}
    uploads = {
        i: clock("upload", lambda i=i: clients[i].upload(words, received[i]))
        for i in clients
        if i not in gone
    }
    revealed = {i: clock("reveal", lambda i=i: clients[i].reveal(uploads)) for i in uploads}
    whole = Unmasking(ROUND, THRESHOLD, degree, keys, list(shares))
    total = clock("server", lambda: whole.total(uploads, revealed))
    assert np.array_equal(total, words * np.uint32(len(uploads)))
    server = clock.seconds.pop("server")
    return {
        "clients": number,
        "neighbours": degree or number - 1,
        "client_seconds": sum(clock.seconds.values()) / number,
        "stages": {stage: seconds / number for stage, seconds in clock.seconds.items()},
        "server_seconds": server,
        "protocol_bytes_per_client": protocol_bytes(number, degree, len(uploads)) / number,
        "upload_bytes": 4 * values,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/masking.json"))
    args = parser.parse_args()
    report = {
        "command": f"python benchmarks/masking.py --values {args.values}",
        "machine": machine(),
        "versions": versions(),
        "rows": [one_round(*case, args.values) for case in CASES],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
