"""Flower's SuperLink with a door: from other machines only the sites' part of it can be reached.

Sites, commands and server apps talk to a SuperLink through one port, and whoever reaches the commands' part can
submit code. So requests from elsewhere get no further than `/v1/fleet/`, where keys are checked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.superlink import main as superlink
from flwr.superlink.cli import flower_superlink

OPEN = "/v1/fleet/"
Scope = MutableMapping[str, Any]


class Door:
    """An ASGI middleware that lets strangers reach the sites' part only."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"].startswith(OPEN) or is_local(scope.get("client")):
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def is_local(client: tuple[str, int] | None) -> bool:
    """Whether a request comes from this machine."""
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """`flower-superlink` with the door in front; it takes the same arguments."""
    make = superlink.create_app

    def make_with_door(*args: Any, **more: Any) -> Any:
        app = make(*args, **more)
        app.add_middleware(Door)
        return app

    superlink.create_app = make_with_door
    flower_superlink()


if __name__ == "__main__":
    main()
