"""The commands `site …`; Flower is imported only when one of them runs."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhelix.cli.common import Code, DataDir
from fedhelix.cli.pages import App
from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
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
) -> None:
    """Copy the site's own model after its latest complete run into one safetensors file.

    Its entries are those of the network's `state_dict`, for `load_state_dict`.
    """
    need_flower()
    from fedhelix.deploy.site_state import latest_model

    write_atomically(out, latest_model(folder, name).read_bytes())
    print(out)


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
    """Predict new samples with the site's own model, after its latest complete run.

    Give --data, --data-dir and --code as the site was started with: samples are prepared as in
    training.
    """
    need_flower()
    import numpy as np

    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.site import Site
    from fedhelix.deploy.site_predictions import predictions

    here = Site(name, data, folder, data_dir, code=SiteCode(code or []))
    content = io.BytesIO()
    np.save(content, predictions(here, inputs, outputs))
    write_atomically(out, content.getvalue())
    print(out)


def site(
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
    need_flower()
    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.site import Site
    from fedhelix.deploy.site_policy import SitePolicy

    site_code = SiteCode(code or [])  # first: the policy may name its methods
    rules = SitePolicy.read(policy)
    here = Site(name, data, folder, data_dir, common, rules, code=site_code)
    if dry_run is not None:
        from fedhelix.deploy.dry_run import asked_run, reveals

        lines = list(reveals(here, asked_run(dry_run)))
        print("\n".join([f"{dry_run} may run at {name}, and would send", *lines]))
        return
    assert cert is not None and key is not None
    here.check_data()
    options = {
        "--name": name, "--data": data, "--folder": str(folder), "--data-dir": data_dir,
        "--policy": policy and str(policy), "--key": str(key),
    }  # fmt: skip
    arguments = [word for flag, value in options.items() if value for word in (flag, value)]
    arguments += [word for path in site_code.files.values() for word in ("--code", str(path))]
    _connect_site(superlink, cert, key, [*arguments, *["--common"] * common], rules, folder / name)


def _connect_site(
    superlink: str, cert: Path, key: Path, arguments: list[str], rules: SitePolicy, place: Path
) -> None:
    from fedhelix.deploy.node import connect
    from fedhelix.deploy.site_process import SiteProcess

    worker = SiteProcess(arguments, rules.max_seconds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        connect(superlink, cert, key, worker, place.with_name(f"{place.name}.node"))
    except KeyboardInterrupt:
        print(
            f"fedhelix: the site {place.name} is stopped; the same command goes on.",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    finally:
        worker.stop()


sites = App(invoke_without_command=True, add_completion=False)
sites.callback()(site)
sites.command("model")(site_model)
sites.command("predict")(site_predict)
