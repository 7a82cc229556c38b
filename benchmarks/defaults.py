"""Which value of an option is best on the clients' validation samples of digits.

python benchmarks/defaults.py --out runs/defaults --save benchmarks/results/defaults.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from fedhelix.core.files import write_atomically
from fedhelix.papers.study import origin
from fedhelix.runs.comparison import compare
from fedhelix.runs.jobs import Session
from fedhelix.store import RunFolder
from fedhelix.store.records import best_record

OPTIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "pfedme": ("mu", (0.01, 0.1, 1.0)),
    "feddbe": ("kappa", (0.1, 1.0, 10.0)),
}
SETTINGS = {"data": "digits", "partition": "dirichlet:0.3", "rounds": 20, "eval_every": 2}
SEEDS = 2


def validation(folder: RunFolder) -> float:
    """The accuracy on validation samples in the round that is best on them."""
    return float((best_record(folder.records()) or {})["valid_accuracy"])


def main() -> None:
    """Run all values with all seeds, and write down what validation says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--save", type=Path, default=Path("benchmarks/results/defaults.json"))
    parser.add_argument("--engine", default="auto")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    folders: list[RunFolder] = []
    for method, (option, values) in OPTIONS.items():
        specs = [f"{method}@{option}={value}" for value in values]
        settings = {**SETTINGS, "engine": given.engine}
        done = compare(specs, settings, SEEDS, given.out / method, Session(quiet=True))
        folders += done
        for value in values:
            own = [one for one in done if one.config["method"][option] == value]
            by_seed = [validation(folder) for folder in own]
            rows.append({"method": method, option: value, "validation": fmean(by_seed)})
            print(rows[-1])
    report = {**origin(folders), "settings": SETTINGS, "seeds": SEEDS, "rows": rows}
    write_atomically(given.save, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
