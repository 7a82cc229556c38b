"""What GenFed's scoring costs: seconds of it and of whole rounds, ten models and 1,000 images, on
each engine.

    FEDHELIX_DATA=FOLDER python benchmarks/speed/scoring.py --engines serial parallel --rounds 3 --out FILE.json

Rounds are those of W1 (Fashion-MNIST, 100 clients, 10 per round, 5 epochs) without evaluation.
Seconds are those of the processor where all is done in this process, so that it need not be quiet;
else those of the clock on the wall.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

from measure import machine, spread
from workloads import W1, federation

from fedhelix import load
from fedhelix.core.registry import make


def measured(engine: str, method: str, rounds: int, images: int, **more: Any) -> dict[str, Any]:
    """Seconds per round, and those that scoring took of them."""
    fed = federation(
        load("fashion-mnist"),
        {**W1, **more},
        method=make(method),
        engine=engine,
        validation_size=images,
    )
    clock = time.perf_counter if fed.engine.name == "parallel" else time.process_time
    scoring, total, score = [], [], fed.engine.score

    def timed(*given: Any, **named: Any) -> Any:
        start = clock()
        found = score(*given, **named)
        scoring.append(clock() - start)
        return found

    fed.engine.score = timed  # type: ignore[method-assign]
    run_rounds = fed.run_rounds(
        rounds + 2, eval_every=rounds + 2
    )  # the last round would be evaluated, and is not played
    next(run_rounds)  # warms up
    scoring.clear()
    for _ in range(rounds):
        start = clock()
        record, _ = next(run_rounds)
        total.append(clock() - start)
    fed.close()
    shares = [part / whole for part, whole in zip(scoring, total, strict=True)]
    return {
        "engine": fed.engine.name,
        "method": method,
        "models": len(record["participants"]),
        "images": images,
        "kernels": fed.engine.setup.kernels,
        "clock": clock.__name__,
        "round_seconds": spread(total),
        "scoring_seconds": spread(scoring),
        "share": spread(shares),
    }


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--engines", nargs="+", default=["serial", "parallel"])
    words.add_argument("--methods", nargs="+", default=["genfed", "genfed+fedper"])
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--images", type=int, default=1000)
    words.add_argument("--out", type=Path)
    requested = words.parse_args()
    facts: dict[str, Any] = {"machine": machine(), "runs": []}
    for engine, method in itertools.product(requested.engines, requested.methods):
        facts["runs"].append(measured(engine, method, requested.rounds, requested.images))
        print(json.dumps(facts["runs"][-1]), flush=True)
        if requested.out:
            requested.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
