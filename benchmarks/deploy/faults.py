"""The fault matrix: real processes on this machine, one fault per row, and its effect on the run.

    python benchmarks/deploy/faults.py [ROW ...]

Writes benchmarks/results/deploy-faults.json and deploy-faults.md.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

from fedhelix.deploy import submit
from fedhelix.deploy.localhost import LocalDeployment, Process
from fedhelix.runs.spec import make_spec

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
ROUNDS, FAULT_AFTER = 6, 2
METHOD = "fedper"  # its clients keep a part of the model, so that lost state would show
PATIENT, HASTY = ["deadline=300", "patience=300"], ["deadline=40", "patience=300"]


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    started = [int(word) for word in done.stdout.split()]
    return started + [other for child in started for other in children(child)]


def kill_site(local: LocalDeployment) -> None:
    os.kill(local.sites["site-1"].running.pid, signal.SIGKILL)


def kill_worker(local: LocalDeployment) -> None:
    os.kill(children(local.sites["site-1"].running.pid)[0], signal.SIGKILL)


def kill_superlink(local: LocalDeployment) -> None:
    os.kill(local.superlink.running.pid, signal.SIGKILL)


def kill_server_app(local: LocalDeployment) -> None:
    for pid in children(local.superlink.running.pid):
        if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def stop_site(local: LocalDeployment) -> None:
    process = local.sites["site-1"].running.pid
    everybody = [process, *children(process)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(120)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def supervised(local: LocalDeployment) -> Iterator[list[str]]:
    """Restart dead processes, as `fedhelix up` does while it waits."""
    revived: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            revived.extend(local.revive())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield revived
    finally:
        over.set()
        thread.join()


def run_rounds(
    local: LocalDeployment,
    out: Path,
    policy: list[str],
    fault: Callable[[LocalDeployment], None] | None,
    **settings: object,
) -> dict:
    """One run with a fault after its second round."""
    spec = make_spec(METHOD, {"clients": len(local.names), "rounds": ROUNDS, **settings})
    folder = submit.create(spec, out, policy)

    def strike() -> None:
        while len(folder.records()) < FAULT_AFTER:
            time.sleep(0.2)
        if fault is not None:
            fault(local)

    striker = threading.Thread(target=strike, daemon=True)
    begun = time.monotonic()
    with supervised(local) as revived, redirect_stderr(StringIO()) as messages:
        striker.start()
        with local.control() as control:
            submit.follow(control, folder, quiet=True)
        striker.join()
    records = folder.records()
    state = json.loads((out / "checkpoint" / "manifest.json").read_text())["server"]["sha256"]
    reasons = [why for record in records for why in record["missing"].values()]
    reasons += [
        f"the upload of client {who} {why}"
        for record in records
        for who, why in record["refused"].items()
    ]
    troubles = [
        f"{who} {what}"
        for record in records
        for who, what in (record.get("troubles") or {}).items()
    ]
    return {
        "rounds": len(records),
        "final_accuracy": records[-1]["personal_accuracy"],
        "answers_missing": sum(len(record["missing"]) for record in records),
        "answers_refused": sum(len(record["refused"]) for record in records),
        "reasons": sorted(set(reasons + troubles)),
        "started_again": sorted(set(revived)),
        "said": [
            line.removeprefix("fedhelix: ")
            for line in messages.getvalue().splitlines()
            if "fedhelix: " in line
        ],
        "server_state": state,
        "seconds": round(time.monotonic() - begun, 1),
    }


def make_faulty(local: LocalDeployment, harm: str, names: list[str]) -> None:
    """Replace sites by ones that misbehave."""
    command = [
        sys.executable,
        str(HERE / "crowd.py"),
        str(local.folder),
        local.address,
        harm,
        *names,
    ]
    for name in names:
        local.sites.pop(name, None)
    local.sites[harm] = Process(harm, command, local.folder / "logs" / f"{harm}.log", local.env)


ROWS: dict[str, tuple[str, Callable[[LocalDeployment], None] | None, list[str], str | None]] = {
    "calm": ("nothing", None, PATIENT, None),
    "site": ("SIGKILL of a site", kill_site, PATIENT, None),
    "worker": ("SIGKILL of a site's client process", kill_worker, PATIENT, None),
    "superlink": ("SIGKILL of the SuperLink", kill_superlink, PATIENT, None),
    "server-app": ("SIGKILL of the server app", kill_server_app, PATIENT, None),
    "stop": ("SIGSTOP of a site for two minutes", stop_site, HASTY, None),
    "nan": ("a site sends NaN", None, PATIENT, "nan"),
    "shapes": ("a site sends wrong shapes", None, PATIENT, "shapes"),
    "huge": ("a site sends eleven times the size", None, PATIENT, "huge"),
    "garbage": ("a site sends garbage", None, PATIENT, "garbage"),
    "missing": ("30 % of ten sites missing in every round", None, HASTY, "missing"),
}


def measure(row: str) -> dict:
    what, fault, policy, harm = ROWS[row]
    folder = Path(tempfile.mkdtemp(prefix=f"fedhelix-fault-{row}-"))
    try:
        local = LocalDeployment(folder / "deployment", sites=10 if row == "missing" else 3)
        if harm is not None:
            make_faulty(local, harm, local.names if row == "missing" else ["site-1"])
        with local:
            return {"row": row, "fault": what, **run_rounds(local, folder / "run", policy, fault)}
    finally:
        shutil.rmtree(folder)


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    calm = next((row["server_state"] for row in rows if row["row"] == "calm"), None)
    columns = ("fault", "rounds", "answers missing / refused", "same result as without it")
    lines = [f"| {' | '.join(columns)} | what the user sees |", "|---|---|---|---|---|"]
    for row in rows:
        same = (
            "yes, to the bit"
            if row["server_state"] == calm
            else "no: those rounds went on without the site"
        )
        same = "other sites" if row["row"] == "missing" else same
        seen = [f"`up`: {name} had died and was started again" for name in row["started_again"]]
        seen += [f"`deploy run`: {line}" for line in row.get("said", [])]
        seen += [f"`metrics.jsonl`: {reason}" for reason in row["reasons"][:3]]
        seen += (
            [f"... and {len(row['reasons']) - 3} more such lines"]
            if len(row["reasons"]) > 3
            else []
        )
        counts = f"{row['answers_missing']} / {row['answers_refused']}"
        cells = [row["fault"], f"{row['rounds']} of {ROUNDS}", counts, same]
        lines.append(f"| {' | '.join([*cells, '<br>'.join(seen) or 'nothing'])} |")
    return "\n".join(lines) + "\n"


def main(*wanted: str) -> None:
    path = RESULTS / "deploy-faults.json"
    known = (
        {row["row"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    )
    for row in wanted or ROWS:
        known[row] = measure(row)
        print(json.dumps(known[row]), flush=True)
        rows = [known[name] for name in ROWS if name in known]
        settings = {"method": METHOD, "rounds": ROUNDS, "data": "digits", "cores": os.cpu_count()}
        path.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
