"""The commands `up` and `deploy …`; Flower is imported only when one of them runs."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhelix.cli.common import UNTOUCHED, Code, DataDir, Json, LogFormat, Out, Quiet, resumable
from fedhelix.cli.flags import settings
from fedhelix.cli.pages import App
from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file
from fedhelix.core.interrupts import sigterm_as_ctrl_c
from fedhelix.core.registry import is_known
from fedhelix.deploy import need_flower, submit
from fedhelix.deploy.hints import FOLDER, SERVER, named, where
from fedhelix.deploy.policy import RoundPolicy
from fedhelix.report.terminal import show_run
from fedhelix.report.wording import count
from fedhelix.runs import jobs
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from fedhelix.store.records import has_effect

if TYPE_CHECKING:
    from fedhelix.deploy.control import Control

Folder = Annotated[
    Path, typer.Option("--folder", help="Keys, logs and state of the deployment lie here.")
]
Superlink = Annotated[
    str | None, typer.Option(help="HOST:PORT on the server's machine (default: what is up here).")
]
Server = Annotated[str | None, typer.Option(help=f"HOST:PORT (default: what is up, or {SERVER}).")]
BegunWith = Annotated[
    str | None,
    typer.Option(help="HOST:PORT on the server's machine (default: as the run was begun)."),
]


def _policy_help() -> str:
    """All fields of the round policy with their defaults."""
    fields = dataclasses.fields(RoundPolicy)
    defaults = ["auto" if field.default is None else field.default for field in fields]
    return "The round policy: " + "; ".join(
        f"{field.name}, {field.metadata['meaning']} (default: {default})"
        for field, default in zip(fields, defaults, strict=True)
    )


PolicyTerms = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=_policy_help())]


def up(
    sites: Annotated[int, typer.Option(help="How many sites.", min=1)] = 3,
    data: Annotated[
        str, typer.Option(help="A data set's name, or FILE.npz; each site takes its part.")
    ] = "digits",
    data_dir: DataDir = None,
    folder: Folder = FOLDER,
    host: Annotated[
        str, typer.Option(help="Address to listen on: 127.0.0.1, or 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port to listen on (default: a free one).", min=1, max=65535)
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="policy.toml: what every site allows (default: safe limits)")
    ] = None,
    code: Code = None,
) -> None:
    """Start a server and some sites on this machine, with TLS and keys; Ctrl-C stops everything.

    Each site takes its part of the data set. Train across them from another terminal with `fedhelix
    deploy run`.
    """
    need_flower()
    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.localhost import LocalDeployment
    from fedhelix.deploy.site import Site
    from fedhelix.deploy.site_policy import SitePolicy

    site_code = SiteCode(code or [])
    rules = SitePolicy.read(policy)
    Site("site", data, folder, data_dir, True, rules, code=site_code).check_data()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    local = LocalDeployment(folder, sites, data, data_dir, host, port, policy, code or [])
    with contextlib.suppress(KeyboardInterrupt), local:
        here = f"{count(sites, 'site')} and a server at {local.address}"
        print(f"{here}; logs are in {local.folder / 'logs'}.")
        print(f"Train with: fedhelix deploy run genfed{where(None, folder)}", flush=True)
        while True:
            time.sleep(1)
            for name in local.revive():
                print(f"{name} had died and was started again.", file=sys.stderr, flush=True)
    print("everything is stopped.")


def keys(
    sites: Annotated[
        list[str] | None, typer.Argument(metavar="SITE...", help="Names of sites.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Names or addresses of the server, as sites call it.")
    ] = None,
    folder: Folder = FOLDER,
) -> None:
    """Make certificates for the server and a key pair for each site; existing files are kept.

    In a site's folder, which has the server's ca.pem, only key pairs are made.
    """
    need_flower()
    from fedhelix.deploy.keys import is_of_a_site, make_certificates, make_site_key, who_gets_what

    place, names = folder / "keys", sites or []
    if host or not names or not is_of_a_site(place):
        make_certificates(place, host or [])
    for name in names:
        print(make_site_key(place, name))
    print(who_gets_what(place))


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    folder: Folder = FOLDER,
    log_format: LogFormat = "text",
) -> None:
    """Run the server's SuperLink; other machines need a registered key to use it.

    It answers /healthz and /readyz to everybody.
    """
    need_flower()
    from fedhelix.deploy import localhost
    from fedhelix.deploy.logs import choose_format

    choose_format(log_format)
    localhost.become_superlink(folder, host, port)


def admit(
    sites: Annotated[
        list[str],
        typer.Argument(metavar="SITE...", help="Names of sites, whose SITE.pub are in keys/."),
    ],
    superlink: Server = None,
    folder: Folder = FOLDER,
) -> None:
    """Register the public keys of sites; a key that a site had before is withdrawn."""
    with _control(superlink, folder) as control:
        for name in sites:
            control.register(name, folder / "keys" / f"{name}.pub")
            print(f"{name} is admitted.")


def expel(
    sites: Annotated[list[str], typer.Argument(metavar="SITE...", help="Names of sites.")],
    superlink: Server = None,
    folder: Folder = FOLDER,
) -> None:
    """Withdraw the keys of sites permanently."""
    with _control(superlink, folder) as control:
        for name in sites:
            control.expel(name)
            print(f"{name} is expelled; its key is revoked.")


def sites(superlink: Server = None, folder: Folder = FOLDER) -> None:
    """List the sites whose keys are admitted, and say which of them are connected."""
    with _control(superlink, folder) as control:
        admitted, connected = control.admitted(), control.connected()
    for name in admitted:
        print(f"{name}: {'connected' if name in connected else 'not connected'}")
    if not admitted:
        print("no site is admitted.")


def backup(
    archive: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="The file to write.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders to keep with it.")
    ] = None,
    folder: Folder = FOLDER,
) -> None:
    """Keep a server's keys, registered sites and run folders in one file, also while it runs.

    The file holds private keys.
    """
    from fedhelix.deploy.backup import back_up

    print(f"{archive}: {back_up(folder, archive, runs or []):,} bytes, with private keys.")


def restore(
    archive: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="A backup.")],
    folder: Folder = FOLDER,
) -> None:
    """Make a server's folder anew from a backup; runs lie in its runs/."""
    from fedhelix.deploy import backup

    runs = backup.restore(archive, folder)
    print(f"{folder} is as it was; start it with: fedhelix deploy serve{where(None, folder)}")
    print(
        "keys that were withdrawn after the backup was made are admitted again: `fedhelix deploy "
        f"sites{where(None, folder)}` lists the sites that are admitted, and `fedhelix deploy "
        f"expel SITE{where(None, folder)}` withdraws a key."
    )
    for run in runs:
        print(f"go on with: fedhelix deploy resume {shlex.quote(str(run))}{where(SERVER, folder)}")
    if runs:
        print(f"(instead of {SERVER}, give the address that the server listens on)")


def deployment(superlink: str | None, folder: Path) -> tuple[Control, dict[str, Any]]:
    """The SuperLink to submit runs to, and the settings of runs that follow from its sites."""
    if superlink is not None:
        return _control(superlink, folder), {}
    need_flower()
    from fedhelix.deploy.localhost import read_state

    state = read_state(folder)
    return _control(state["address"], folder), {"clients": len(state["sites"]), **state["settings"]}


def _control(superlink: str | None, folder: Path) -> Control:
    """A client of the SuperLink's Control API that trusts the deployment's own authority."""
    need_flower()
    from fedhelix.deploy.control import Control
    from fedhelix.deploy.localhost import address

    return Control(superlink or address(folder), folder)


@partial(settings, hidden=submit.SIMULATION_SETTINGS)
def deploy_run(
    *,
    method: Annotated[
        str,
        typer.Argument(
            help="A name from `fedhelix methods`, a pair such as genfed+fedau, or your own FILE.py."
        ),
    ],
    out: Out = None,
    term: PolicyTerms = None,
    superlink: Superlink = None,
    folder: Folder = FOLDER,
    as_json: Json = False,
    quiet: Quiet = False,
    values: Any,
) -> None:
    """Train one method across the sites of a deployment, into a run folder like any other.

    The number of clients is the number of sites that `fedhelix up` started, or --clients.
    """
    control, derived = deployment(superlink, folder)
    with control, sigterm_as_ctrl_c():
        spec = make_spec(method, {**derived, **values})
        here = control.connected()  # without a SuperLink this fails, before a folder is made
        name = f"{spec.method.label}-{Path(spec.config.data).stem}-deployed"
        place, options = out or jobs.free_folder(name), where(superlink, folder)
        with resumable(place, "deploy resume", options, new=out is None, older=UNTOUCHED):
            created = submit.create(spec, place, term or [], options)
            if words := submit.awaited(here, created.config):
                typer.echo(f"fedhelix: {words}", err=True)
            done = submit.follow(control, created, quiet or None)
    show_run(place, done, as_json, advised=False)


def deploy_resume(
    run: Annotated[Path, typer.Argument(help="A run folder that `fedhelix deploy run` made.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change the number of rounds (rounds=100) or evaluation.",
        ),
    ] = None,
    superlink: BegunWith = None,
    folder: Folder = FOLDER,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run across sites that was stopped, from its last finished round."""
    begun = RunFolder.open(run)
    known = named(begun.where)
    superlink = superlink or known.get("--superlink")
    folder = Path(known.get("--folder", FOLDER)) if folder == FOLDER else folder
    control, _ = deployment(superlink, folder)
    going_on = resumable(run, "deploy resume", where(superlink, folder))
    with control, sigterm_as_ctrl_c(), going_on:
        if changes:
            submit.change(control, begun, changes)
        done = submit.follow(control, begun, quiet or None)
    show_run(run, done, as_json, advised=False)


def deploy_model(
    run: Annotated[Path, typer.Argument(help="A run folder that `fedhelix deploy run` made.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path(
        "model.safetensors"
    ),
) -> None:
    """Write the server's model after the last round of a run into one file.

    FILE.safetensors has the entries of the network's `state_dict`, for `load_state_dict`. FILE.onnx
    and FILE.pt2 are programs.
    """
    from fedhelix.deploy.finished import run_of_sites
    from fedhelix.federation.export import check_suffix, write_network

    check_suffix(out)
    folder = RunFolder.open(run)
    if "deployment" not in folder.config:
        raise UserError(
            f"'{run}' is no run of a deployment; in Python, load_run({str(run)!r}).model() is "
            "its server's model."
        )
    loaded = run_of_sites(folder)
    module, rounds = loaded.network(), loaded.state.round
    writable_file(out)
    write_network(module, loaded.federation.data, out)
    named = str(folder.config["method"]["name"])  # as the sites and their logs call it
    method = named if is_known(named) else loaded.federation.method.label
    words = f"{rounds} round{'s' * (rounds != 1)} of {method}"
    effective = sum(map(has_effect, loaded.records))
    words += f", {effective} of which changed it" if effective < rounds else ""
    print(f"fedhelix: the server's model after {words}", file=sys.stderr)
    print(out)


commands = App(
    help="Train across real machines, on Flower.", no_args_is_help=True, add_completion=False
)
for command in (keys, admit, expel, sites, serve, backup, restore):
    commands.command()(command)
commands.command("run")(deploy_run)
commands.command("resume")(deploy_resume)
commands.command("model")(deploy_model)
