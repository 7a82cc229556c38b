"""A deployment without a network: Flower's grid hands messages to sites in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedhelix import Federation
from fedhelix.deploy import waiting
from fedhelix.deploy.code import SiteCode
from fedhelix.deploy.control import RunStatus
from fedhelix.deploy.packing import pack, unpack
from fedhelix.deploy.policy import RoundPolicy
from fedhelix.deploy.server import make_federation, open_registry, serve_run
from fedhelix.deploy.site import Site
from fedhelix.deploy.transport import Transport
from fedhelix.federation.run import Run
from fedhelix.runs.spec import RunSpec

EXPERIMENT = "0123456789abcdef" * 2
Answer = Callable[[bytes], "bytes | Late | Exception | Error | None"]
GONE = Error(code=ErrorCode.NODE_UNAVAILABLE, reason="Error: Node Unavailable")


def small_images(folder: Path, samples: int = 96) -> str:
    """A file with few samples of three classes, of which sites take their parts."""
    y = np.arange(samples) % 3
    x = np.random.default_rng(0).normal(size=(samples, 1, 8, 8)) + y[:, None, None, None]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "images.npz", x=x.astype(np.float32), y=y)
    return str(folder / "images.npz")


class Late(bytes):
    """An answer that is held back until `InProcessGrid.deliver` is called."""


class Slow(bytes):
    """An answer that is not there at the first look, but at the second."""


class InProcessGrid(Grid):
    """Nodes are functions from request to answer; None is silence, an exception is a crash, and an
    `Error` what Flower says in the name of a node.
    """

    def __init__(self, *answers: Answer):
        self.answers: dict[int, Answer] = dict(enumerate(answers, start=101))
        self.names: dict[int, str] = {}  # registered with a key
        self.activated: dict[int, str] = {}
        self.waiting: list[Message] = []
        self.held: list[Message] = []
        self.slow: list[Message] = []
        self._ids = itertools.count()
        TaskIdentity.task_id = TaskIdentity.run_id = 1
        TaskIdentity.node_id = 1

    run = None

    def set_run(self, run):
        """There is only one."""

    def create_message(self, *args, **more):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.answers)

    def get_nodes(self):
        return [
            NodeInfo(
                node_id=node,
                name=self.names.get(node),
                last_activated_at=self.activated.get(node, "1"),
            )
            for node in self.answers
        ]

    def push_messages(self, messages):
        keys = []
        for message in messages:
            keys.append(f"message-{next(self._ids)}")
            message.metadata.__dict__["_message_id"] = keys[-1]
            self.ask(message)
        return keys

    def ask(self, message):
        """Let a node work on a request."""
        answer = self.answers.get(message.metadata.dst_node_id, lambda _: GONE)(unpack(message))
        if isinstance(answer, Exception):
            self.waiting.append(Message(Error(code=0, reason=str(answer)), reply_to=message))
        elif isinstance(answer, Error):
            self.waiting.append(Message(answer, reply_to=message))
        elif answer is not None:
            queue = {Late: self.held, Slow: self.slow}.get(type(answer), self.waiting)
            queue.append(Message(pack(bytes(answer)), reply_to=message))

    def deliver(self):
        """Release the answers that were held back."""
        self.waiting, self.held = self.waiting + self.held, []

    def pull_messages(self, message_ids):
        wanted = set(message_ids)
        pulled = [
            message for message in self.waiting if message.metadata.reply_to_message_id in wanted
        ]
        self.waiting = [message for message in self.waiting if message not in pulled] + self.slow
        self.slow = []
        return pulled

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


class InProcessDeployment:
    """Sites in this process, and the server's side of a deployment with them."""

    def __init__(
        self,
        folder: Path,
        sites: int,
        data: str | list[str] = "digits",
        common: bool = False,
        code: tuple[Path, ...] = (),
        **policy,
    ):
        self.folder = folder
        sources = [data] * sites if isinstance(data, str) else data
        kept = folder / "kept"
        self.sites = [
            Site(f"site-{n}", source, kept, common=common, code=SiteCode(code))
            for n, source in enumerate(sources)
        ]
        self.grid = InProcessGrid(*(site.answer for site in self.sites))
        self.policy = RoundPolicy(**{"deadline": 60.0, "patience": 60.0, **policy})

    def federation(self, spec: RunSpec, experiment: str = EXPERIMENT) -> Federation:
        """As the server app makes it."""
        transport = Transport(self.grid, self.policy)
        registry = open_registry(self.folder / "sites.json", spec.config, transport)
        return make_federation(spec, transport, registry, experiment)

    def fit(self, spec: RunSpec, **more) -> Run:
        """A whole run."""
        config = spec.config
        return self.federation(spec).fit(
            config.rounds, eval_every=config.eval_every, quiet=True, **more
        )


class Link(nullcontext):
    """A control without a SuperLink, which runs the server app in a thread of this process."""

    def __init__(self, grid: Grid):
        super().__init__(self)
        self.grid = grid
        self.app = threading.Thread()
        self.active: int | None = None

    def active_run_id(self, path: Path) -> int | None:
        return self.active

    def submit(self, path: Path) -> int:
        assert not (path / waiting.FILE).exists()  # an older one is of no run that goes on
        self.app = threading.Thread(target=serve_run, args=(self.grid, path, True))
        self.app.start()
        return 1

    def status(self, run_id: int) -> RunStatus:
        ended = not self.app.is_alive()
        return RunStatus("finished" if ended else "running", "completed", "")
