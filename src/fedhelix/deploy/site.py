"""A site: one client with its data and its state, which answers the server's requests."""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhelix.core.errors import UserError
from fedhelix.core.objective import objective_for
from fedhelix.core.registry import is_known
from fedhelix.core.shift import without_shift
from fedhelix.core.tree import Tree, load, save, to_device
from fedhelix.data import Dataset, Split
from fedhelix.data.loading import canonical
from fedhelix.deploy import messages
from fedhelix.deploy.messages import NAME, Message
from fedhelix.deploy.remote_data import OWN, describe_data, read_site_data, site_split
from fedhelix.engines.local import (
    ClientTask,
    Setup,
    evaluate,
    evaluate_clients,
    make_client,
    predict,
    received_model,
    run_client,
)
from fedhelix.federation.inputs import client_setup, device_of, network
from fedhelix.federation.uploads import keep_states
from fedhelix.runs.config import Config
from fedhelix.runs.spec import RunSpec, located, read_spec

Answer = tuple[dict[str, Any], Tree]  # header fields and body


class Site:
    """Answers requests; its client's state lies in `folder`, by experiment and site.

    `data` is FILE.npz or a folder with the site's own samples, or the name of a common data set,
    of which the site takes the split of its client number. With `common` the samples in FILE.npz
    are a common data set too.
    """

    def __init__(
        self,
        name: str,
        data: str,
        folder: Path | str,
        data_dir: str | None = None,
        common: bool = False,
    ):
        if not NAME.fullmatch(name):
            raise UserError(
                f"a site's name has up to 63 letters, digits, dots and dashes, unlike '{name}'."
            )
        self.name, self.data_dir, self.folder = name, data_dir, Path(folder)
        has_own = not common and (Path(data).exists() or data.endswith(".npz"))
        self.own_data = read_site_data(data) if has_own else None
        self.source = OWN if has_own else common_source(data)
        self._setup: tuple[str, Setup] | None = None

    def check_data(self) -> None:
        """Load the data once, so that mistakes show at the start and not in the first round."""
        if self.own_data is None:
            Config(data=self.source, data_dir=self.data_dir).load()

    def answer(self, content: bytes) -> bytes:
        """Answer a request; errors become answers too."""
        begun, header = time.monotonic(), dict[str, Any]()
        try:
            message = messages.read(content)
            header = message.header
            fields, body = self._handler(header.get("kind"))(message)
        except UserError as problem:
            fields, body = {"error": str(problem)}, {}
        except Exception as problem:
            traceback.print_exc()  # into the site's log
            fields, body = {"error": f"{type(problem).__name__}: {problem}"}, {}
        repeated = {key: header.get(key) for key in messages.REPEATED}
        took = {"site": self.name, "seconds": time.monotonic() - begun}
        return messages.write({**repeated, **took, **fields}, body)

    def _handler(self, kind: Any) -> Callable[[Message], Answer]:
        handlers = {
            "describe": self.describe,
            "client_init": self.client_init,
            "onboard_client": self.onboard_client,
            "onboard_state": self.onboard_state,
            "train": self.train,
            "evaluate": self.evaluate,
            "evaluate_received": self.evaluate_received,
        }
        if kind not in handlers:
            raise UserError(
                f"there is no request {kind!r}; is the server's fedhelix newer than the site's?"
            )
        return handlers[kind]

    def describe(self, message: Message) -> Answer:
        """Describe the site's data."""
        return describe_data(self.own_data) if self.own_data else {"data": self.source}, {}

    def client_init(self, message: Message) -> Answer:
        """What the client sends before round 0."""
        setup, task, _ = self._open(message)
        return {}, setup.hooks.client_init(make_client(setup, task))

    def onboard_client(self, message: Message) -> Answer:
        """A newcomer's turn in its dialogue with the server."""
        setup, task, _ = self._open(message)
        return {}, setup.hooks.onboard_client(task.payload, make_client(setup, task))

    def onboard_state(self, message: Message) -> Answer:
        """Store the state with which a newcomer enters its first round."""
        setup, task, kept = self._open(message)
        state = setup.hooks.onboard_state(task.payload, make_client(setup, task))
        kept.write(task.round - 1, state)
        return {}, {}

    def train(self, message: Message) -> Answer:
        """One round of the client; its new state is on disk before the answer leaves."""
        setup, task, kept = self._open(message)
        drawn_once = setup.method.capabilities.outermost  # noise that is drawn anew protects less
        if drawn_once and (sent := kept.sent(task.round)):
            return sent["fields"], to_device(sent["upload"], setup.device)
        result = run_client(setup, task)
        kept.write(task.round, keep_states([result], {task.client: task.client_state})[task.client])
        fields = {"samples": result.samples, "loss": result.loss}
        if drawn_once:
            kept.write_sent({"round": task.round, "fields": fields, "upload": result.upload})
        return fields, result.upload

    def evaluate(self, message: Message) -> Answer:
        """The scores of the client's personal model on its own samples."""
        setup, task, _ = self._open(message)
        return evaluate(setup, task)._asdict(), {}

    def evaluate_received(self, message: Message) -> Answer:
        """The scores of the model as received, before any training by the client."""
        setup, task, _ = self._open(message)
        used = received_model(setup, task)
        outputs = partial(predict, setup, without_shift(used.state))
        return evaluate_clients(setup, {task.client: used}, outputs)[task.client]._asdict(), {}

    def _open(self, message: Message) -> tuple[Setup, ClientTask, SiteState]:
        """Everything that the client's work depends on."""
        header, body = message
        experiment = str(header.get("experiment"))
        client, round = header.get("client"), header.get("round")
        if not NAME.fullmatch(experiment) or type(client) is not int or type(round) is not int:
            raise UserError(
                "the message does not say which experiment, client and round it is about."
            )
        kept = SiteState(self.folder / experiment / self.name)
        if "supplement" in body:
            kept.write_supplement(body["supplement"])
        setup = self._setup_for(header, client, kept)
        # The server knows a client's state only before its first round: its reply to client_init.
        client_state = to_device(kept.read(round) or body.get("client_state", {}), setup.device)
        payload = to_device(body.get("payload", {}), setup.device)
        flags = (header.get("trained") is True, header.get("final") is True)
        task = ClientTask(client, round, payload, client_state, *flags)
        return setup, task, kept

    def _setup_for(self, header: Mapping[str, Any], client: int, kept: SiteState) -> Setup:
        key = json.dumps([header.get("spec"), header.get("classes"), client])
        if self._setup is None or self._setup[0] != key:
            self._setup = None  # so that two data sets are never in memory at once
            setup = self._make_setup(header, client, kept)
            self._setup = key, dataclasses.replace(setup, deployed=True)
        return self._setup[1]

    def _make_setup(self, header: Mapping[str, Any], client: int, kept: SiteState) -> Setup:
        settings = json.loads(header["spec"])
        # A name from the registry and nothing else: FILE.py would be code that the server chooses.
        if not is_known(str(settings["method"]["name"])):
            raise UserError(f"the site knows no method '{settings['method']['name']}'.")
        here = {"data_dir": self.data_dir, "device": "auto", "engine": "serial"}
        spec = read_spec({**settings, **here}, "the message")
        if spec.config.data != self.source:
            raise UserError(
                f"the run is about the data '{spec.config.data}', but the site has '{self.source}'."
            )
        if self.own_data is None:
            return spec.config.federation(spec.method).engine.setup
        data = dataclasses.replace(self.own_data, classes=header["classes"])
        sizes = len(data.x), len(data.x_test)
        split = site_split(*sizes, spec.config.valid, spec.config.seed, client)
        if supplement := kept.supplement():
            x, y = (torch.cat([getattr(data, name), supplement[name]]) for name in ("x", "y"))
            added = np.arange(len(data.x), len(x))
            split = dataclasses.replace(split, train=np.append(split.train, added))
            data = dataclasses.replace(data, x=x, y=y)
        # The site knows nothing of the other clients.
        empty = Split(*[np.empty(0, dtype=np.int64)] * 3)
        return site_setup(spec, data, [empty] * client + [split])


def common_source(data: str) -> str:
    """The canonical name of a common data set: one from the catalogue, or the path of FILE.npz."""
    if data.endswith(".npz"):
        return str(located({"data": data})["data"])
    try:
        return canonical(data)
    except UserError:
        if not Path(data).is_dir():
            raise
        raise UserError(
            f"'{data}' is a folder; pack its arrays into one FILE.npz to spread them over sites, "
            "or start every site with a folder of its own by `fedhelix site`."
        ) from None


def site_setup(spec: RunSpec, data: Dataset, splits: list[Split]) -> Setup:
    """What `Federation` sets up for its engine, for one site with its own samples."""
    config = spec.config
    objective = objective_for(data.classes, targets=data.y)
    module, layers = network(config.model, data, spec.method, config.seed, objective)
    setup = Setup(
        spec.method, module, layers, {}, data, splits, config, objective, config.seed,
        device_of("auto"),
    )  # fmt: skip
    return client_setup(setup, config.kernels)


class SiteState:
    """A client's state in one experiment: after its last round, and after the one before.

    The older one is for a server that was killed in a round and runs it again: the client then
    starts from the same state as the first time.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._supplement_path = folder / "supplement.safetensors"
        self._sent_path = folder / "sent.safetensors"

    def _rounds(self) -> list[int]:
        return sorted(
            int(path.stem.removeprefix("own-")) for path in self.folder.glob("own-*.safetensors")
        )

    def _path(self, round: int) -> Path:
        return self.folder / f"own-{round:06d}.safetensors"

    def read(self, round: int) -> Tree:
        """The state at the beginning of a round."""
        earlier = [known for known in self._rounds() if known < round]
        return load(self._path(earlier[-1])) if earlier else {}

    def write(self, round: int, client_state: Tree) -> None:
        """Store the state after a round; states that no server will ask for again are deleted."""
        earlier = [known for known in self._rounds() if known < round]
        if client_state or earlier:
            save(client_state, self._path(round))
        for known in self._rounds():
            if known > round or known in earlier[:-1]:
                self._path(known).unlink(missing_ok=True)

    def sent(self, round: int) -> Tree:
        """The answer that was sent in a round, if it was the last one; earlier ones are refused."""
        last = load(self._sent_path) if self._sent_path.exists() else {"round": -1}
        if round < last["round"]:
            raise UserError(f"round {round + 1} is over, and its noise is not drawn again.")
        return last if round == last["round"] else {}

    def write_sent(self, answer: Tree) -> None:
        """Store the answer of a round before it leaves."""
        save(answer, self._sent_path)

    def supplement(self) -> Tree:
        """The samples that the server has supplied, if any."""
        return load(self._supplement_path) if self._supplement_path.exists() else {}

    def write_supplement(self, samples: Tree) -> None:
        """Store samples that the server supplies."""
        save(samples, self._supplement_path)
