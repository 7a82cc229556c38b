"""The ServerApp and ClientApp that the submitted Flower app bundle points at, for any method."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid

from fedhelix.core.errors import UserError
from fedhelix.deploy.packing import pack, unpack
from fedhelix.deploy.replies import WholeReplies
from fedhelix.deploy.server import serve_run
from fedhelix.deploy.site import Site
from fedhelix.deploy.submit import REFUSED

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def run_server(grid: Grid, context: Context) -> None:
    """Serve the run whose folder the run configuration names."""
    assert isinstance(grid, HttpGrid)
    grid.pull_messages = WholeReplies(grid).pull_messages  # type: ignore[method-assign]
    try:
        serve_run(grid, Path(str(context.run_config["run"])), quiet=True)
    except UserError as problem:  # Flower hands on the words only
        raise UserError(f"{REFUSED}{problem}") from problem


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """Answer as `fedhelix site` does, from Flower's own SuperNode: each answer is a cold start."""
    settings = context.node_config
    site = Site(str(settings["site"]), str(settings["data"]), str(settings["folder"]))
    return Message(pack(site.answer(unpack(message))), reply_to=message)
