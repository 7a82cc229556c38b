"""The dashboard: a small web server that lists runs, follows them live and compares them.

It listens on loopback and serves its own few files and JSON, nothing else. Bound to another address
it demands a token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from fedhelix.core.errors import UserError
from fedhelix.core.imports import from_extra
from fedhelix.report.live import Watch, WatchedRun, client_history, run_details

STATIC = Path(__file__).parent / "static"
FILES = {
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "tokens.css": "text/css",
    "style.css": "text/css",
    "app.css": "text/css",
}
MOST_COMPARED = 20
SECONDS_BETWEEN_SCANS = 1.0
COOKIE = "fedhelix"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FIGURES = "/api/figure"
POLICY_OF_FIGURES = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(folder: Path, host: str, port: int, token: str | None) -> None:
    """Show the runs in a folder until Ctrl-C."""
    uvicorn = from_extra("uvicorn", "report")
    if not folder.is_dir():
        raise UserError(
            f"there is no folder '{folder}'; name the one with your runs: fedhelix serve RUNS."
        )
    # URLs and cookies carry nothing but printable ASCII.
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise UserError(
            "the token must be ASCII characters without spaces; "
            "give such a one, or none to have it drawn."
        )
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    app = dashboard(folder, token)
    listening = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    query = f"?token={quote(token, safe='')}" if token else ""
    url = f"http://{name}:{listening.getsockname()[1]}/{query}"
    print(f"fedhelix: runs of '{folder}' at {url} (Ctrl-C stops)", flush=True)
    settings = uvicorn.Config(
        app,
        log_config=None,  # uvicorn's own would close the handlers of everybody else
        log_level="warning",
        ws="none",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    uvicorn.Server(settings).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as problem:
        raise UserError(
            f"cannot listen on {host}, port {port}: {problem.strerror}; choose others."
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(url: str) -> str:
    """The host in an address; empty if there is none."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "" if parts.port is None or parts.port else ""
    except ValueError:
        return ""


def _is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a page of another server."""
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def dashboard(folder: Path, token: str | None = None) -> Any:
    """The web application."""
    applications = from_extra("starlette.applications", "report")
    routing = from_extra("starlette.routing", "report")
    views = Views(Watch(folder))
    views.everything()  # so that the first request need not wait
    routes = [
        routing.Route("/", views.page),
        routing.Route("/static/{name}", views.file),
        routing.Route("/api/runs", views.runs),
        routing.Route("/api/run", views.run),
        routing.Route("/api/client", views.client),
        routing.Route("/api/compare", views.compare),
        routing.Route(FIGURES, views.figure),
        routing.Route("/api/events", views.events),
    ]
    return Guard(applications.Starlette(routes=routes), token)


class Guard:
    """Middleware: lets in who may enter, and sends the security headers with every response."""

    def __init__(self, app: Any, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        request = Request(scope)
        response: Any = self.app
        given = request.query_params.get("token", "")
        if _is_foreign(request.headers):
            response = PlainTextResponse("This dashboard answers to its own page only.\n", 403)
        elif self.token is None:
            # DNS rebinding: a page elsewhere may resolve its own host name to 127.0.0.1.
            if not is_loopback(host_of(f"http://{request.headers.get('host', '')}")):
                response = PlainTextResponse("This dashboard answers to localhost only.\n", 403)
        elif self._is_token(given):
            response = RedirectResponse("/", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
        elif not self._is_token(request.cookies.get(COOKIE, "")):
            response = PlainTextResponse(
                "Open the address with the token that `fedhelix serve` printed.\n", 401
            )

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = POLICY_OF_FIGURES if scope["path"] == FIGURES else POLICY
                headers = {"Content-Security-Policy": policy, **HEADERS}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in headers.items()),
                ]
            await send(message)

        await response(scope, receive, with_headers)

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


class Views:
    """The page's requests. Files are read in threads, so that a slow disk does not stop others."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    async def page(self, _: Any) -> Any:
        """The page itself."""
        from starlette.responses import HTMLResponse

        return HTMLResponse((STATIC / "app.html").read_text(encoding="utf-8"))

    async def file(self, request: Any) -> Any:
        """One of the page's own files."""
        from starlette.responses import PlainTextResponse, Response

        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("There is no such file.\n", 404)
        return Response((STATIC / name).read_bytes(), media_type=FILES[name])

    async def runs(self, _: Any) -> Any:
        """The list."""

        def listed() -> dict[str, Any]:
            self.watch.refresh()
            return {"root": str(self.watch.root), "runs": self.watch.overview()}

        return await self._respond(listed)

    async def run(self, request: Any) -> Any:
        """One run in full."""
        return await self._respond(lambda: self._of(request, run_details))

    async def client(self, request: Any) -> Any:
        """One client's history."""
        requested = request.query_params.get("client", "")
        number = (
            int(requested)
            if requested.isascii() and requested.isdecimal() and len(requested) < 10
            else -1
        )
        return await self._respond(
            lambda: self._of(request, lambda run: client_history(run, number))
        )

    async def compare(self, request: Any) -> Any:
        """Some runs side by side, in the order of the request."""
        names = request.query_params.getlist("run")[:MOST_COMPARED]

        def sections() -> dict[str, Any]:
            from fedhelix.report.live.comparison import compared  # slow to import

            with self.watch.lock:
                known = [run for name in dict.fromkeys(names) if (run := self._get(name))]
                return {"sections": compared(known)}

        return await self._respond(sections)

    async def figure(self, request: Any) -> Any:
        """A figure of one run, as an image."""
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import PlainTextResponse, Response

        def image() -> str | None:
            from fedhelix.report.live.drawing import drawn  # slow to import

            run = self._get(request.query_params.get("run", ""))
            return None if run is None else drawn(run, request.query_params.get("figure", ""))

        svg = await run_in_threadpool(image)
        if svg is None:
            return PlainTextResponse("There is no such figure.\n", 404)
        return Response(svg, media_type="image/svg+xml")

    async def events(self, request: Any) -> Any:
        """A stream of what changes."""
        from starlette.responses import StreamingResponse

        return StreamingResponse(self._changes(request), media_type="text/event-stream")

    async def _changes(self, request: Any) -> AsyncIterator[str]:
        from starlette.concurrency import run_in_threadpool

        seen = await run_in_threadpool(self.everything)
        while not await request.is_disconnected():
            runs = await run_in_threadpool(self.everything)
            changed = [run for name, run in runs.items() if seen.get(name) != run]
            gone = [name for name in seen if name not in runs]
            if changed or gone:
                yield f"data: {json.dumps({'changed': changed, 'gone': gone})}\n\n"
            else:
                yield ": still here\n\n"
            seen = runs
            await asyncio.sleep(SECONDS_BETWEEN_SCANS)

    def everything(self) -> dict[str, dict[str, Any]]:
        """All runs as they are now."""
        self.watch.refresh()
        return {run["id"]: run for run in self.watch.overview()}

    def _get(self, name: str) -> WatchedRun | None:
        run = self.watch.get(name)
        if run is None:  # perhaps it is new
            self.watch.refresh()
            run = self.watch.get(name)
        return run

    def _of(
        self, request: Any, view: Callable[[WatchedRun], dict[str, Any]]
    ) -> dict[str, Any] | None:
        with self.watch.lock:
            run = self._get(request.query_params.get("run", ""))
            if run is None:
                return None
            run.refresh()
            return view(run)

    async def _respond(self, make: Callable[[], dict[str, Any] | None]) -> Any:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse

        body = await run_in_threadpool(make)
        if body is None:
            return JSONResponse({"problem": "This run is not there."}, 404)
        return JSONResponse(body)
