"""The load of the dashboard: 200 runs of 500 rounds, listed, compared and held in memory.

    python benchmarks/dashboard.py [--runs 200] [--rounds 500] [--out FILE.json]

Times are those of a client on the same machine. With chromium installed, a compare of ten runs is
also timed in the browser, from the click until all lines are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

from fedhelix.core import toml
from fedhelix.store import FORMAT

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))
from browser import CHROMIUM, Browser

CLIENTS, COHORT = 20, 10


def make_runs(root: Path, runs: int, rounds: int) -> None:
    """Folders as GenFed leaves them; one in twenty is unfinished."""
    draw = np.random.default_rng(0)
    for number in range(runs):
        folder = root / f"sweep-{number // 20}" / f"genfed-seed{number}"
        folder.mkdir(parents=True)
        config = {
            "format": FORMAT,
            "rounds": rounds,
            "seed": number,
            "data": "digits",
            "method": {"name": "genfed"},
        }
        (folder / "config.toml").write_text(toml.dumps(config))
        lines = []
        for t in range(1, rounds + 1):
            personal = np.clip(0.9 * (1 - np.exp(-t / 100)) + draw.normal(0, 0.05, CLIENTS), 0, 1)
            cohort = sorted(draw.choice(CLIENTS, COHORT, replace=False).tolist())
            metadata = {
                "rho": 5,
                "selected": cohort[:5],
                "fitness": {str(c): float(draw.random()) for c in cohort},
            }
            record = {
                "round": t,
                "train_loss": 1 / t,
                "uplink_bytes": 242320,
                "downlink_bytes": 242320,
                "other_bytes": 0,
                "participants": cohort,
                "refused": {},
                "metadata": metadata,
                "accuracy": float(personal.mean()) - 0.02,
                "loss": 0.5,
                "personal": personal.tolist(),
                "personal_accuracy": float(personal.mean()),
                "personal_p10": float(np.percentile(personal, 10)),
                "seconds": 0.2,
            }
            lines.append(json.dumps(record))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        if number % 20:
            summary = {
                "method": "genfed",
                "data": "digits",
                "clients": CLIENTS,
                "seed": number,
                "rounds": rounds,
            }
            summary |= {
                "personal_accuracy": float(personal.mean()),
                "uplink_bytes": 242320 * rounds,
                "seconds": 100.0,
            }
            (folder / "summary.json").write_text(json.dumps(summary | {"complete": True}))


def timed(address: str) -> tuple[float, bytes]:
    start = time.perf_counter()
    content = urllib.request.urlopen(address, timeout=60).read()
    return time.perf_counter() - start, content


def memory(process: int, key: str) -> float:
    """MiB of a process as the kernel counts them."""
    return (
        int(re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) / 1024
    )


def in_browser(home: str, names: list[str], folder: Path) -> list[float]:
    browser = Browser(folder)
    times = []
    try:
        for _ in range(5):
            browser.open(home, wait_for="document.querySelectorAll('tbody tr').length > 10")
            start = time.perf_counter()
            parts = f"{json.dumps(names)}.map(encodeURIComponent).join('/')"
            browser.evaluate(f"location.hash = '#/compare/' + {parts}")
            browser.until(
                "document.querySelector('#view .toggle') && document.querySelector('#view .line')"
            )
            browser.evaluate("document.querySelector('.toggle').click()")
            browser.until(f"document.querySelectorAll('#view polyline').length === {len(names)}")
            times.append(time.perf_counter() - start)
        assert not browser.complaints, browser.complaints
    finally:
        browser.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        root = Path(place) / "runs"
        make_runs(root, args.runs, args.rounds)
        size = sum(path.stat().st_size for path in root.rglob("*.jsonl"))
        server = subprocess.Popen(
            [sys.executable, "-m", "fedhelix", "serve", str(root), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            home = re.search(r"http://\S+", server.stdout.readline())[0]
            idle = memory(server.pid, "VmRSS")
            first, _ = timed(f"{home}api/runs")
            again = [timed(f"{home}api/runs")[0] for _ in range(10)]
            names = [run["id"] for run in json.loads(timed(f"{home}api/runs")[1])["runs"]][:10]
            query = "&".join(f"run={urllib.parse.quote(name)}" for name in names)
            compare_first, _ = timed(f"{home}api/compare?{query}")
            compare_again = [timed(f"{home}api/compare?{query}")[0] for _ in range(5)]
            drawn = in_browser(home, names, Path(place) / "chromium") if CHROMIUM else []
            # Every run is read once.
            every = [run["id"] for run in json.loads(timed(f"{home}api/runs")[1])["runs"]]
            for at in range(0, len(every), 10):
                query = "&".join(f"run={urllib.parse.quote(name)}" for name in every[at : at + 10])
                timed(f"{home}api/compare?{query}")
            held, most = memory(server.pid, "VmRSS"), memory(server.pid, "VmHWM")
        finally:
            server.terminate()
            server.wait(10)
    result = {
        "command": " ".join(["python", "benchmarks/dashboard.py", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "runs": args.runs,
        "rounds": args.rounds,
        "metrics_MiB": round(size / 2**20, 1),
        "list_first_s": round(first, 3),
        "list_again_s": round(statistics.median(again), 3),
        "compare_ten_first_s": round(compare_first, 3),
        "compare_ten_again_s": round(statistics.median(compare_again), 3),
        "compare_ten_in_browser_s": [round(value, 3) for value in drawn],
        "memory_before_MiB": round(idle),
        "memory_all_runs_read_MiB": round(held),
        "memory_peak_MiB": round(most),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
