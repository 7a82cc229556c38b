"""Flower's SuperLink with four middlewares of ours; it takes the arguments of `flower-superlink`.

Sites, commands and server apps share one port, and whoever reaches the Control API can submit
code. `LoopbackOnly` therefore limits other machines to `/v1/fleet/`, where Flower checks keys.
`LongPoll` spares sites from polling. `Scoped` skips Flower's middlewares for requests they would
only pass on. `Probes` tells container runtimes whether it is up. `activate_node` says why a site is
turned away, and forgets what one that comes back has not taken; to `deactivate_node` it is no error
that a site is away already, and `list_nodes` calls no site connected that has not come back since
the server was started. The SuperExec is started from `superexec.py`. All of them rely on details of
Flower 1.41; tests/deploy/test_flower.py checks them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging.config
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.proto.fleet_pb2 import DeactivateNodeResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.error import FlowerError
from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
from flwr.superlink import main as superlink
from flwr.superlink.cli import flower_superlink
from flwr.superlink.routers.control import middlewares as control
from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.middleware import Middleware

from fedhelix.deploy.health import probe
from fedhelix.deploy.keys import KEY_IN_USE, KEY_WITHDRAWN
from fedhelix.deploy.logs import format_all

STOP_SECONDS = 3  # for requests that are being answered when the server stops
FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"
PULL = FLEET + "pull-messages"
PUSH = RUNTIME + "push-"  # the server app pushes messages, then the objects in them
HOLD_SECONDS = 2.0  # that an empty answer to a site is held back
QUIET_SECONDS = 0.02  # without a push, after which the messages are complete
# The paths that each of Flower's middlewares acts on; it passes all others on. Skipping it for
# those saves about 18 % of the SuperLink's processor time, which is most of a round's overhead.
SCOPES: dict[Any, str] = {
    control.ControlSensitiveResponseMiddleware: CONTROL,
    control.ControlAuthenticationMiddleware: CONTROL,
    control.ControlLicenseMiddleware: CONTROL,
    control.ControlEventLogMiddleware: CONTROL,
    RuntimeTracingMiddleware: RUNTIME,
    NodeAuthMiddleware: FLEET,
    FleetEventLogMiddleware: FLEET,
}

_activate_node, _deactivate_node = fleet_handlers.activate_node, fleet_handlers.deactivate_node
_list_nodes = control_handlers.list_nodes
command_line: Any = sys.modules["flwr.superlink.cli.flower_superlink"]
_superexec_command = command_line._get_superexec_command

App = Callable[..., Awaitable[None]]
Scope = MutableMapping[str, Any]


class LoopbackOnly:
    """Refuses requests from other machines, except to the Fleet API."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 403."""
        if (
            scope["type"] != "http"
            or scope["path"].startswith(FLEET)
            or is_loopback(scope.get("client"))
        ):
            await self.app(scope, receive, send)
            return
        await answer_empty(send, 403)


def is_loopback(client: tuple[str, int] | None) -> bool:
    """Whether a request comes from this machine."""
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class LongPoll:
    """Holds the answer to a site without messages until there may be new ones.

    Only the empty answer is held: a message never goes into a connection that may have died in
    the meantime.
    """

    def __init__(self, app: App):
        self.app, self.pushed, self.pushing = app, asyncio.Event(), 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Hold empty answers, watch for pushes, and pass on everything else."""
        path, pushed = scope.get("path", ""), self.pushed

        async def hold_empty(event: Scope) -> None:
            if (
                event["type"] == "http.response.start"
                and (b"content-length", b"0") in event["headers"]
            ):
                with suppress(TimeoutError):
                    await asyncio.wait_for(pushed.wait(), HOLD_SECONDS)
            await send(event)

        if not path.startswith(PUSH):
            await self.app(scope, receive, hold_empty if path == PULL else send)
            return
        self.pushing += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.pushing -= 1
            asyncio.get_running_loop().call_later(QUIET_SECONDS, self.release)

    def release(self) -> None:
        """Release all held answers, unless more is being pushed."""
        if not self.pushing:
            self.pushed.set()
            self.pushed = asyncio.Event()


class Scoped:
    """Applies a middleware to the paths below a prefix only."""

    def __init__(self, app: App, middleware: Middleware, prefix: str):
        self.app, self.prefix = app, prefix
        self.wrapped = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request through the middleware, or past it."""
        inside = scope.get("path", "").startswith(self.prefix)
        await (self.wrapped if inside else self.app)(scope, receive, send)


class Probes:
    """Answers /healthz and /readyz to everybody; ready from start-up until shutdown."""

    def __init__(self, app: App):
        self.app, self.ready = app, False

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a probe, watch for start-up and shutdown, and pass on everything else."""

        async def watch(event: Scope) -> None:
            if event["type"].startswith("lifespan."):
                self.ready = event["type"] == "lifespan.startup.complete"
            await send(event)

        status = probe(scope.get("path", ""), self.ready) if scope["type"] == "http" else None
        if status is None:
            await self.app(scope, receive, watch if scope["type"] == "lifespan" else send)
        else:
            await answer_empty(send, status)


async def answer_empty(send: Any, status: int) -> None:
    """A status without content."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def add_middlewares(app: Any) -> None:
    """Scope Flower's middlewares and put ours around them; probes and loopback outermost."""
    app.user_middleware = [
        Middleware(Scoped, middleware, SCOPES[middleware.cls])
        if middleware.cls in SCOPES
        else middleware
        for middleware in app.user_middleware
    ]
    app.add_middleware(LongPoll)
    app.add_middleware(LoopbackOnly)
    app.add_middleware(Probes)


def activate_node(request: Any, state: Any) -> Any:
    """Connect a site as Flower does; one whose key is in use or was withdrawn is told so.

    Flower gives all sites that it turns away the same answer. Requests are signed with the key
    that they name, so nobody else learns of it.
    """
    forget_untaken(request.public_key, state)
    try:
        return _activate_node(request=request, state=state)
    except FlowerError as problem:
        withdrawn = state.get_node_info(statuses=[NodeStatus.UNREGISTERED])
        if state.get_node_id_by_public_key(request.public_key) is not None:
            why = KEY_IN_USE
        elif any(node.public_key == request.public_key for node in withdrawn):
            why = KEY_WITHDRAWN
        else:
            raise
        raise FlowerError(problem.code, problem.message, why) from problem


def forget_untaken(public_key: bytes, state: Any) -> None:
    """Forget the messages that a site has not taken before it went away. Their senders send them
    again to a site that has come back, but for those of a round that is over: it would train, and
    spend privacy budget, in vain.
    """
    node = state.get_node_id_by_public_key(public_key)
    if node and state.get_node_info(node_ids=[node], statuses=[NodeStatus.OFFLINE]):
        state.get_message_ins(node, None)  # whatever it returns counts as taken


def deactivate_node(request: Any, state: Any) -> Any:
    """Disconnect a site as Flower does; that it is not connected is no error."""
    with suppress(FlowerError):
        return _deactivate_node(request=request, state=state)
    return DeactivateNodeResponse()


def list_nodes(request: Any, account: Any, state: Any, since: float) -> Any:
    """List sites as Flower does; those that were not heard of `since` then are not connected.

    For a minute Flower takes a site for connected that was so when the server ended.
    """
    answer = _list_nodes(request, account, state)
    for node in answer.nodes_info:
        if node.status == NodeStatus.ONLINE and last_heard(node) < since:
            node.status = NodeStatus.OFFLINE
    return answer


def last_heard(node: NodeInfo) -> float:
    """When a connected site was last heard of, in seconds since the epoch."""
    return float(node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval)


def superexec_command(*args: Any, **more: Any) -> list[str]:
    """As Flower starts its SuperExec, with our log lines."""
    _, *arguments = _superexec_command(*args, **more)
    return [sys.executable, "-m", "fedhelix.deploy.superexec", *arguments]


def main() -> None:
    """Run Flower's SuperLink with our middlewares."""
    create_app, configure = superlink.create_app, logging.config.dictConfig

    def configured(config: Any) -> None:
        configure(config)  # uvicorn's loggers
        format_all()

    def create(*args: Any, **more: Any) -> Any:
        app = create_app(*args, **more)
        add_middlewares(app)
        return app

    superlink.create_app, logging.config.dictConfig = create, configured
    fleet_handlers.activate_node = activate_node
    fleet_handlers.deactivate_node = deactivate_node
    control_handlers.list_nodes = partial(list_nodes, since=time.time())
    command_line._get_superexec_command = superexec_command
    # A connection that was just being made would keep a stopped server waiting for ever.
    uvicorn.run = partial(uvicorn.run, timeout_graceful_shutdown=STOP_SECONDS)
    format_all()
    flower_superlink()


if __name__ == "__main__":
    main()
