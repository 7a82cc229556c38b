"""What a Flower app bundle points at. Any method of the registry runs through these two."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import http_grid

from fedhelix.deploy.server import serve
from fedhelix.deploy.site import Site
from fedhelix.deploy.transport import EARLY, contents, envelope

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def play(grid: Grid, context: Context) -> None:
    """Play the run in the folder that the run's configuration names."""
    http_grid.pull_objects = partial(
        http_grid.pull_objects, **EARLY
    )  # Flower itself would wait a second, then two
    serve(grid, Path(str(context.run_config["run"])), quiet=True)


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """A site behind Flower's own SuperNode: the same answers as `fedhelix site`, but a cold start
    for each.
    """
    given = context.node_config
    site = Site(str(given["site"]), str(given["data"]), str(given["folder"]))
    return Message(envelope(site.answer(contents(message))), reply_to=message)
