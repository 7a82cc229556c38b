"""The details of Flower that deploy/superlink.py and deploy/replies.py rely on.

A failure here means: look at deploy/superlink.py before another version of Flower is supported.
"""

import asyncio
import logging
import sys
import time
import tomllib
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import TaskType
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.logger import ConsoleHandler
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import main as flowers
from flwr.superlink.federation.noop_federation_manager import (
    NOOP_FEDERATION_ID,
    NOOP_FLWR_AID,
    NoOpFederationManager,
)
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from fedhelix.deploy import control, replies, superlink
from fedhelix.deploy.logs import format_all
from fedhelix.deploy.packing import pack, unpack

SUPPORTED = "1.41"  # minor version; any patch release of it


def test_the_installed_flower_is_supported():
    installed = version("flwr")
    assert installed.split(".")[:2] == SUPPORTED.split("."), (
        f"fedhelix supports Flower ~={SUPPORTED}.0, but {installed} is installed; check what "
        "deploy/superlink.py changes in Flower, then raise SUPPORTED here and in pyproject.toml."
    )


def test_everything_names_the_supported_version():
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert extras["flower"] == [f"flwr~={SUPPORTED}.0"]
    assert f'flwr-version-target = "{SUPPORTED}.0"' in control.BUNDLE


def test_the_superlink_has_what_we_hook_into():
    assert callable(getattr(flowers, "create_app", None)), (
        "flwr.superlink.main.create_app is gone; deploy/superlink.py replaces it."
    )
    command = sys.modules["flwr.superlink.cli.flower_superlink"]
    assert not hasattr(command, "create_app"), (
        "flower-superlink imports create_app before deploy/superlink.py can replace it."
    )
    parameters = ("127.0.0.1:1", None, None, 1, False)
    assert superlink._superexec_command(*parameters)[0] == "flower-superexec", (
        "the SuperLink starts its SuperExec in another way; deploy/superlink.py replaces that."
    )
    assert superlink.superexec_command(*parameters)[2] == "fedhelix.deploy.superexec"
    app = flowers.create_app()
    assert hasattr(app, "user_middleware") and hasattr(app, "add_middleware"), (
        "the SuperLink's app takes no middlewares any more; deploy/superlink.py adds some."
    )
    paths = app.openapi()["paths"]
    assert superlink.PULL in paths, f"the SuperLink has no {superlink.PULL}, which LongPoll holds."
    for name in ("messages", "object"):
        path = superlink.PUSH + name
        assert path in paths, f"the SuperLink has no {path}, which LongPoll watches."


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
def test_a_site_that_comes_back_is_not_given_what_it_did_not_take(tmp_path):
    """Whoever still waits for an answer sends it again; other rounds are over."""
    database = str(tmp_path / "superlink.db")
    factory = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database))
    state, nothing = factory.state(), (None, None, None, {})
    run = state.create_run(
        *nothing, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP.value
    )
    node = state.create_node(NOOP_FLWR_AID, "", b"key", 30.0)
    joins = ActivateNodeRequest(public_key=b"key", heartbeat_interval=30.0)

    def send(number):
        ids = {"message_id": f"m{number}", "reply_to_message_id": "", "group_id": ""}
        nodes = {"src_node_id": 1, "dst_node_id": node}
        metadata = Metadata(
            run, **ids, **nodes, created_at=time.time(), ttl=600.0, message_type="query"
        )
        return state.store_message_ins(make_message(metadata, RecordDict()))

    assert superlink.activate_node(joins, state).node_id == node and send(1)
    superlink.deactivate_node(DeactivateNodeRequest(node_id=node), state)
    assert send(2)
    superlink.activate_node(joins, state)
    assert send(3)
    with pytest.raises(FlowerError):  # another process with the same key takes nothing from it
        superlink.activate_node(joins, state)
    assert [message.metadata.message_id for message in state.get_message_ins(node, None)] == ["m3"]


def test_only_probes_come_before_the_loopback_check(monkeypatch):
    apps = []
    monkeypatch.setattr(flowers, "create_app", flowers.create_app)  # restored after the test
    monkeypatch.setattr(superlink, "flower_superlink", lambda: apps.append(flowers.create_app()))
    superlink.main()
    ours = [middleware.cls for middleware in apps[0].user_middleware[:3]]
    assert ours == [superlink.Probes, superlink.LoopbackOnly, superlink.LongPoll]


def test_every_middleware_of_the_superlink_is_known():
    """A middleware that Flower adds is left as it is; a renamed one would cost time unnoticed."""
    known = {middleware.cls for middleware in flowers._get_middleware()}
    unscoped = known - set(superlink.SCOPES)
    assert set(superlink.SCOPES) <= known
    assert {cls.__name__ for cls in unscoped} == {
        "BaseHTTPMiddleware",  # translates errors
        "ProtobufTranslationMiddleware",
    }


PATHS = (superlink.FLEET, superlink.CONTROL, superlink.RUNTIME, "/docs")
OUTSIDE = [
    pytest.param(cls, path, id=f"{cls.__name__}-{path}")
    for cls, scope in superlink.SCOPES.items()
    for path in PATHS
    if path != scope
]


@pytest.mark.parametrize(("cls", "path"), OUTSIDE)
def test_a_scoped_middleware_only_passes_other_requests_on(cls, path):
    """Otherwise skipping it would skip a check."""
    response = Response()

    async def endpoint(request):
        return response

    app = SimpleNamespace(state=SimpleNamespace())
    scope = {"type": "http", "method": "POST", "path": path + "x", "headers": [], "app": app}
    scope |= {"query_string": b"", "server": ("127.0.0.1", 8000), "scheme": "https"}
    assert issubclass(cls, BaseHTTPMiddleware)
    passed = asyncio.run(cls(app).dispatch(Request(scope), endpoint))
    assert passed is response and response.status_code == 200


class Objects:
    """The SuperLink's side of one answer, whose objects may be missing."""

    def __init__(self, contents, tree):
        self.contents, self.tree, self.is_known, self.confirmed = contents, tree, True, []
        self.asked, self.pulled = [], []

    def PullMessages(self, request):
        self.asked.append(set(request.message_ids))
        head = SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id="request"))
        found = "request" in request.message_ids
        return SimpleNamespace(
            messages_list=[head] * found, message_object_trees=[self.tree] * found
        )

    def PullObject(self, request):
        content = self.contents.get(request.object_id)
        self.pulled += [request.object_id] * (content is not None)
        return SimpleNamespace(
            object_found=self.is_known,
            object_available=content is not None,
            object_content=content,
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


@pytest.fixture
def announced(monkeypatch):
    """An answer, its objects, and the SuperLink and the grid with them."""
    monkeypatch.setattr(replies, "WAIT_SECONDS", 0.1)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    message = Message(pack(b"content"), 7, "query")
    objects = get_all_nested_objects(message)
    contents = {key: one.deflate() for key, one in objects.items()}
    link = Objects(contents, get_object_tree(message))
    grid = SimpleNamespace(_runtime_client=link, run=SimpleNamespace(run_id=1), node=Node())
    return message.object_id, link, replies.WholeReplies(grid)


def test_objects_that_make_no_message_cost_their_sender_only(announced):
    message_id, link, whole = announced
    (message,) = whole.pull_messages(["request", "other"])
    assert unpack(message) == b"content" and link.confirmed == [message_id]
    other = next(content for key, content in link.contents.items() if key != message_id)
    for bad in (b"", b"Message 0 5\x00garbage", other):
        link.contents[message_id] = bad
        (message,) = whole.pull_messages(["request"])
        assert message.error.code == ErrorCode.MESSAGE_UNAVAILABLE
        assert message.metadata.reply_to_message_id == "request"
    assert link.confirmed == [message_id]


def test_an_answer_that_is_announced_only_is_put_aside(announced):
    message_id, link, whole = announced
    content = link.contents.pop(message_id)
    begun = time.monotonic()
    for _ in range(2):
        assert whole.pull_messages(["request", "other"]) == []
    assert time.monotonic() - begun < 10 and link.asked == [{"request", "other"}, {"other"}]
    link.contents[message_id] = content
    assert len(whole.pull_messages(["request", "other"])) == 1
    assert len(link.pulled) == len(set(link.pulled)), "an object was pulled twice"
    del link.contents[message_id]
    assert whole.pull_messages(["request"]) == []
    assert whole.pull_messages(["again"]) == []  # the site has got the request anew
    link.contents[message_id] = content
    assert whole.pull_messages(["again"]) == [] and link.asked[-1] == {"again"}


def test_an_answer_whose_rest_never_comes_is_an_error(announced):
    message_id, link, whole = announced
    del link.contents[message_id]
    assert whole.pull_messages(["request"]) == []
    link.is_known = False  # its time is over
    (message,) = whole.pull_messages(["request"])
    assert message.error.code == ErrorCode.MESSAGE_UNAVAILABLE and link.confirmed == []
    assert "the answer did not arrive as a whole" in message.error.reason


def test_a_log_that_is_no_terminal_has_no_colours(monkeypatch):
    stream = StringIO()
    handler = ConsoleHandler(stream=stream)
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [handler])
    format_all()
    handler.emit(logging.makeLogRecord({"levelname": "INFO", "msg": "here"}))
    assert stream.getvalue().split() == ["INFO", ":", "here"]
    handler.colored = True
    stream.isatty = lambda: True
    format_all()
    assert handler.colored
