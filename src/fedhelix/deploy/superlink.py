"""Flower's SuperLink with a door, a bell and fewer stairs; it takes the arguments of
`flower-superlink`.

Sites, commands and server apps talk to a SuperLink through one port, and whoever reaches the
commands' part can submit code. So requests from elsewhere get no further than `/v1/fleet/`, where
keys are checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
from flwr.superlink import main as superlink
from flwr.superlink.cli import flower_superlink
from flwr.superlink.routers.control import middlewares as control
from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from starlette.middleware import Middleware

FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"
ANY_LETTERS = FLEET + "pull-messages"
LETTERS = RUNTIME + "push-"  # the server app posts letters, then the objects in them
HOLD = 2.0  # seconds that a site's question stays open
QUIET = 0.02  # seconds without posting after which the letters are complete
ONLY: dict[Any, str] = {  # what each of Flower's layers is about; it lets pass everything else
    control.ControlSensitiveResponseMiddleware: CONTROL,
    control.ControlAuthenticationMiddleware: CONTROL,
    control.ControlLicenseMiddleware: CONTROL,
    control.ControlEventLogMiddleware: CONTROL,
    RuntimeTracingMiddleware: RUNTIME,
    NodeAuthMiddleware: FLEET,
    FleetEventLogMiddleware: FLEET,
}

App = Callable[..., Awaitable[None]]
Scope = MutableMapping[str, Any]


class LoopbackOnly:
    """Lets strangers reach the sites' part only."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if (
            scope["type"] != "http"
            or scope["path"].startswith(FLEET)
            or is_local(scope.get("client"))
        ):
            await self.app(scope, receive, send)
            return
        await send(
            {"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body", "body": b""})


def is_local(client: tuple[str, int] | None) -> bool:
    """Whether a request comes from this machine."""
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class LongPoll:
    """Tells a site that has no letters to ask again when there are new ones, so that it need not
    ask all the time.

    Only the empty answer is held back: a letter never goes into a connection that may have died
    meanwhile.
    """

    def __init__(self, app: App):
        self.app, self.rung, self.posting = app, asyncio.Event(), 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Hold an empty answer, listen to what is posted, and pass on everything else."""
        path, rung = scope.get("path", ""), self.rung

        async def send_in_time(event: Scope) -> None:
            if (
                event["type"] == "http.response.start"
                and (b"content-length", b"0") in event["headers"]
            ):
                with suppress(TimeoutError):
                    await asyncio.wait_for(rung.wait(), HOLD)
            await send(event)

        if not path.startswith(LETTERS):
            await self.app(scope, receive, send_in_time if path == ANY_LETTERS else send)
            return
        self.posting += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.posting -= 1
            asyncio.get_running_loop().call_later(QUIET, self.ring)

    def ring(self) -> None:
        """Wake all who wait, unless more is being posted."""
        if not self.posting:
            self.rung.set()
            self.rung = asyncio.Event()


class Shortcut:
    """Leads requests past a layer that is for others; Flower takes every request through every
    layer.
    """

    def __init__(self, app: App, layer: Middleware, part: str):
        self.app, self.part = app, part
        self.layered = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Through the layer or past it."""
        await (self.layered if scope.get("path", "").startswith(self.part) else self.app)(
            scope, receive, send
        )


def main() -> None:
    """Run Flower's SuperLink with our layers."""
    make = superlink.create_app

    def make_ours(*args: Any, **more: Any) -> Any:
        app = make(*args, **more)
        app.user_middleware = [
            Middleware(Shortcut, layer, ONLY[layer.cls]) if layer.cls in ONLY else layer
            for layer in app.user_middleware
        ]
        app.add_middleware(LongPoll)
        app.add_middleware(LoopbackOnly)
        return app

    superlink.create_app = make_ours
    flower_superlink()


if __name__ == "__main__":
    main()
