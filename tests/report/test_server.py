"""The dashboard as a browser meets it: a real server, and where there is one, a real browser."""

import http.client
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from urllib.parse import quote

import method_metadata as metadata
import pytest
from browser import Browser, needs_chromium

from fedhelix.core.errors import UserError
from fedhelix.report import server
from fedhelix.report.server import dashboard, is_loopback, serve
from fedhelix.store import FORMAT, RunFolder

uvicorn = pytest.importorskip("uvicorn", reason="needs pip install 'fedhelix[report]'")
pytest.importorskip("starlette", reason="needs pip install 'fedhelix[report]'")

HOSTILE = "<img src=x onerror=alert(1)>"


@contextmanager
def serving(folder, token=None):
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(
        uvicorn.Config(
            dashboard(folder, token),
            log_config=None,
            log_level="warning",
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join()


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request("GET", path, headers=headers)
    answer = link.getresponse()
    response = answer.status, dict(answer.getheaders()), answer.read().decode()
    link.close()
    return response


def test_answers_and_what_is_refused(make_run, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    make_run(rounds=2, name="a b&c")
    with serving(tmp_path) as port:
        code, headers, page = get(port, "/")
        assert code == 200 and "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and "http" not in page
        assert [run["id"] for run in json.loads(get(port, "/api/runs")[2])["runs"]] == ["a b&c"]
        assert json.loads(get(port, "/api/run?run=a%20b%26c")[2])["done"] == 2
        assert (
            json.loads(get(port, "/api/compare?run=a%20b%26c&run=nothing")[2])["sections"][0][
                "lines"
            ][0]["label"]
            == "a b&c"
        )
        assert json.loads(get(port, "/api/client?run=a%20b%26c&client=0")[2])["rounds"] == [2]
        assert json.loads(get(port, "/api/client?run=a%20b%26c&client=-1e9x")[2])["rounds"] == []
        for climbing in (
            "/static/../server.py",
            "/static/%2e%2e%2fserver.py",
            "/static/report.html",
            "/secret.txt",
        ):
            assert get(port, climbing)[0] == 404
        for name in ("..%2F..%2Fetc", "%2Fetc%2Fpasswd", "%00", "secret.txt", ""):
            assert get(port, f"/api/run?run={name}")[0] == 404
        assert get(port, "/", Host="evil.example")[0] == 403, "another name for this address"


def test_figures_are_images_that_run_nothing(make_run, tmp_path):
    make_run("genfed", rounds=2, clients=3, metadata=metadata.genfed, name="mine")
    make_run(rounds=2, name="plain")
    with serving(tmp_path) as port:
        code, headers, svg = get(port, "/api/figure?run=mine&figure=fitness")
        assert code == 200 and headers["content-type"] == "image/svg+xml"
        assert "script-src" not in headers["content-security-policy"]
        assert svg.startswith("<svg ") and "prefers-color-scheme: dark" in svg
        assert "var(--k0)" in svg and ">left out</text>" in svg
        for wrong in ("run=mine&figure=units", "run=mine&figure=..", "run=x&figure=fitness"):
            assert get(port, f"/api/figure?{wrong}")[0] == 404
        assert get(port, "/api/figure?run=plain&figure=numbers")[0] == 404


def test_the_log_handlers_of_others_stay_open(monkeypatch, tmp_path):
    class Handler(logging.Handler):
        def close(self):
            closed.append(self)

    closed, mine = [], Handler()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: sockets[0].close())
    serve(tmp_path, "127.0.0.1", 0, None)
    assert mine not in closed


def test_the_printed_address_opens_the_door(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: sockets[0].close())
    serve(tmp_path, "127.0.0.1", 0, "ab+c/d=")
    assert "/?token=ab%2Bc%2Fd%3D " in capsys.readouterr().out
    for token in ("", "s\u00e9same", "open sesame", "a\nb"):
        with pytest.raises(UserError, match="the token must be ASCII characters without spaces"):
            serve(tmp_path, "127.0.0.1", 0, token)


def test_the_token(make_run, tmp_path):
    make_run(rounds=1, name="mine")
    with serving(tmp_path, token="Sesam") as port:
        assert (
            get(port, "/")[0] == 401 and get(port, "/api/runs", Cookie="fedhelix=wrong")[0] == 401
        )
        code, headers, _ = get(port, "/?token=Sesam")
        assert code == 303 and headers["location"] == "/"
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=strict" in headers["set-cookie"]
        assert get(port, "/api/runs", Cookie="fedhelix=Sesam", Host="name.example")[0] == 200
    odd = "".join(map(chr, range(33, 127)))
    with serving(tmp_path, token=odd) as port:
        cookie = get(port, f"/?token={quote(odd, safe='')}")[1]["set-cookie"].partition(
            "; HttpOnly"
        )[0]
        assert get(port, "/api/runs", Cookie=cookie)[0] == 200


def test_addresses(tmp_path):
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert (
        not is_loopback("0.0.0.0")
        and not is_loopback("192.168.1.5")
        and not is_loopback("localhost.evil.example")
    )
    with pytest.raises(UserError, match="there is no folder"):
        serve(tmp_path / "nothing", "127.0.0.1", 0, None)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match="cannot listen"),
    ):
        serve(tmp_path, "127.0.0.1", taken.getsockname()[1], None)


def test_changes_are_sent_from_the_first_run_on(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_BETWEEN_SCANS", 0.1)
    with serving(tmp_path) as port:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        link.request("GET", "/api/events")
        stream = link.getresponse()
        assert stream.readline().startswith(b":")
        gone: set[str] = set()
        changed: set[str] = set()

        def listen_until(heard: Callable[[], object]) -> None:
            while not heard():
                line = stream.readline()
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    gone.update(event["gone"])
                    changed.update(run["id"] for run in event["changed"])

        first = make_run(rounds=1, name="first")
        listen_until(lambda: changed)
        make_run(rounds=1, name="second")
        shutil.rmtree(first.path)
        listen_until(lambda: gone and len(changed) > 1)
        assert (gone, changed) == ({"first"}, {"first", "second"})
        link.close()


@needs_chromium
def test_the_dashboard_in_a_browser(make_run, tmp_path, browser: Browser):
    for seed in range(3):
        make_run(
            "fedavg", seed, rounds=6, clients=3, census=metadata.CENSUS, name=f"fedavg-seed{seed}"
        )
    make_run(
        HOSTILE,
        rounds=2,
        name=HOSTILE,
        data=HOSTILE,
        incidents={"troubles": {HOSTILE: HOSTILE}},
        metadata=lambda _: {HOSTILE: 1},
    )
    shown = "[...document.querySelectorAll('tbody tr')].map((row) => row.dataset.run)"
    with serving(tmp_path) as port:
        home = f"http://127.0.0.1:{port}/"
        browser.open(home, wait_for="document.querySelectorAll('tbody tr').length === 4")
        browser.until("document.getElementById('state').innerText === 'live'")
        assert HOSTILE in browser.evaluate(shown)
        # A run that goes on while somebody watches the list, and then the run itself.
        with RunFolder.create(
            tmp_path / "fresh", {"rounds": 4, "seed": 0, "method": {"name": "genfed"}}
        ) as folder:
            folder.append(
                {
                    "round": 1,
                    "personal_accuracy": 0.25,
                    "personal": [0.25],
                    "uplink_bytes": 9,
                    "seconds": 1.0,
                }
            )
            row = "document.querySelector('tr[data-run=fresh]')"
            browser.until(
                f"{row} && ['running', '25.0 %'].every((part) => {row}.innerText.includes(part))"
            )
            browser.evaluate(f"{row}.querySelector('a').click()")
            browser.until("document.querySelector('#view .canvas circle')")
            folder.append(
                {
                    "round": 2,
                    "personal_accuracy": 0.75,
                    "personal": [0.75],
                    "uplink_bytes": 9,
                    "seconds": 1.0,
                }
            )
            browser.until(
                "document.querySelector('#view .canvas polyline')"
                " && document.body.innerText.includes('75.0 %')"
            )
            browser.evaluate("document.querySelector('.people button').click()")
            browser.until("document.querySelector('#history polyline')")
            folder.write_summary(
                {"method": "genfed", "rounds": 2, "personal_accuracy": 0.75, "complete": True}
            )
        browser.until("document.querySelector('.tile .badge').innerText === 'complete'")
        shutil.rmtree(folder.path)
        browser.until("document.body.innerText.includes('This run is not there')")
        complaints = [
            words for words in browser.complaints if "404" not in words
        ]  # the browser logs the missing run
        browser.complaints.clear()
        # Compare three of them.
        browser.open(f"{home}#/", wait_for="document.querySelectorAll('tbody tr').length === 4")
        ticks = "document.querySelectorAll('tr[data-run^=fedavg] input')"
        browser.evaluate(f"{ticks}.forEach((tick) => tick.click())")
        browser.evaluate("document.getElementById('compare').click()")
        browser.until("document.querySelector('#view .band')")
        assert browser.evaluate("document.querySelectorAll('#view polyline').length") == 1
        browser.evaluate("document.querySelector('.toggle').click()")
        browser.until("document.querySelectorAll('#view polyline').length === 3")
        # What a stranger put into names stays text.
        browser.evaluate(
            "location.hash = '#/run/' + encodeURIComponent('<img src=x onerror=alert(1)>')"
        )
        browser.until(f"document.querySelector('h1').innerText === {json.dumps(HOSTILE)}")
        browser.until("document.querySelector('.warning li')")
        browser.until("[...document.images].every((image) => image.complete)")
        drawn = "[...document.images].map((image) => new URL(image.src).pathname)"
        assert browser.evaluate(drawn) == ["/api/figure"]
        for width in (390, 1280):
            browser.open(home, width, wait_for="document.querySelectorAll('tbody tr').length === 4")
            assert browser.evaluate(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
        browser.call("Page.navigate", url="about:blank")
        time.sleep(0.1)
    assert complaints + browser.complaints == []


# Answers about runs come once the page is released.
HELD = """const answered = window.fetch;
window.fetch = async (path) => {
  const held = () => /api.(run|compare)[?]/.test(path) && !window.released;
  while (held()) await new Promise((go) => setTimeout(go, 20));
  return answered(path);
};"""


@needs_chromium
def test_simulated_time_has_a_unit_that_fits(tmp_path, browser: Browser):
    with RunFolder.create(tmp_path / "run", {"rounds": 2, "method": {"name": "fedavg"}}) as folder:
        for number, clock in ((1, 90.0), (2, 180.0)):
            folder.append(
                {
                    "round": number,
                    "accuracy": 0.5,
                    "uplink_bytes": 9,
                    "seconds": 1.0,
                    "clock": clock,
                }
            )
    with serving(tmp_path) as port:
        browser.open(
            f"http://127.0.0.1:{port}/", wait_for="document.querySelector('tr[data-run=run] a')"
        )
        browser.evaluate("document.querySelector('tr[data-run=run] a').click()")
        browser.until("document.querySelector('#view .canvas polyline')")
        assert "simulated minutes" in browser.text() and "simulated hours" not in browser.text()
        browser.open("about:blank")


@needs_chromium
def test_a_run_is_loading_until_its_records_have_come(make_run, tmp_path, browser: Browser):
    make_run("fedavg", name="one")
    make_run("genfed", name="two")
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=HELD)
    try:
        with serving(tmp_path) as port:
            page = f"http://127.0.0.1:{port}/#/run/one"
            browser.open(page, wait_for="document.querySelector('.canvas .empty')")
            assert browser.evaluate("document.querySelector('.empty').textContent") == "loading …"
            assert "nothing evaluated" not in browser.text() and "Clients" not in browser.text()
            browser.evaluate("window.released = true")
            browser.until("document.querySelector('.canvas .line')")
            assert "loading …" not in browser.text() and "Clients" in browser.text()
            browser.open("about:blank")
            page = f"http://127.0.0.1:{port}/#/compare/one/two"
            browser.open(page, wait_for="document.querySelector('.bar')")
            assert "Reading runs" in browser.text()
            browser.evaluate("window.released = true")
            browser.until("document.querySelector('.canvas .line')")
            assert "Reading runs" not in browser.text()
            browser.open("about:blank")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    assert browser.complaints == []


@needs_chromium
def test_thousands_of_runs_in_a_browser(tmp_path, browser: Browser):
    for number in range(1500):
        folder = tmp_path / "many" / f"run-{number:05d}"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(f"format = {FORMAT}\nseed = {number}\n")
    count = "document.querySelectorAll('tbody tr').length"
    with serving(tmp_path) as port:
        home = f"http://127.0.0.1:{port}/"
        browser.open(home, wait_for=f"{count} === 200")
        assert browser.evaluate("document.body.innerText.includes('1500 of 1500 runs')")
        browser.evaluate("document.querySelector('button.more').click()")
        browser.until(f"{count} === 800")
        box = "document.querySelector('input[type=search]')"
        browser.evaluate(f"{box}.value = 'run-01499'; {box}.dispatchEvent(new Event('input'))")
        browser.until(f"{count} === 1")
        # A page of another origin learns nothing, whatever it asks for.
        browser.open("about:blank", wait_for="true")
        browser.evaluate(
            f"window.told = ''; fetch('{home}api/runs').then((answer) => answer.text())"
            ".then((text) => { window.told = text; }, () => { window.told = 'refused'; }); 0"
        )
        browser.until("window.told === 'refused'")
        browser.complaints.clear()
