"""A real browser for tests: Chromium without a window, spoken to through its DevTools protocol."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("websockets") is None,
    reason="needs a browser: apt-get install chromium, and pip install websockets",
)


class Browser:
    """One tab; everything that its console complains about is kept in `complaints`."""

    def __init__(self, profile: Path) -> None:
        from websockets.sync.client import connect

        switches = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            [str(CHROMIUM), *switches], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port = self._wait_for(lambda: (profile / "DevToolsActivePort").read_text().split()[0])
        tabs = self._wait_for(
            lambda: json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5))
        )
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self.connection = ExitStack()
        self.socket = self.connection.enter_context(connect(address, max_size=None))
        self.numbers = itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait(10)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=30))
            self._listen(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(
        self, address: str, width: int = 1280, height: int = 900, wait_for: str = "true"
    ) -> None:
        """Show a page and wait until an expression holds."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && ({wait_for})")

    def prefer(self, scheme: str) -> None:
        """Ask for light or dark pages."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str, seconds: float = 20) -> Any:
        """Wait until an expression holds."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(f"Boolean({expression})")):
            assert time.monotonic() < end, (
                f"never true: {expression}; the page says: {self.text()[:2000]}"
            )
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return self.evaluate("document.body ? document.body.innerText : ''")

    def figure(self, path: Path, whole: bool = True) -> None:
        done = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(done["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }

    def _listen(self, message: dict[str, Any]) -> None:
        event = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.complaints.append(event["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and event["type"] in (
            "error",
            "warning",
        ):
            self.complaints.append(json.dumps(event["args"]))

    def _wait_for(self, look: Any, seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                return look()
            except (OSError, IndexError):
                assert time.monotonic() < end and self.process.poll() is None, (
                    "chromium did not start"
                )
                time.sleep(0.05)
