"""A network that can be cut: connections on one port are passed on to another."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

CHUNK = 1 << 16


class Proxy:
    """Passes bytes on between sites and a port of this machine, unless it is cut."""

    def __init__(self, port: int):
        self.port = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._cut_until = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> bool:
        """Break all connections and refuse new ones for a while; whether there was one."""
        self._cut_until = time.monotonic() + seconds
        with self._lock:
            broken, self._open = self._open, set()
        for connection in broken:
            _close(connection)
        return bool(broken)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if time.monotonic() < self._cut_until:
                _close(near)
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.port), timeout=5)
            except OSError:
                _close(near)
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(CHUNK):
                target.sendall(content)
        for end in (source, target):
            with self._lock:
                self._open.discard(end)
            _close(end)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
