"""Mutations of every file of a run: how many does `fedhelix` open without a word?

    python benchmarks/mutations.py [--mutations 1000] [--out FILE.json]

A mutation changes a few bytes or digits, or cuts or repeats a part. It is refused if opening the
run, its records, clients, choices, result and checkpoint ends in an error that names the file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from measured import origin, write

from fedhelix.core.errors import UserError
from fedhelix.runs import jobs
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz.mutations import changed_file

SMALL = {"clients": 3, "rounds": 3, "epochs": 1, "batch_size": 256, "kernels": "onednn"}


def look(path: Path) -> None:
    """Read all that `resume` and `report` read."""
    folder = RunFolder.open(path)
    for part in ("config", "clients", "choices", "summary"):
        getattr(folder, part)
    folder.records()
    folder.state()


def outcome(path: Path, run: Path) -> str:
    try:
        look(run)
    except UserError as problem:
        return "refused by name" if path.name in str(problem) else "refused without a name"
    except Exception as problem:
        return type(problem).__name__
    return "accepted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=1000, help="of every file")
    parser.add_argument("--out", type=Path, help="FILE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as place:
        run, draw = Path(place) / "run", random.Random(0)
        spec = make_spec("fedper", {**SMALL, "model": "mlp", "engine": "serial"})
        jobs.start(spec, run, quiet=True)
        with RunFolder.open(run) as folder:  # as an engine on a GPU would have written them
            folder.write_choices({"step": "stacked"})
            folder.checkpoint(3, *folder.state()[1:])
        look(run)
        for path in sorted(path for path in run.rglob("*") if path.is_file()):
            honest, found = path.read_bytes(), Counter[str]()
            for _ in range(arguments.mutations):
                path.write_bytes(changed_file(honest, draw))
                found[outcome(path, run)] += 1
            path.write_bytes(honest)
            counts[str(path.relative_to(run))] = dict(found)
            print(path.name, dict(found), flush=True)
        look(run)
    write(arguments.out, {**origin(), "files": counts})


if __name__ == "__main__":
    main()
