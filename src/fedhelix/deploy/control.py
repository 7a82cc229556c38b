"""Control of a SuperLink by the server's owner: admit sites, submit runs, query their status."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedhelix.deploy import need_flower

try:
    import httpx
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_from_proto, user_config_to_proto
    from flwr.proto.control_pb2 import (
        ListNodesRequest,
        ListRunsRequest,
        RegisterNodeRequest,
        StartRunRequest,
        StopRunRequest,
        UnregisterNodeRequest,
    )
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.fab import Fab
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
except ImportError:
    need_flower()
    raise

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.version import __version__
from fedhelix.deploy.connection import is_away
from fedhelix.deploy.hints import serve_command, where
from fedhelix.deploy.keys import is_of_a_site, read_certificate, read_public_key

FINISHED, WITHDRAWN = "finished", "unregistered"

BUNDLE = """\
[project]
name = "fedhelix-run"
version = "{version}"
description = "Points at the installed fedhelix."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41.0,<1.42"]

[tool.flwr.app]
publisher = "fedhelix"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "fedhelix.deploy.app:server_app"
clientapp = "fedhelix.deploy.app:client_app"

[tool.flwr.app.config]
run = ""
"""


class RunStatus(NamedTuple):
    """The status of a run (pending, starting, running or finished), and how it ended."""

    status: str
    result: str
    details: str

    @property
    def finished(self) -> bool:
        """Whether the run has ended, for whatever reason."""
        return self.status == FINISHED


class Control:
    """A client of the SuperLink's Control API, which answers on its own machine only.

    `folder` is that of the deployment, with its keys. Use it in a `with` statement, which closes
    the connection.
    """

    def __init__(self, address: str, folder: Path):
        self.address, self.folder = address, folder
        keys = folder / "keys"
        missing = (
            "this is a command for the server's folder: name that with --folder, or make keys for "
            f"a new server with `fedhelix deploy keys{where(None, folder)}`"
        )
        root = read_certificate(keys / "ca.pem", missing)
        if is_of_a_site(keys):
            raise UserError(
                f"'{keys}' holds the keys of a site, and this is a command for the server's folder;"
                " type it on the server's machine, or name another --folder."
            )
        interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        self._client = ControlHttpClient.from_server_address(address, False, root, interceptors)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def is_up(self) -> bool:
        """Whether the SuperLink answers."""
        try:
            self._client.ListNodes(ListNodesRequest())
        except httpx.TransportError:
            return False
        return True

    def register(self, site: str, public_key: Path) -> None:
        """Register a site's name and public key; a key that it had before is withdrawn."""
        if not public_key.exists():
            raise UserError(
                f"there is no key '{public_key}'; put the {site}.pub of the site there, or make a "
                f"pair with `{self._keys_command(site)}`."
            )
        key, nodes = read_public_key(public_key), self._nodes()
        known = next((node for node in nodes if node.public_key == key), None)
        if known is not None and known.status == WITHDRAWN:
            raise UserError(
                f"the key in '{public_key}' was withdrawn permanently; delete {site}.key and "
                f"{site}.pub, and make new ones with `{self._keys_command(site)}`."
            )
        if known is not None and known.name != site:
            raise UserError(
                f"the key in '{public_key}' belongs to '{known.name}'; every site needs a key of "
                "its own."
            )
        if known is None:
            with self._user_errors():
                self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=site))
        self._withdraw(node for node in nodes if node.name == site and node.public_key != key)

    def _keys_command(self, site: str) -> str:
        return f"fedhelix deploy keys {shlex.quote(site)}{where(None, self.folder)}"

    def expel(self, site: str) -> None:
        """Withdraw a site's key permanently."""
        nodes = [node for node in self._nodes() if node.status != WITHDRAWN]
        if site not in (names := {node.name for node in nodes}):
            raise unknown("site", site, names)
        self._withdraw(node for node in nodes if node.name == site)

    def _withdraw(self, nodes: Iterable[NodeInfo]) -> None:
        with self._user_errors():
            for node in nodes:
                if node.status != WITHDRAWN:
                    self._client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))

    def _nodes(self) -> list[NodeInfo]:
        """All nodes that were ever registered."""
        with self._user_errors():
            return list(self._client.ListNodes(ListNodesRequest()).nodes_info)

    def admitted(self) -> list[str]:
        """The names of the sites whose keys are admitted."""
        return sorted(node.name for node in self._nodes() if node.status != WITHDRAWN)

    def connected(self) -> list[str]:
        """The names of the registered sites that are online."""
        return sorted(node.name for node in self._nodes() if node.status == "online")

    def submit(self, run: Path) -> int:
        """Submit the run in a folder, from its last finished round on; returns Flower's run id.

        The folder must be on the SuperLink's machine.
        """
        files = {
            "pyproject.toml": BUNDLE.format(version=__version__).encode(),
            "LICENSE": b"Apache-2.0\n",
        }
        content, _ = build_fab_from_files(files)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        config = user_config_to_proto({"run": str(run.resolve())})
        with self._user_errors():
            return self._client.StartRun(
                StartRunRequest(fab=fab_to_proto(fab), override_config=config)
            ).run_id

    def active_run_id(self, run: Path) -> int | None:
        """The id under which the run in a folder is submitted and not yet finished, if any."""
        with self._user_errors():
            runs = self._client.ListRuns(ListRunsRequest()).run_dict
        path = str(run.resolve())
        for run_id, submitted in runs.items():
            config = user_config_from_proto(submitted.override_config)
            if submitted.status.status != FINISHED and config.get("run") == path:
                return int(run_id)
        return None

    def status(self, run_id: int) -> RunStatus | None:
        """The status of a submitted run; None while the SuperLink cannot be reached."""
        try:
            run = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
        except httpx.TransportError:
            return None
        return RunStatus(run.status.status, run.status.sub_status, run.status.details)

    def stop(self, run_id: int) -> None:
        """Stop a submitted run; its finished rounds stay in its folder."""
        with self._user_errors():
            self._client.StopRun(StopRunRequest(run_id=run_id))

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        """Turn HTTP errors into sentences for the user."""
        try:
            yield
        except httpx.TransportError as problem:
            if not is_away(problem):
                raise UserError(
                    f"the SuperLink at {self.address} has a certificate that is not accepted "
                    f"({problem}): it has expired, is for another name, or '{self.folder}' is "
                    f"another server's; `fedhelix deploy keys{where(None, self.folder)}` says "
                    "until when it is valid, and docs/deployment.md how to replace it."
                ) from None
            raise UserError(
                f"there is no SuperLink at {self.address} ({problem}); start one with "
                f"`{serve_command(self.address, self.folder)}`, or "
                f"`fedhelix up{where(None, self.folder)}` on one machine, or name another address "
                "with --superlink."
            ) from None
        except httpx.HTTPStatusError as problem:
            raise UserError(f"the SuperLink refuses: {problem.response.text or problem}.") from None
