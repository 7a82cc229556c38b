"""Benchmarks that are a few `fedhelix compare` commands: running them, and their file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "speed"))
from measure import machine

from fedhelix.runs.provenance import versions


def main(description: str, name: str, commands: Mapping[str, str]) -> None:
    """Run the commands and write their tables with them into the results' file of that name."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.json"))
    args = parser.parse_args()
    report: dict[str, object] = {
        "command": f"python benchmarks/{name}.py",
        "machine": machine(),
        "versions": versions(),
    }
    for title, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [*command.split()[1:], "--json", "--quiet", "--out", f"{folder}/runs"]
            done = subprocess.run(
                [sys.executable, "-m", "fedhelix", *words], check=True, stdout=subprocess.PIPE
            )
        table = json.loads(done.stdout)
        report[title] = {"command": command, "table": table}
        print(title, [(row["method"], row["accuracy"]) for row in table], flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
