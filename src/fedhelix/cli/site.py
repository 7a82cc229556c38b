"""The commands `site …`; Flower is imported only when one of them runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhelix.cli.common import Code, DataDir, LogFormat
from fedhelix.cli.pages import App
from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file, write_atomically
from fedhelix.deploy import need_flower

if TYPE_CHECKING:
    from fedhelix.deploy.site_policy import SitePolicy

SiteData = Annotated[
    str, typer.Option(help="A folder or FILE.npz with own samples, or a data set's name.")
]
SiteName = Annotated[str, typer.Option(help="The site's name, as its key is registered.")]
SiteFolder = Annotated[Path, typer.Option(help="The site's state lies here.")]


def site_model(
    name: SiteName,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("model.safetensors"),
    folder: SiteFolder = Path("site"),
    data: SiteData = "",
    data_dir: DataDir = None,
    code: Code = None,
) -> None:
    """Write the site's own model after its rounds of the latest run into one file.

    FILE.safetensors has the entries of the network's `state_dict`, for `load_state_dict`. FILE.onnx
    and FILE.pt2 are programs; for these, give --data, --data-dir and --code as the site was started
    with.
    """
    need_flower()
    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.site_predictions import export_model, trained_site
    from fedhelix.deploy.site_state import latest_model
    from fedhelix.federation.export import check_suffix

    check_suffix(out)
    path = latest_model(folder, name)
    if out.suffix == ".safetensors":
        content = path.read_bytes()
        writable_file(out)
        write_atomically(out, content)
    elif not data:
        raise UserError(f"'{out}' also needs --data as the site was started with.")
    else:
        here = trained_site(name, data, folder, data_dir, code=SiteCode(code or []))
        writable_file(out)
        export_model(here, out)
    _say_which(path)
    print(out)


def _say_which(path: Path) -> None:
    """Say after which run a site got its model: it may not be the one that a user thinks of."""
    from fedhelix.deploy.site_state import SiteState, rounds_of

    header, _ = SiteState(path.parent).used()
    method = json.loads(header["spec"])["method"]["name"]
    when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    words = f"the model of {path.parent.name} after {rounds_of(header)} rounds of {method}, {when}"
    print(f"fedhelix: {words}", file=sys.stderr)


def site_predict(
    name: SiteName,
    data: SiteData,
    inputs: Annotated[Path, typer.Option(metavar="FILE.npy", help="New samples, one per row.")],
    out: Annotated[Path, typer.Option(metavar="FILE.npy", help="The file to write.")] = Path(
        "predictions.npy"
    ),
    outputs: Annotated[
        bool, typer.Option("--outputs", help="The network's outputs instead of classes.")
    ] = False,
    folder: SiteFolder = Path("site"),
    data_dir: DataDir = None,
    code: Code = None,
) -> None:
    """Predict new samples with the site's own model after its rounds of the latest run.

    Give --data, --data-dir and --code as the site was started with: samples are prepared as in
    training.
    """
    if out.suffix != ".npy":
        raise UserError(f"predictions are written as FILE.npy, not '{out}'.")
    need_flower()
    import numpy as np

    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.site_predictions import predictions, trained_site
    from fedhelix.deploy.site_state import latest_model

    here = trained_site(name, data, folder, data_dir, code=SiteCode(code or []))
    writable_file(out)
    content = io.BytesIO()
    np.save(content, predictions(here, inputs, outputs))
    write_atomically(out, content.getvalue())
    _say_which(latest_model(folder, name))
    print(out)


def site(  # noqa: PLR0913, PLR0917 - the options of a command
    ctx: typer.Context,
    name: SiteName = "",
    superlink: Annotated[str, typer.Option(help="The server's HOST:PORT.")] = "",
    data: SiteData = "",
    cert: Annotated[Path | None, typer.Option(help="The server's authority, ca.pem.")] = None,
    key: Annotated[
        Path | None, typer.Option(help="The site's private key; it signs the audit log, too.")
    ] = None,
    folder: SiteFolder = Path("site"),
    data_dir: DataDir = None,
    policy: Annotated[
        Path | None, typer.Option(help="policy.toml: what the site allows (default: safe limits).")
    ] = None,
    dry_run: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD|RUN", help="Only say what this run would reveal, and whether it may."
        ),
    ] = None,
    code: Code = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            help="Answer /healthz and /readyz (connected) on this port.", min=0, max=65535
        ),
    ] = None,
    log_format: LogFormat = "text",
    # Set by `up`, which gives all sites one FILE.npz.
    common: Annotated[bool, typer.Option("--common", hidden=True)] = False,
) -> None:
    """Run one site with its own data, for as long as the server has work for it."""
    if ctx.invoked_subcommand is not None:
        return
    given: dict[str, object] = {"name": name, "data": data}
    if dry_run is None:
        given |= {"superlink": superlink, "cert": cert, "key": key}
    missing = [f"--{word}" for word, value in given.items() if not value]
    if missing:
        raise UserError(f"a site also needs {', '.join(missing)}; see `fedhelix site --help`.")
    if dry_run is None and not re.fullmatch(r".+:\d+", superlink):
        raise UserError(f"--superlink is HOST:PORT, such as 127.0.0.1:8000, not '{superlink}'.")
    need_flower()
    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.logs import choose_format
    from fedhelix.deploy.site import Site
    from fedhelix.deploy.site_policy import SitePolicy

    choose_format(log_format)
    site_code = SiteCode(code or [])  # first: the policy may name its methods
    rules = SitePolicy.read(policy)
    here = Site(name, data, folder, data_dir, common, rules, code=site_code)
    here.check_data()
    if dry_run is not None:
        from fedhelix.deploy.dry_run import asked_run, reveals

        lines = list(reveals(here, *asked_run(dry_run, site_code)))
        print("\n".join([f"{dry_run} may run at {name}, and would send", *lines]))
        return
    assert cert is not None and key is not None
    options = {
        "--name": name, "--data": data, "--folder": str(folder), "--data-dir": data_dir,
        "--policy": policy and str(policy), "--key": str(key),
    }  # fmt: skip
    arguments = [word for flag, value in options.items() if value for word in (flag, value)]
    arguments += [word for path in site_code.files.values() for word in ("--code", str(path))]
    worker = [*arguments, *["--common"] * common]
    _connect_site(superlink, cert, key, worker, rules, folder / name, health_port)


def _connect_site(
    superlink: str,
    cert: Path,
    key: Path,
    arguments: list[str],
    rules: SitePolicy,
    place: Path,
    health_port: int | None,
) -> None:
    from fedhelix.deploy.audit_log import AuditLog
    from fedhelix.deploy.health import HealthServer
    from fedhelix.deploy.logs import format_all, say
    from fedhelix.deploy.node import connect, only_process
    from fedhelix.deploy.site_process import SiteProcess

    format_all()  # Flower's logger is there now
    worker, connected = SiteProcess(arguments, rules.max_seconds), threading.Event()
    node_file = place.with_name(f"{place.name}.node")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_process(place.parent, place.name))
            AuditLog(place.with_name(f"{place.name}.jsonl"), key)  # refuses one that was changed
            if health_port is not None:
                server = HealthServer("0.0.0.0", health_port, connected.is_set)
                say(f"probes are answered on port {stack.enter_context(server).port}")
            connect(superlink, cert, key, worker, node_file, connected)
    except KeyboardInterrupt:
        say(f"the site {place.name} is stopped; the same command goes on")
        raise SystemExit(130) from None
    finally:
        worker.stop()


sites = App(invoke_without_command=True, add_completion=False)
sites.callback()(site)
sites.command("model")(site_model)
sites.command("predict")(site_predict)
