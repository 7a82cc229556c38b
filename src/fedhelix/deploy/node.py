"""A site's connection to the server: takes requests from Flower's SuperLink and sends answers.

It replaces `flower-supernode`, which starts a process for every message, polls every three
seconds, and runs code that comes with a run. This one runs only the fedhelix installed here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import httpx
from flwr.supercore.error import ApiErrorCode, FlowerError

from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, writable
from fedhelix.deploy.connection import activated
from fedhelix.deploy.keys import KEY_IN_USE, KEY_WITHDRAWN, read_certificate, read_private_key
from fedhelix.deploy.logs import say
from fedhelix.deploy.schema import clipped

if sys.platform != "win32":
    import fcntl

RECONNECT_SECONDS = 3.0  # before a broken connection is made anew


@contextmanager
def only_process(folder: Path, name: str, what: str = "the site") -> Iterator[BinaryIO]:
    """Refuse a second process of a site in the same folder: it would end the connection of the
    first; and a second server. The system ends the lock with its process, however that dies.
    """
    writable(folder)
    with (folder / f"{name}.lock").open("ab") as file:
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process runs {what} {name} in '{folder}' already; stop that one first."
            ) from None
        yield file


class RequestHandler(Protocol):
    """Whatever answers the requests, such as a `SiteProcess`."""

    def start(self) -> object:
        """Get ready: the site is connected."""

    def answer(self, content: bytes) -> bytes:
        """The answer to a request."""


def connect(
    superlink: str,
    certificate: Path,
    key: Path,
    handler: RequestHandler,
    node_file: Path,
    connected: threading.Event,
) -> None:
    """Answer a SuperLink's requests for ever, and reconnect whenever the connection breaks.

    `node_file` holds the node's id while it is connected. `connected` is set except while there is
    no connection, or while a request is repeated because nobody answers.
    """
    private = read_private_key(key)
    keys = private, private.public_key()
    root = read_certificate(certificate, "give the server's ca.pem as --cert")
    remove_leftovers(node_file.parent, node_file.name)
    was_connected, said = False, ""
    while True:
        try:
            with activated(superlink, root, keys, node_file, connected) as connection:
                was_connected, said = True, ""
                say(f"connected to {superlink}")
                handler.start()
                try:
                    connection.serve(handler.answer, connected)
                except Exception as problem:
                    why = str(problem).partition("\n")[0].rstrip(".")
                    say(f"the connection broke: {clipped(why or repr(problem))}", "warning")
                finally:
                    connected.clear()
        except httpx.HTTPError as problem:
            refusal = refused(problem, superlink, key)
            if not (was_connected and refusal.may_pass):
                raise refusal from None
            if said != (said := str(refusal)):
                say(said.rstrip("."), "warning")
        time.sleep(RECONNECT_SECONDS)


class Refusal(UserError):
    """The server did not let this site in; it may do so later to a site that it knows."""

    def __init__(self, why: str, may_pass: bool):
        super().__init__(why)
        self.may_pass = may_pass


def refused(problem: httpx.HTTPError, superlink: str, key: Path) -> Refusal:
    """Why the server did not let a site in, and what to do."""
    if not isinstance(problem, httpx.HTTPStatusError):  # in the middle of a handshake, for instance
        why = f"{problem}{_remedy(str(problem))}"
        return Refusal(f"there is no connection to {superlink}: {why}.", may_pass=True)
    said = FlowerError.from_json(problem.response.text)
    details = None if said is None else said.public_details
    wrong_clock = problem.response.status_code == httpx.codes.UNAUTHORIZED
    if wrong_clock:
        why = "its signature is not valid; set the clocks of both machines"
    elif details == KEY_IN_USE:
        why = "another site is connected with it; stop that one, or wait a minute after a crash"
    elif details == KEY_WITHDRAWN:
        why = "it was withdrawn permanently; the site needs a new key pair"
    elif said is not None and said.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        why = f"it is not admitted; on the server, `fedhelix deploy admit {key.stem}` admits it"
    else:
        why = said.message if said else problem.response.text or str(problem)
    may_pass = wrong_clock or details == KEY_IN_USE
    return Refusal(f"the server at {superlink} refuses the key '{key}': {why}.", may_pass)


def _remedy(problem: str) -> str:
    """What to do about a certificate that is not accepted, as the last part of a sentence."""
    if "certificate verify failed" not in problem:
        return ""
    renewed = "`fedhelix deploy keys --host NAME --folder renewed`"
    page = ", and replace it as docs/deployment.md says"
    if "expired" in problem:
        return f"; on the server, make a new one with {renewed}{page}"
    if "not yet valid" in problem:
        return "; set the clocks of both machines"
    if "mismatch" in problem:
        return (
            "; give --superlink a name that the certificate is for, or make one for this name with "
            f"{renewed}{page}"
        )
    return "; give --cert the ca.pem in the keys folder of this server"
