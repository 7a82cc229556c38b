"""The details of Flower that deploy/superlink.py relies on.

A failure here means: look at deploy/superlink.py before another version of Flower is supported.
"""

import asyncio
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import main as flowers
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from fedhelix.deploy import control, superlink
from fedhelix.deploy.app import pull_whole
from fedhelix.deploy.transport import pack

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


def test_objects_that_make_no_message_cost_their_sender_only():
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    message = Message(pack(b"content"), 7, "query")
    objects = get_all_nested_objects(message)
    contents = {key: one.deflate() for key, one in objects.items()}
    ids = [key for key in contents if key != message.object_id] + [message.object_id]
    assert pull_whole(object_ids=ids, pull_object_fn=contents.__getitem__) == contents
    for bad in (b"", b"Message 0 5\x00garbage", contents[ids[0]]):
        with pytest.raises(ObjectPullError):
            pull_whole(ids, {**contents, ids[-1]: bad}.__getitem__)
