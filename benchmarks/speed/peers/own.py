"""fedhelix and the plain PyTorch loop as contestants of the CPU race; `cpu.py` starts them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from common import RaceClient, apply
from workloads import PlainLoop, federation

from fedhelix import load
from fedhelix.federation.provenance import versions


def main(settings: dict[str, Any]) -> None:
    """Run the rounds."""
    plain = settings["contestant"] == "plain"
    more = {"engine": "serial", "kernels": "native"} if plain else {"engine": "parallel"}
    fed = federation(
        load("fashion-mnist", settings["data_dir"]), settings["workload"], device="cpu", **more
    )
    facts = {"versions": versions()}
    if plain:
        apply(settings)
        loop = PlainLoop(fed)
    else:
        rounds = fed.run_rounds(settings["rounds"])
        facts |= {"workers": fed.engine.workers, "kernels": fed.engine.setup.kernels}
    race = RaceClient(**facts)
    for t in range(settings["rounds"]):
        race.begin_round()
        race.end_round(loop.round(t) if plain else next(rounds)[0]["accuracy"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
