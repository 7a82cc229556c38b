"""The cost of GenFed's scoring and of whole rounds, with ten models and 1,000 images, by engine.

    FEDHELIX_DATA=DIR python benchmarks/speed/scoring.py --engines serial parallel --out FILE.json

Rounds are those of W1 (Fashion-MNIST, 100 clients, 10 per round, 5 epochs) without evaluation.
Where everything runs in this process, seconds are processor time, so that the machine need not be
idle; otherwise they are wall time.
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
    """Seconds per round, and the part of them that scoring took."""
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
        scores = score(*given, **named)
        scoring.append(clock() - start)
        return scores

    fed.engine.score = timed  # type: ignore[method-assign]
    # The last round would be evaluated, so it is not run.
    run = fed.run_rounds(rounds + 2, eval_every=rounds + 2)
    next(run)  # warms up
    scoring.clear()
    for _ in range(rounds):
        start = clock()
        record, _ = next(run)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["serial", "parallel"])
    parser.add_argument("--methods", nargs="+", default=["genfed", "genfed+fedper"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts: dict[str, Any] = {"machine": machine(), "runs": []}
    for engine, method in itertools.product(args.engines, args.methods):
        facts["runs"].append(measured(engine, method, args.rounds, args.images))
        print(json.dumps(facts["runs"][-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
