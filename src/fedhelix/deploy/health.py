"""Health and readiness of a site over HTTP, for container runtimes; the SuperLink has its own.

`python -m fedhelix.deploy.health URL` is a probe, for images without curl.
"""

from __future__ import annotations

import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedhelix.core.errors import UserError

ALIVE, READY = "/healthz", "/readyz"


def probe(path: str, ready: bool) -> int | None:
    """The status of a probe: alive whenever somebody answers, ready or not; None: no probe."""
    if path not in (ALIVE, READY):
        return None
    return 200 if path == ALIVE or ready else 503


class HealthServer:
    """Answers probes on a port; it says nothing else and takes nothing."""

    def __init__(self, host: str, port: int, ready: Callable[[], bool]):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(probe(self.path, ready()) or 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds, and are not worth a line."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as problem:
            raise UserError(
                f"probes cannot be answered at {host}:{port} ({problem.strerror})."
            ) from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> HealthServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def answers(url: str) -> bool:
    """Whether a probe of this machine succeeds; whose certificate it is does not matter."""
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=5, context=unverified) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


if __name__ == "__main__":
    sys.exit(not answers(sys.argv[1]))
