"""Our middlewares around Flower's SuperLink: who is refused, who waits, and what is skipped."""

import asyncio

import pytest
from starlette.middleware import Middleware

from fedhelix.deploy import superlink

PULL, PUSH = "/v1/fleet/pull-messages", "/v1/runtime/push-object"


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
def test_other_machines_reach_the_fleet_api_only(client, path, status):
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


def answering(length, seconds=0.0):
    """A SuperLink that answers with so many bytes; a push takes it a while."""

    async def app(scope, receive, send):
        await asyncio.sleep(seconds if scope["path"] == PUSH else 0)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        )

    return app


HOLD = 30.0  # seconds, so that a busy machine is told from an answer that was held


@pytest.fixture(autouse=True)
def long_hold(monkeypatch):
    monkeypatch.setattr(superlink, "HOLD_SECONDS", HOLD)


@pytest.mark.parametrize(
    ("length", "path"), [(b"7", PULL), (b"0", "/v1/fleet/push-object"), (b"0", PUSH)]
)
def test_only_empty_answers_are_held(length, path):
    status, seconds = asyncio.run(call(superlink.LongPoll(answering(length)), path))
    assert status == 200 and seconds < HOLD


def test_a_site_without_messages_waits_until_all_of_them_are_pushed():
    async def scene():
        poll = superlink.LongPoll(answering(b"0", seconds=0.2))
        waiting = [asyncio.create_task(call(poll, PULL)) for _ in range(2)]
        await asyncio.sleep(0.1)
        first = asyncio.create_task(call(poll, PUSH))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, call(poll, PUSH))
        return [await answer for answer in waiting]

    # From 0.1 to 0.3 s one part is pushed, from 0.2 to 0.4 s another one.
    for status, seconds in asyncio.run(scene()):
        assert status == 200 and 0.35 < seconds < HOLD


def test_an_answer_is_not_held_for_ever(monkeypatch):
    monkeypatch.setattr(superlink, "HOLD_SECONDS", 0.1)
    status, seconds = asyncio.run(call(superlink.LongPoll(answering(b"0")), PULL))
    assert status == 200 and 0.09 < seconds < 10


def test_a_message_pushed_during_a_pull_is_not_overlooked():
    async def scene():
        async def app(scope, receive, send):
            poll.release()  # after the request, before the answer
            await answering(b"0")(scope, receive, send)

        poll = superlink.LongPoll(app)
        return await call(poll, PULL)

    assert asyncio.run(scene())[1] < HOLD


@pytest.mark.parametrize(
    ("path", "through"), [(PULL, ["middleware", "app"]), (PUSH, ["app"]), ("/docs", ["app"])]
)
def test_a_middleware_is_skipped_outside_its_scope(path, through):
    seen = []

    async def app(scope, receive, send):
        seen.append("app")

    def middleware(inner):
        async def wrapped(*request):
            seen.append("middleware")
            await inner(*request)

        return wrapped

    asyncio.run(
        superlink.Scoped(app, Middleware(middleware), superlink.FLEET)(
            {"type": "http", "path": path}, None, None
        )
    )
    assert seen == through
