"""What stands in front of Flower's SuperLink: who gets in, who waits, and which layers a request
goes through.
"""

import asyncio

import pytest
from starlette.middleware import Middleware

from fedhelix.deploy import superlink

ASK, POST = "/v1/fleet/pull-messages", "/v1/runtime/push-object"


@pytest.mark.parametrize(
    ("client", "path", "status"),
    [
        ("127.0.0.1", "/v1/control/start-run", 200),
        ("::1", "/v1/runtime/pull-messages", 200),
        ("10.0.0.7", "/v1/fleet/pull-messages", 200),
        ("10.0.0.7", "/v1/control/start-run", 403),
        ("10.0.0.7", "/v1/runtime/acquire-task", 403),
        ("10.0.0.7", "/v1/fleet", 403),
        ("10.0.0.7", "/docs", 403),
        (None, "/v1/control/start-run", 403),
    ],
)
def test_strangers_reach_the_sites_part_only(client, path, status):
    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(event):
        seen.append(event.get("status"))

    scope = {"type": "http", "path": path, "client": client and (client, 5000)}
    asyncio.run(superlink.LoopbackOnly(app)(scope, None, send))
    assert seen[0] == status


async def call(app, path):
    """The status of a request and the seconds until it was there."""
    loop = asyncio.get_running_loop()
    begun, seen = loop.time(), []

    async def send(event):
        seen.append((event.get("status"), loop.time() - begun))

    await app({"type": "http", "path": path}, None, send)
    return seen[0]


def saying(length, seconds=0.0):
    """A SuperLink that answers with so many bytes; posting takes it a while."""

    async def app(scope, receive, send):
        await asyncio.sleep(seconds if scope["path"] == POST else 0)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        )

    return app


@pytest.mark.parametrize(
    ("length", "path"), [(b"7", ASK), (b"0", "/v1/fleet/push-object"), (b"0", POST)]
)
def test_whoever_gets_something_need_not_wait(length, path):
    status, seconds = asyncio.run(call(superlink.LongPoll(saying(length)), path))
    assert status == 200 and seconds < 1


def test_a_site_without_letters_waits_until_all_of_them_are_posted():
    async def scene():
        bell = superlink.LongPoll(saying(b"0", seconds=0.2))
        waiting = [asyncio.create_task(call(bell, ASK)) for _ in range(2)]
        await asyncio.sleep(0.1)
        first = asyncio.create_task(call(bell, POST))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, call(bell, POST))
        return [await objective for objective in waiting]

    # From 0.1 to 0.3 s one part is posted, from 0.2 to 0.4 s another one.
    for status, seconds in asyncio.run(scene()):
        assert status == 200 and 0.35 < seconds < 2


def test_a_site_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(superlink, "HOLD", 0.1)
    status, seconds = asyncio.run(call(superlink.LongPoll(saying(b"0")), ASK))
    assert status == 200 and 0.09 < seconds < 2


def test_a_letter_posted_while_a_site_asks_is_not_overlooked():
    async def scene():
        async def app(scope, receive, send):
            bell.ring()  # after the question, before the answer
            await saying(b"0")(scope, receive, send)

        bell = superlink.LongPoll(app)
        return await call(bell, ASK)

    assert asyncio.run(scene())[1] < 1


@pytest.mark.parametrize(
    ("path", "through"), [(ASK, ["layer", "app"]), (POST, ["app"]), ("/docs", ["app"])]
)
def test_requests_pass_only_through_layers_that_are_about_them(path, through):
    seen = []

    async def app(scope, receive, send):
        seen.append("app")

    def layer(inner):
        async def layered(*request):
            seen.append("layer")
            await inner(*request)

        return layered

    asyncio.run(
        superlink.Shortcut(app, Middleware(layer), superlink.FLEET)(
            {"type": "http", "path": path}, None, None
        )
    )
    assert seen == through


def test_every_layer_of_the_superlink_is_known():
    """A layer that Flower adds is left where it is; one that is renamed would cost time unnoticed."""
    flowers = {layer.cls for layer in superlink.superlink._get_middleware()}
    assert (
        set(superlink.ONLY) <= flowers and len(flowers) == len(superlink.ONLY) + 2
    )  # errors, and bytes to requests
