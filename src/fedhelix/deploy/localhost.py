"""A whole deployment on this machine, in one folder: a SuperLink and its sites, with TLS and keys.

FOLDER/
  deployment.json   address, sites and data, for `fedhelix deploy run`
  keys/             certificates and keys
  flower/           Flower's home, so that nothing is written to the user's
  lock              while a process runs the deployment
  logs/             one file per process
  sites/            the sites' client states
  superlink.db      Flower's registered keys and messages
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.deploy.control import Control
from fedhelix.deploy.hints import SERVER, where
from fedhelix.deploy.keys import last_day, make_certificates, make_site_key, validity
from fedhelix.deploy.logs import say
from fedhelix.deploy.node import only_process
from fedhelix.deploy.remote_data import common_source
from fedhelix.store.lock import Lock

STATE_FILE = "deployment.json"
HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")  # that a SuperLink here can be reached at
START_SECONDS, STOP_SECONDS = 120.0, 10.0  # that a process may take
SOON = datetime.timedelta(days=60)  # before its end a certificate should be renewed
RESTART_SECONDS = 1.0  # at least, between two starts of a process that dies at once


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise UserError for an address that a server cannot listen on."""
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as probe:
            # As the server does it, else a port would count as taken for a minute after its end.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as problem:
        raise UserError(
            f"no server can listen on {host}:{port} ({problem.strerror}); stop what runs there, or "
            "choose another --host or --port."
        ) from None


def environment(folder: Path) -> dict[str, str]:
    """Environment of Flower's processes.

    No telemetry, a home inside the folder, and Flower's programs from this Python's installation.
    """
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_UPDATE_CHECK": "0",
        "FLWR_HOME": str((folder / "flower").resolve()),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
    }


def superlink_command(folder: Path, host: str, port: int) -> list[str]:
    """The command that starts the server's SuperLink."""
    keys = folder / "keys"
    return [
        *(sys.executable, "-m", "fedhelix.deploy.superlink"),
        *("--host", host, "--port", str(port), "--database", str(folder / "superlink.db")),
        *("--ssl-ca-certfile", str(keys / "ca.pem"), "--ssl-certfile", str(keys / "server.pem")),
        *("--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"),
        "--disable-runtime-dependency-installation",
    ]


def become_superlink(folder: Path, host: str, port: int) -> None:
    """Replace this process by the server's SuperLink."""
    if not (folder / "keys" / "server.pem").exists():
        raise UserError(
            f"'{folder / 'keys'}' holds no certificate; make one with `fedhelix deploy keys"
            f"{where(None, folder)}`."
        )
    folder = folder.resolve()
    end = last_day(folder / "keys")
    if end - datetime.date.today() < SOON:
        words = f"is valid until {end}, and no site connects after"
        if end < datetime.date.today():
            words = validity(folder / "keys")
        say(f"the server's certificate {words}", "warning")
    check_port(host, port)
    command = superlink_command(folder, host, port)
    with only_process(folder, "superlink", "the server's") as lock:
        of_local = Lock(folder / "lock")
        of_local.acquire()  # or say that `fedhelix up` runs here
        of_local.release()
        os.set_inheritable(lock.fileno(), True)  # the SuperLink holds it as long as it runs
        os.execve(command[0], command, environment(folder))


class Process:
    """A process of the deployment, with its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str]):
        self.name, self.command, self.log, self.env = name, list(command), log, env
        self.started = 0.0
        self.running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches only the deployment itself."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        self.started = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.running is not None and self.running.poll() is None

    def stop(self) -> None:
        """End it and its descendants, which have sessions of their own and may wait for ever."""
        if self.running is None:
            return
        children = descendants(self.running.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.running.pid, number)
                self.running.wait(STOP_SECONDS)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM; a second one would leave processes running."""
    if threading.current_thread() is not threading.main_thread():  # only it receives signals
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, directly or indirectly."""
    parents, family = _parents(), [pid]
    for parent in family:  # the list grows while it is read
        family += [child for child, its in parents.items() if its == parent]
    return family[1:]


def _parents() -> dict[int, int]:
    """All processes of this machine with their parents; `ps` may be missing in a container."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False
        ).stdout
        numbers = list(map(int, listed.split()))
        return dict(zip(numbers[::2], numbers[1::2], strict=True))
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it has ended meanwhile
            status = path.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(status[1])
    return parents


class LocalDeployment:
    """A SuperLink and its sites; a `with` statement starts them and stops them."""

    def __init__(
        self,
        folder: Path | str,
        sites: int = 3,
        data: str = "digits",
        data_dir: str | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        policy: Path | None = None,
        code: Sequence[Path] = (),
    ):
        if host not in HOSTS:
            raise UserError(
                f"the sites of this machine would not find a server at {host}; use one of "
                f"{', '.join(HOSTS)}, or `fedhelix deploy serve` for sites on other machines."
            )
        self.folder = Path(folder).resolve()
        self._lock = Lock(self.folder / "lock")
        self.names = [
            f"site-{number}" if sites <= 10 else f"site-{number:04d}" for number in range(sites)
        ]
        self.settings = {"data": common_source(data)}  # for runs
        if data_dir is not None:
            self.settings["data_dir"] = str(Path(data_dir).expanduser().resolve())
        self.policy = policy and policy.resolve()  # of every site
        self.code = [path.resolve() for path in code]
        self.host, self.port = host, port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.certificate = self.folder / "keys" / "ca.pem"
        self.env = environment(self.folder)
        self.superlink = self._process("superlink", superlink_command(self.folder, host, self.port))
        self.sites = {name: self._process(name, self.site_command(name)) for name in self.names}

    def _process(self, name: str, command: Sequence[str]) -> Process:
        return Process(name, command, self.folder / "logs" / f"{name}.log", self.env)

    def site_command(self, name: str) -> list[str]:
        """The command that starts one site."""
        settings = {key.replace("_", "-"): value for key, value in self.settings.items()}
        data = [word for key, value in settings.items() for word in (f"--{key}", value)]
        key, folder = self.folder / "keys" / f"{name}.key", self.folder / "sites"
        return [
            *(sys.executable, "-m", "fedhelix", "site", "--name", name, *data, "--common"),
            *("--superlink", self.address, "--cert", str(self.certificate)),
            *("--key", str(key), "--folder", str(folder)),
            *(("--policy", str(self.policy)) if self.policy else ()),
            *(word for path in self.code for word in ("--code", str(path))),
        ]

    def control(self) -> Control:
        """A client of the SuperLink's Control API."""
        return Control(self.address, self.folder)

    def __enter__(self) -> LocalDeployment:
        with suppress(OSError):  # acquiring the lock reports it better
            self.folder.mkdir(parents=True, exist_ok=True)
        with only_process(self.folder, "superlink", "the server's"):
            self._lock.acquire()
        remove_leftovers(self.folder, STATE_FILE)
        remove_leftovers(self.folder / "keys", "*")
        remove_leftovers(self.folder / "sites", "*")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        keys = self.folder / "keys"
        make_certificates(keys, [])
        check_port(self.host, self.port)
        for name in self.names:
            make_site_key(keys, name)
        self.superlink.start()
        self.wait_for_superlink()
        for name in self.names:
            self.admit(name)
        for process in self.sites.values():
            process.start()
        state = {"address": self.address, "sites": self.names, "settings": self.settings}
        write_atomically(self.folder / STATE_FILE, json.dumps(state, indent=1).encode())

    def wait_for_superlink(self) -> None:
        """Wait until the SuperLink answers."""
        until = time.monotonic() + START_SECONDS
        with self.control() as control:
            while not control.is_up():
                if not self.superlink.alive or time.monotonic() > until:
                    raise EngineFailure(f"the SuperLink does not start; see {self.superlink.log}.")
                time.sleep(0.2)

    def admit(self, name: str) -> None:
        """Register a site's key under its name."""
        with self.control() as control:
            control.register(name, self.folder / "keys" / f"{name}.pub")

    def revive(self) -> list[str]:
        """Start processes again that have died; returns their names."""
        dead = [process for process in (self.superlink, *self.sites.values()) if not process.alive]
        for process in dead:
            if time.monotonic() - process.started > RESTART_SECONDS:
                process.start()
        return [process.name for process in dead]

    def stop(self) -> None:
        """Stop everything: sites first, so that they can sign off at the SuperLink."""
        with signals_ignored():
            for process in (*self.sites.values(), self.superlink):
                process.stop()
            (self.folder / STATE_FILE).unlink(missing_ok=True)
            self._lock.release()


def address(folder: Path) -> str:
    """Where the server of a folder listens: as that of `fedhelix up` says, or by default."""
    return str(read_state(folder)["address"]) if (folder / STATE_FILE).exists() else SERVER


def read_state(folder: Path) -> dict[str, Any]:
    """The address, sites and settings of the deployment that runs in a folder."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_bytes()))
    except (OSError, ValueError):
        raise UserError(
            f"no deployment of `fedhelix up` is running in '{folder}'; start one with "
            f"`fedhelix up{where(None, folder)}`, or give --superlink HOST:PORT of the server that "
            "`fedhelix deploy serve` runs."
        ) from None
