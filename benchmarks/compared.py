"""Benchmarks that are a few `fedhelix compare` commands: running them, and their file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "speed"))
from measure import machine

from fedhelix.federation.provenance import device_name, versions


def arguments(description: str, name: str) -> argparse.Namespace:
    """What such a benchmark can be told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.json"))
    parser.add_argument("--jobs", type=int, default=1, help="commands that run at once")
    parser.add_argument("--more", default="", help="further options of every command, as one word")
    return parser.parse_args()


def main(description: str, name: str, commands: Mapping[str, str]) -> None:
    """Run the commands and write their tables with them into the results' file of that name."""
    args = arguments(description, name)
    report: dict[str, object] = {
        "command": f"python benchmarks/{name}.py",
        "device": device_name("auto"),
        "machine": machine(),
        "versions": versions(),
    }
    commands = {title: f"{command} {args.more}".rstrip() for title, command in commands.items()}
    with ThreadPoolExecutor(args.jobs) as pool:
        tables = pool.map(compare, commands.values())
        for (title, command), table in zip(commands.items(), tables, strict=True):
            report[title] = {"command": command, "table": table}
            print(title, [(row["method"], row["personal_accuracy"]) for row in table], flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def compare(command: str) -> list[dict[str, Any]]:
    """The table of one command."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*command.split()[1:], "--json", "--quiet", "--out", f"{folder}/runs"]
        done = subprocess.run(
            [sys.executable, "-m", "fedhelix", *words], check=True, stdout=subprocess.PIPE
        )
    table: list[dict[str, Any]] = json.loads(done.stdout)
    return table
