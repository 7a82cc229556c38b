"""The ServerApp and ClientApp that the submitted Flower app bundle points at, for any method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid import http_grid

from fedhelix.deploy.schema import clipped
from fedhelix.deploy.server import serve_run
from fedhelix.deploy.site import Site
from fedhelix.deploy.transport import PULL_RETRIES, pack, unpack

server_app = ServerApp()
client_app = ClientApp()


def pull_whole(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
    """The objects of one message, the last of which is the message.

    Unlike with Flower's own function, objects that make no message cost their sender's answer, not
    those of all others. Its first retries come sooner, too.
    """
    contents = pull_objects(object_ids, pull_object_fn, **PULL_RETRIES)
    try:
        message = inflate_object_from_contents(object_ids[-1], dict(contents))
    except Exception as problem:
        raise ObjectPullError(object_ids[-1], clipped(repr(problem))) from None
    if not isinstance(message, Message):
        raise ObjectPullError(object_ids[-1], f"it is no message, but a {type(message).__name__}")
    return contents


@server_app.main()
def run_server(grid: Grid, context: Context) -> None:
    """Serve the run whose folder the run configuration names."""
    http_grid.pull_objects = pull_whole  # type: ignore[assignment]
    serve_run(grid, Path(str(context.run_config["run"])), quiet=True)


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """Answer as `fedhelix site` does, from Flower's own SuperNode: each answer is a cold start."""
    settings = context.node_config
    site = Site(str(settings["site"]), str(settings["data"]), str(settings["folder"]))
    return Message(pack(site.answer(unpack(message))), reply_to=message)
