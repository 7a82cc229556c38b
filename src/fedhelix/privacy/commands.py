"""`fedhelix audit`: privacy audits on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedhelix.errors import BadInput, unknown
from fedhelix.options import build
from fedhelix.privacy.audit import audit as audited
from fedhelix.privacy.audit import picture, report
from fedhelix.privacy.settings import Audit
from fedhelix.tree import writable, write_atomically

ATTACKS = ("idlg",)


def audit(attack: str, specs: Sequence[str], assignments: Sequence[str], out: Path, as_json: bool) -> None:
    """Attack, and write and print what came out."""
    if attack not in ATTACKS:
        raise unknown("attack", attack, ATTACKS)
    if out.suffix != ".png":
        raise BadInput(f"the picture must be a .png, not '{out}'.")
    values: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"--set takes KEY=VALUE, not '{text}'.")
        values[key.strip()] = value.strip()
    asked = build(Audit, values, "an audit")
    idle = [key for key in ("data", "model") if key in values]
    if idle and all((Path(spec) / "config.toml").exists() for spec in specs):
        raise BadInput(f"a run has data and a network of its own; leave '--set {idle[0]}={values[idle[0]]}' out.")
    writable(out.parent)
    rows, found = [], {}
    try:
        for row in audited(specs, asked):  # it may take minutes, so it is kept, whatever comes
            rows.append(row)
            found = {"command": " ".join(["fedhelix", *sys.argv[1:]]), "settings": vars(asked), "rows": report(rows)}
            picture(rows, out)
            write_atomically(out.with_suffix(".json"), (json.dumps(found, indent=1) + "\n").encode())
    except KeyboardInterrupt:
        kept = f"'{out}' and the JSON beside it hold what was found so far" if rows else "nothing was written"
        print(f"stopped; {kept}.", file=sys.stderr)
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(
        "method", "attacker", "sees", "labels found", "PSNR, median", "best", "SSIM", box=None, padding=(0, 2)
    )
    for row in rows:
        labels = "" if row["labels"] is None else f"{row['labels']:.0%}"
        figures = (f"{row['psnr']:.1f} dB", f"{row['best psnr']:.1f} dB", f"{row['ssim']:.2f}")
        table.add_row(row["method"], row["attacker"], f"{row['seen']:.1%}", labels, *figures)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    print(f"picture: {out}")
