"""What GenFed's scoring costs: seconds of it and of whole rounds, ten models and 1,000 images, on each engine.

    FEDHELIX_DATA=FOLDER python benchmarks/speed/scoring.py --engines serial parallel --rounds 3 --out FILE.json

Rounds are those of W1 (Fashion-MNIST, 100 clients, 10 per round, 5 epochs) without evaluation.
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
from fedhelix.registry import make


def measured(engine: str, method: str, rounds: int, images: int, **more: Any) -> dict[str, Any]:
    """Seconds per round, and those that scoring took of them."""
    fed = federation(load("fashion-mnist"), {**W1, **more}, method=make(method), engine=engine, validation_size=images)
    scoring, score = [], fed.engine.score

    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        found = score(*given, **named)
        scoring.append(time.perf_counter() - start)
        return found

    fed.engine.score = timed  # type: ignore[method-assign]
    # The first round warms up, and the last one would be evaluated.
    records = [record for record, _ in itertools.islice(fed.play(rounds + 2, eval_every=rounds + 2), rounds + 1)][1:]
    fed.close()
    total = [record["seconds"] for record in records]
    shares = [one / all_ for one, all_ in zip(scoring[1:], total, strict=True)]
    return {
        "engine": fed.engine.name,
        "method": method,
        "models": len(records[0]["participants"]),
        "images": images,
        "kernels": fed.engine.setup.kernels,
        "round_seconds": spread(total),
        "scoring_seconds": spread(scoring[1:]),
        "share": spread(shares),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--engines", nargs="+", default=["serial", "parallel"])
    words.add_argument("--methods", nargs="+", default=["genfed", "genfed+fedper"])
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--images", type=int, default=1000)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    facts: dict[str, Any] = {"machine": machine(), "runs": []}
    for engine, method in itertools.product(asked.engines, asked.methods):
        facts["runs"].append(measured(engine, method, asked.rounds, asked.images))
        print(json.dumps(facts["runs"][-1]), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
