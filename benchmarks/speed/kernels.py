"""The compiled kernels against PyTorch's, and many tiny clients on `parallel` against `serial`.

    python benchmarks/speed/kernels.py --out benchmarks/results/speed-kernels.json

Contestants take turns, and ratios are medians over the turns. A training step of `bn-cnn` (batches
of 32x32 colour images) runs in one thread and is measured in processor time, so that the machine
need not be idle. Rounds of tiny clients (one step on eight samples each) are measured in wall time,
for which it should be: `load` is the system's load average at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import machine, spread

from fedhelix import Federation, from_arrays, models, partition
from fedhelix.engines.kernels import Kernels, applied
from fedhelix.federation.provenance import versions

KERNELS: tuple[Kernels, ...] = ("onednn", "native", "tuned", "compiled")


def in_turn(
    contestants: dict[str, Callable[[], Any]], turns: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of each contestant's turns, after one that is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, work in contestants.items():
            start = clock()
            work()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> dict[str, float]:
    """How many times faster one contestant is than another, turn by turn."""
    return spread([one / other for one, other in zip(seconds[slow], seconds[fast], strict=True)])


def steps(batch: int, turns: int) -> dict[str, Any]:
    """A training step of `bn-cnn` with each of the kernels."""
    torch.manual_seed(0)
    net = models.build("bn-cnn", (3, 32, 32), 10).train()
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step(kernels: Kernels) -> None:
        with applied(kernels, net):
            torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))

    work = {kernels: lambda kernels=kernels: step(kernels) for kernels in KERNELS}
    seconds = in_turn(work, turns, time.process_time)
    return {
        "batch": batch,
        "milliseconds": {name: 1e3 * statistics.median(all_) for name, all_ in seconds.items()},
        "compiled_against": {name: ratio(seconds, name, "compiled") for name in KERNELS[:-1]},
    }


def tiny_clients(clients: int, samples: int, turns: int) -> dict[str, Any]:
    """Rounds of many clients with few samples each."""
    torch.manual_seed(0)
    x, y = torch.randn(clients * samples, 1, 8, 8), torch.randint(0, 10, (clients * samples,))
    data = from_arrays(x, y, x[:100], y[:100])
    cut = partition.iid(clients=clients, valid=0.0)
    federations = {
        engine: Federation(
            data, cut, model="mlp", engine=engine, cohort=clients, epochs=1, batch_size=samples,
            eval_clients=0,
        )
        for engine in ("serial", "parallel")
    }  # fmt: skip
    main: list[float] = []
    run_clients = federations["parallel"].engine.run_clients

    def watched(tasks: Any) -> Any:
        start = time.process_time()
        results = run_clients(tasks)
        main.append(time.process_time() - start)
        return results

    federations["parallel"].engine.run_clients = watched  # type: ignore[method-assign]
    rounds = {
        engine: fed.run_rounds(turns + 2, eval_every=turns + 2)  # the last would be evaluated
        for engine, fed in federations.items()
    }
    work = {engine: lambda run=run: next(run) for engine, run in rounds.items()}
    seconds = in_turn(work, turns, time.perf_counter)
    for fed in federations.values():
        fed.close()
    return {
        "clients": clients,
        "samples": samples,
        "seconds_per_round": {engine: spread(all_) for engine, all_ in seconds.items()},
        "serial_against_parallel": ratio(seconds, "serial", "parallel"),
        "main_process_milliseconds_per_client": 1e3 * statistics.median(main[1:]) / clients,
    }


def main() -> None:
    """Measure and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 50, 64])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": "python benchmarks/speed/kernels.py --out FILE",
        "machine": machine(),
        "versions": versions(),
        "load": os.getloadavg()[0],
        "bn-cnn": [steps(batch, args.turns) for batch in args.batches],
        "tiny_clients": tiny_clients(args.clients, 8, args.turns),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("bn-cnn", "tiny_clients")}, indent=1))


if __name__ == "__main__":
    main()
