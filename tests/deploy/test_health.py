"""Probes of site and server, and logs for machines."""

import asyncio
import contextlib
import io
import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings

import httpx
import pytest
from flwr.app import Message
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.task_identity import TaskIdentity

from fedhelix.cli import app
from fedhelix.core.errors import UserError
from fedhelix.deploy import connection, localhost, logs, superlink
from fedhelix.deploy.health import HealthServer, answers
from fedhelix.deploy.keys import make_certificates, make_site_key
from fedhelix.deploy.packing import pack
from fedhelix.deploy.site import Site


def test_a_site_is_alive_at_once_and_ready_once_it_is_connected():
    connected = []
    with HealthServer("127.0.0.1", 0, lambda: bool(connected)) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert answers(f"{url}/healthz") and not answers(f"{url}/readyz")
        connected.append(True)
        assert answers(f"{url}/readyz")
        assert not answers(f"{url}/other") and not answers(f"{url}/")
        with pytest.raises(UserError, match=f"cannot be answered at 127.0.0.1:{server.port}"):
            HealthServer("127.0.0.1", server.port, lambda: True)
    assert not answers(f"{url}/healthz")


def test_the_superlink_is_ready_from_start_up_to_shutdown():
    """As uvicorn calls it: one lifespan, and requests meanwhile, which may come from anywhere."""
    events = iter(["startup", "shutdown"])

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            for event in events:
                await send({"type": f"lifespan.{event}.complete"})
                seen.append(await statuses())
        else:
            await superlink.answer_empty(send, 404)

    outer, seen = superlink.Probes(superlink.LoopbackOnly(app)), []

    async def statuses():
        found = []

        async def send(event):
            found.extend([event["status"]] if "status" in event else [])

        for path in ("/healthz", "/readyz", "/docs"):
            await outer({"type": "http", "path": path, "client": ("10.0.0.7", 1)}, None, send)
        return found

    async def life():
        seen.append(await statuses())

        async def ignore(event):
            pass

        await outer({"type": "lifespan"}, None, ignore)

    asyncio.run(life())
    assert seen == [[200, 503, 403], [200, 200, 403], [200, 503, 403]]


def test_lines_are_sentences_or_json(monkeypatch, capsys):
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    logs.say("connected to a:1")
    monkeypatch.setenv(logs.VARIABLE, "json")
    logs.say('a "quoted"\nline')
    with pytest.raises(SystemExit):
        app._stop("there is no file 'x'.", 2)
    plain, line, stopped = capsys.readouterr().err.splitlines()
    assert plain == "fedhelix: connected to a:1."
    assert json.loads(stopped)["message"] == "there is no file 'x'."
    entry = json.loads(line)
    assert entry["message"] == 'a "quoted"\nline.' and entry["level"] == "info"
    with pytest.raises(UserError, match="--log-format is text or json, not 'xml'"):
        logs.choose_format("xml")


def test_lines_of_several_threads_do_not_mix(monkeypatch):
    """A stream on which the other thread always comes between two calls of `write`."""
    taken, turn = [], threading.Barrier(2, timeout=20)

    class Slow(io.StringIO):
        def write(self, text):
            taken.append(text)
            time.sleep(0.001)

    monkeypatch.setattr(sys, "stderr", Slow())
    monkeypatch.setenv(logs.VARIABLE, "json")

    def speak():
        turn.wait()
        for _ in range(20):
            logs.say("here")
            logs.write_traceback(ValueError("x"))

    threads = [threading.Thread(target=speak) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    lines = "".join(taken).splitlines()
    assert len(lines) == 80 and all(json.loads(line)["message"] for line in lines)


def test_refusals_are_warnings(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(logs.VARIABLE, "json")
    Site("north", "digits", tmp_path).answer(b"nonsense")
    assert json.loads(capsys.readouterr().err)["level"] == "warning"


def test_what_others_write_is_json_too(monkeypatch, capsys):
    """Loggers of other libraries, warnings, and exceptions that nobody expected."""
    for place, name in ((warnings, "showwarning"), (sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(place, name, getattr(place, name))
    logger = logging.getLogger("fedhelix-test-logs")
    logger.addHandler(handler := logging.StreamHandler())
    monkeypatch.setenv(logs.VARIABLE, "json")
    logs.format_all()
    try:
        raise ValueError("x")
    except ValueError:
        logs.write_traceback()
        problem = sys.exc_info()
    record = logger.makeRecord("a", logging.ERROR, "f", 1, "%s!", ("no",), problem)
    text = json.loads(handler.format(record))
    assert text["level"] == "error" and text["message"].startswith("no!\nTraceback")
    sys.excepthook(*problem)
    threading.excepthook(threading.ExceptHookArgs([*problem, None]))
    warnings.showwarning(UserWarning("careful"), UserWarning, "file.py", 1)
    *raised, warned = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["message"].splitlines()[-1] for one in raised] == ["ValueError: x"] * 3
    assert warned["level"] == "warning" and warned["message"] == "careful"


def test_all_lines_of_a_server_are_json(tmp_path):
    make_certificates(tmp_path / "keys", [])
    words = ["--host=127.0.0.1", f"--port={localhost.free_port()}", f"--folder={tmp_path}"]
    path, until = tmp_path / "log", time.monotonic() + 60
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedhelix", "deploy", "serve", "--log-format=json", *words],
            stderr=log, stdout=log,
        )  # fmt: skip
    try:
        # The SuperExec is another process.
        expected = ("Uvicorn running", "Starting Flower SuperExec")
        while not all(line in path.read_text() for line in expected):
            assert process.poll() is None and time.monotonic() < until, path.read_text()
            time.sleep(0.1)
    finally:
        process.terminate()
        process.wait(30)
    assert all(json.loads(line)["message"] for line in path.read_text().splitlines())


def test_a_server_stops_although_others_are_just_connecting(tmp_path):
    """A connection that is complete only when the server has begun to stop is idle for ever."""
    make_certificates(tmp_path / "keys", [])
    port, until = localhost.free_port(), time.monotonic() + 60
    command = ["deploy", "serve", "--host=127.0.0.1", f"--port={port}", f"--folder={tmp_path}"]
    process = subprocess.Popen([sys.executable, "-m", "fedhelix", *command])
    tls = ssl.create_default_context(cafile=tmp_path / "keys" / "ca.pem")
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        while not answers(f"https://127.0.0.1:{port}/healthz"):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        begun = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        process.terminate()
        for connection in begun:
            with contextlib.suppress(OSError):
                stack.enter_context(tls.wrap_socket(connection, server_hostname="127.0.0.1"))
            time.sleep(0.005)
        assert process.wait(20) is not None


def test_a_site_is_not_ready_while_nobody_takes_its_answer(monkeypatch, capsys):
    """The request that failed is repeated until the server is there again."""
    monkeypatch.setattr(connection, "FIRST_WAIT", 0.01)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    connected, seen, messages = threading.Event(), [], iter([Message(pack(b"asked"), 7, "query")])

    class Client:
        PushObject = None

        def PushMessages(self, request):
            seen.append(connected.is_set())
            if len(seen) < 4:
                raise httpx.ConnectError("nobody is there")
            return PushMessagesResponse(session_id="session")

    def receive():
        seen.append(connected.is_set())
        return next(messages)  # and then the connection breaks

    repeat = connection.Repeat("fl.example.org:8000", connected)
    here = connection.Connection(Client(), Node(node_id=7), repeat)
    monkeypatch.setattr(here, "receive", receive)
    with pytest.raises(StopIteration):
        here.serve(lambda content: content, connected)
    assert seen == [True, True, False, False, True]
    said = "fedhelix: there is no connection to fl.example.org:8000; the next attempt is in 0.0"
    assert capsys.readouterr().err.count(said) == 2


def test_one_of_several_threads_says_that_there_is_no_connection(monkeypatch, capsys):
    """Flower sends the objects of a message in several threads."""
    monkeypatch.setattr(connection, "FIRST_WAIT", 0.01)
    repeat = connection.Repeat("a:1", threading.Event())
    failed, turn = {"first": 0, "second": 0}, threading.Barrier(2, timeout=20)

    def call(name):
        failed[name] += 1
        turn.wait()  # neither is ahead of the other
        if failed[name] <= 3:
            raise httpx.ConnectError("nobody is there")
        return name

    answers = {}
    threads = [
        threading.Thread(target=lambda name=name: answers.update({name: repeat(call, name)}))
        for name in failed
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {"first": "first", "second": "second"}
    said = [line.rpartition(" in ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["0.01 s.", "0.02 s.", "0.04 s."]
    assert not repeat._speaking.locked()  # the next outage is told, too


def test_the_entry_point_of_a_site_logs_json_and_says_what_is_wrong(tmp_path):
    """As its container starts it, without a server to connect to."""
    make_certificates(tmp_path, [])
    key = make_site_key(tmp_path, "north")
    words = ["--name=north", "--superlink=127.0.0.1:1", "--data=digits", f"--key={key}"]
    words += [f"--cert={tmp_path / 'ca.pem'}", f"--folder={tmp_path / 'state'}"]
    words += ["--health-port=0", "--log-format=json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedhelix", "site", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        entry = json.loads(process.stderr.readline())
        port = int(entry["message"].removesuffix(".").rpartition(" ")[2])
        assert answers(f"http://127.0.0.1:{port}/healthz")
        assert not answers(f"http://127.0.0.1:{port}/readyz")
        probe = [sys.executable, "-m", "fedhelix.deploy.health"]
        ended = subprocess.run([*probe, f"http://127.0.0.1:{port}/readyz"], check=False)
        assert ended.returncode == 1
        entry = json.loads(process.stderr.readline())
        assert entry["level"] == "warning" and "no connection to 127.0.0.1:1" in entry["message"]
    finally:
        process.kill()
        process.communicate()
