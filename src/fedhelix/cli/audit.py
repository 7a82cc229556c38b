"""`fedhelix audit`: what an attacker can rebuild from uploads."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhelix.cli.common import Json
from fedhelix.core.bounds import rounded_up
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.files import writable_file, write_atomically
from fedhelix.core.options import build
from fedhelix.deploy import need_flower
from fedhelix.report.terminal import show_table
from fedhelix.report.wording import count, percent
from fedhelix.store.json import strict

TAKES = {
    "idlg": "methods such as fedavg, or run folders",
    "inversion": "methods such as fedavg",
    "membership": "methods such as fedavg",
    "log": "audit logs such as site/clinic-a.jsonl",
}


def audit(
    attack: Annotated[
        str,
        typer.Argument(
            help="idlg, which rebuilds images from gradients; inversion, which rebuilds them from "
            "what leaves a client in a round; membership, which tells samples that were trained "
            "on; or log, which checks an audit log."
        ),
    ],
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD|RUN|FILE...", help="Methods; with idlg also run folders; or logs."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="data, model, images, restarts, steps..."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The figure; its numbers lie beside it as JSON.")
    ] = Path("audit.png"),
    key: Annotated[
        Path | None, typer.Option(help="With log: the site's key, SITE.pub or SITE.key.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What an attacker can learn from uploads and models; or check an audit log.

    For example:

      fedhelix audit idlg fedavg fedlg --set images=4 --set model=lenet-sigmoid

      fedhelix audit log site/clinic-a.jsonl --key clinic-a.pub
    """
    if attack not in TAKES:
        raise _no_attack(attack)
    if not specs:
        raise UserError(f"audit {attack} takes {TAKES[attack]}, and none is given.")
    if attack == "log":
        _show_logs(specs, key, as_json)
        return
    if key is not None:
        raise UserError(f"--key is for audit log; audit {attack} reads no key, so leave it out.")
    if out.suffix != ".png":
        raise UserError(f"the figure must be a .png, not '{out}'.")
    values = _assigned(assignments or [])
    runs = [spec for spec in specs if (Path(spec) / "config.toml").exists()]
    for spec in (spec for spec in specs if spec not in runs):
        _check_place(attack, spec)
    if runs and attack != "idlg":
        raise UserError(
            f"audit {attack} trains methods itself and takes no run such as '{runs[0]}'; give the "
            "name of its method, and its settings with --set."
        )
    if attack == "membership":
        _membership(specs, values, out, as_json)
        return
    _rebuild(attack, specs, values, out, as_json)


def _no_attack(word: str) -> UserError:
    """An error for what stands in the place of the attack."""
    import fedhelix.methods  # noqa: F401 - it registers them
    from fedhelix.core.registry import METHODS

    path, then = Path(word), f"first comes one of {', '.join(TAKES)}"
    named = shlex.quote(word)
    if (path / "config.toml").exists():
        return UserError(f"'{word}' is a run; {then}, as in `fedhelix audit idlg {named}`.")
    if path.is_dir():
        return UserError(f"'{word}' is a folder, and no run; {then}, and then what to audit.")
    if word.partition("@")[0] in METHODS or (path.is_file() and path.suffix == ".py"):
        return UserError(f"'{word}' is a method; {then}, as in `fedhelix audit idlg {named}`.")
    if path.is_file():
        return UserError(f"'{word}' is a file; {then}, as in `fedhelix audit log {named}`.")
    if "/" in word or path.suffix:
        return UserError(f"there is no file or folder '{word}'; {then}, and then what to audit.")
    return unknown("attack", word, TAKES)


def _check_place(attack: str, spec: str) -> None:
    """Refuse files and folders in the place of a method or a run."""
    path = Path(spec)
    if path.is_dir():
        raise UserError(f"'{spec}' is no run folder; give one such as runs/NAME, or a method.")
    if path.is_file() and path.suffix != ".py":
        raise UserError(
            f"'{spec}' is a file, but audit {attack} takes {TAKES[attack]}; an audit log is "
            f"checked with `fedhelix audit log {shlex.quote(spec)}`."
        )
    if "/" in spec and ".py" not in spec and "@" not in spec:
        raise UserError(f"there is no folder '{spec}'; audit {attack} takes {TAKES[attack]}.")


def _rebuild(
    attack: str, specs: Sequence[str], values: Mapping[str, str], out: Path, as_json: bool
) -> None:
    """Rebuild images from what methods upload."""
    from fedhelix.privacy import audit as privacy
    from fedhelix.privacy import reconstruction
    from fedhelix.privacy.settings import Audit

    settings: Any
    if attack == "inversion":
        settings = build(reconstruction.InversionAudit, values, "an audit by inversion")
        found = reconstruction.inversion(specs, settings)
    else:
        settings = build(Audit, values, "an audit")
        found = privacy.audit(specs, settings)
    idle = [key for key in ("data", "model") if key in values]
    if idle and all((Path(spec) / "config.toml").exists() for spec in specs):
        setting = f"{idle[0]}={values[idle[0]]}"
        raise UserError(f"a run has data and a network of its own; leave '--set {setting}' out.")
    writable_file(out, out.with_suffix(".json"))
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    try:
        # An audit may take minutes, so every row is written as soon as it is there.
        for row in found:
            rows.append(row)
            report = {
                "command": " ".join(["fedhelix", *sys.argv[1:]]),
                "settings": vars(settings),
                "rows": privacy.report(rows),
            }
            privacy.image(rows, out)
            content = json.dumps(report, indent=1) + "\n"
            write_atomically(out.with_suffix(".json"), content.encode())
    except KeyboardInterrupt:
        kept = f"'{out}' and the JSON beside it hold the rows so far"
        print(f"stopped; {kept if rows else 'nothing was written'}.", file=sys.stderr)
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(report, indent=2))
        return
    _print(rows)
    print(f"figure: {out}")


def _membership(specs: Sequence[str], values: Mapping[str, str], out: Path, as_json: bool) -> None:
    """Tell members by the final model of each method."""
    from fedhelix.privacy import membership

    settings = build(membership.MembershipAudit, values, "an audit of membership")
    writable_file(out, out.with_suffix(".json"))
    rows = list(membership.membership(specs, settings))
    membership.figure(rows, out)
    command = " ".join(["fedhelix", *sys.argv[1:]])
    report = {"command": command, "settings": vars(settings), "rows": rows}
    write_atomically(out.with_suffix(".json"), f"{json.dumps(report, indent=1)}\n".encode())
    if as_json:
        print(json.dumps(report, indent=2))
        return
    columns = ("method", "advantage", "epsilon", "delta", "bound of the advantage", "accuracy")
    cells = []
    for row in rows:
        delta = "none" if row["delta"] is None else f"{row['delta']:.3g}"
        limits = (_bound(row["epsilon"]), delta, _bound(row["bound"]))
        cells.append([row["method"], f"{row['advantage']:.3f}", *limits, percent(row["accuracy"])])
    show_table(columns, cells)
    print(f"figure: {out}")


def _assigned(assignments: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE, not '{text}'.")
        values[key.strip()] = value.strip()
    return values


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    counted = ("epsilon",) if any("epsilon" in row for row in rows) else ()
    columns = "method, attacker", "sees", "labels found", *counted, "PSNR, median", "best", "SSIM"
    cells = []
    for row in rows:
        labels = "not seen" if row["labels"] is None else percent(row["labels"])
        bounds = [_bound(row[key]) for key in counted]
        psnr = (f"{row['psnr']:.1f} dB", f"{row['best psnr']:.1f} dB")
        ssim = f"{row['ssim']:.2f}"
        name = f"{row['method']}, {row['attacker']}"
        cells.append([name, percent(row["seen"]), labels, *bounds, *psnr, ssim])
    show_table(columns, cells)


def _bound(value: float | None) -> str:
    return "none" if value is None else rounded_up(value)


def _show_logs(paths: Sequence[str], key: Path | None, as_json: bool) -> None:
    """Check audit logs of sites and print them."""
    need_flower()
    from fedhelix.deploy.audit_log import moved, read_log

    for path in paths:
        if Path(path).is_dir():
            raise UserError(f"'{path}' is a folder; audit log takes {TAKES['log']}.")
    logs = {path: read_log(Path(path), key) for path in paths}
    if as_json:
        print(json.dumps(strict(logs), indent=2))  # older logs may hold NaN
        return
    for path, entries in logs.items():
        for entry in entries:
            what = entry.get("error") or moved(entry)
            if spent := entry.get("epsilon"):
                most = max(spent.values()) if isinstance(spent, dict) else spent
                at = f" at delta {entry['delta']:.3g}" if entry.get("delta") else ""
                what = ", ".join(filter(None, (what, f"epsilon {rounded_up(most)}{at}")))
            words = (entry["time"], _asked(entry), entry.get("method"), what)
            print("  ".join(filter(None, words)))
        said = "signed with the given key" if key else "signed throughout with the key in it"
        print(f"{path}: {count(len(entries), 'line')}, none changed, {said}.")


def _asked(entry: Mapping[str, Any]) -> str:
    """What an entry is about: evaluations and aggregates count the rounds that are over."""
    kind, round = entry["kind"], entry.get("round")
    if round is None:
        return str(kind)
    if kind in ("aggregate", "evaluate", "evaluate_received"):
        return f"{kind} after round {round}"
    return f"{kind} of round {round + 1}"
