"""A site: one client with its data and its state, which answers the server's letters."""

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
from fedhelix.core.tree import Tree, load, save, to_device
from fedhelix.data import Dataset, Split
from fedhelix.data.datasets import canonical
from fedhelix.deploy import messages, remote_data
from fedhelix.deploy.messages import NAME, Message
from fedhelix.deploy.remote_data import OWN, own_split
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
from fedhelix.federation.setup import client_setup, device_of, network
from fedhelix.federation.uploads import keep_states
from fedhelix.runs.config import Config
from fedhelix.runs.spec import RunSpec, located, read_spec


class Site:
    """Answers letters with letters; what its client keeps lies in a folder, by experiment and site.

    `data` is FILE.npz or a folder with the site's own samples, or the name of a common data set, of
    which the site then takes the part of its number. With `common` the samples in FILE.npz are
    those of all sites, too.
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
        client_state = not common and (Path(data).exists() or data.endswith(".npz"))
        self.own_data = remote_data.read_own(data) if client_state else None
        self.source = OWN if client_state else common_source(data)
        self._setup: tuple[str, Setup] | None = None

    def check_data(self) -> None:
        """Load the data once, so that mistakes show at the start and not in the first round."""
        if self.own_data is None:
            Config(data=self.source, data_dir=self.data_dir).load()

    def answer(self, content: bytes) -> bytes:
        """The answer to a letter; what goes wrong is an answer too."""
        begun, about = time.monotonic(), dict[str, Any]()
        try:
            message = messages.read(content)
            about = message.about
            said, body = self._handler(about.get("kind"))(message)
        except UserError as problem:
            said, body = {"error": str(problem)}, {}
        except Exception as problem:
            traceback.print_exc()  # into the site's log
            said, body = {"error": f"{type(problem).__name__}: {problem}"}, {}
        same = {key: about.get(key) for key in messages.REPEATED}
        took = {"site": self.name, "seconds": time.monotonic() - begun}
        return messages.write({**same, **took, **said}, body)

    def _handler(self, kind: Any) -> Callable[[Message], tuple[dict[str, Any], Tree]]:
        known = {
            "who": self.who,
            "client_init": self.client_init,
            "onboard_client": self.onboard_client,
            "onboard_state": self.onboard_state,
            "train": self.train,
            "evaluate": self.evaluate,
            "evaluate_received": self.evaluate_received,
        }
        if kind not in known:
            raise UserError(
                f"there is no request {kind!r}; is the server's fedhelix newer than the site's?"
            )
        return known[kind]

    def who(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """Its name, and what kind of data it has."""
        return remote_data.kind_of(self.own_data) if self.own_data else {"data": self.source}, {}

    def client_init(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """What its client tells before round 0."""
        setup, task, _ = self._open(message)
        return {}, setup.hooks.client_init(make_client(setup, task))

    def onboard_client(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """A newcomer's turn in its dialogue with the server."""
        setup, task, _ = self._open(message)
        return {}, setup.hooks.onboard_client(task.payload, make_client(setup, task))

    def onboard_state(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """What a newcomer keeps of the dialogue is its state before its first round."""
        setup, task, kept = self._open(message)
        kept.write(
            task.round - 1, setup.hooks.onboard_state(task.payload, make_client(setup, task))
        )
        return {}, {}

    def train(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """A round of its client. What the client keeps is on disk before the answer leaves."""
        setup, task, kept = self._open(message)
        result = run_client(setup, task)
        kept.write(task.round, keep_states([result], {task.client: task.client_state})[task.client])
        return {"samples": result.samples, "loss": result.loss}, result.upload

    def evaluate(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """The client's personal model on its own samples."""
        setup, task, _ = self._open(message)
        return evaluate(setup, task)._asdict(), {}

    def evaluate_received(self, message: Message) -> tuple[dict[str, Any], Tree]:
        """The same as it was received, before any training of the client's."""
        setup, task, _ = self._open(message)
        outputs = partial(predict, setup, received_model(setup, task))
        return evaluate_clients(setup, [task.client], outputs)[task.client]._asdict(), {}

    def _open(self, message: Message) -> tuple[Setup, ClientTask, SiteState]:
        """Everything that the client's work depends on."""
        about = message.about
        experiment, client, round = (
            str(about.get("experiment")),
            about.get("client"),
            about.get("round"),
        )
        if not NAME.fullmatch(experiment) or type(client) is not int or type(round) is not int:
            raise UserError(
                "the letter does not say which experiment, client and round it is about."
            )
        kept = SiteState(self.folder / experiment / self.name)
        if "supplement" in message.body:
            kept.write_supplement(message.body["supplement"])
        setup = self._setup_for(about, client, kept)
        # The server knows a client's state only before its first round: as its reply to the hello.
        client_state = kept.read(round) or message.body.get("client_state", {})
        payload, client_state = (
            to_device(tree, setup.device)
            for tree in (message.body.get("payload", {}), client_state)
        )
        task = ClientTask(client, round, payload, client_state, about.get("arriving") is True)
        return setup, task, kept

    def _setup_for(self, about: Mapping[str, Any], client: int, kept: SiteState) -> Setup:
        key = json.dumps([about.get("plan"), about.get("classes"), client])
        if self._setup is None or self._setup[0] != key:
            self._setup = None  # two data sets need not be in memory at once
            self._setup = key, self._make_setup(about, client, kept)
        return self._setup[1]

    def _make_setup(self, about: Mapping[str, Any], client: int, kept: SiteState) -> Setup:
        given = json.loads(about["plan"])
        # A name from the registry and nothing else: FILE.py would be code that the server chooses.
        if not is_known(str(given["method"]["name"])):
            raise UserError(f"the site knows no method '{given['method']['name']}'.")
        spec = read_spec(
            {**given, "data_dir": self.data_dir, "device": "auto", "engine": "serial"}, "the letter"
        )
        if spec.config.data != self.source:
            raise UserError(
                f"the run is about the data '{spec.config.data}', but the site has '{self.source}'."
            )
        if self.own_data is None:
            return spec.config.federation(spec.method).engine.setup
        data = dataclasses.replace(self.own_data, classes=about["classes"])
        nobody = Split(
            *[np.empty(0, dtype=np.int64)] * 3
        )  # of the other clients the site knows nothing
        splits = [nobody] * client
        splits.append(
            own_split(len(data.x), len(data.x_test), spec.config.valid, spec.config.seed, client)
        )
        if supplement := kept.supplement():
            x, y = (torch.cat([getattr(data, name), supplement[name]]) for name in ("x", "y"))
            given = np.arange(len(data.x), len(x))
            splits[client] = dataclasses.replace(
                splits[client], train=np.append(splits[client].train, given)
            )
            data = dataclasses.replace(data, x=x, y=y)
        return own_setup(spec, data, splits)


def common_source(data: str) -> str:
    """What runs call data of which each site takes its part: a data set by its name, or FILE.npz."""
    if data.endswith(".npz"):
        return str(located({"data": data})["data"])
    try:
        return canonical(data)
    except UserError:
        if not Path(data).is_dir():
            raise
        raise UserError(
            f"'{data}' is a folder; pack its arrays into one FILE.npz to spread them over sites, or start every site "
            "with a folder of its own by `fedhelix site`."
        ) from None


def own_setup(spec: RunSpec, data: Dataset, splits: list[Split]) -> Setup:
    """What `Federation` sets up for its engine, from the point of view of one site."""
    config = spec.config
    module, layers = network(config.model, data, spec.method, config.seed)
    objective = objective_for(data.classes, None, None)
    setup = Setup(
        spec.method, module, layers, {}, data, splits, config, objective, config.seed,
        device_of("auto"),
    )  # fmt: skip
    return client_setup(setup, config.kernels)


class SiteState:
    """What one client keeps in one experiment: its state after the last round that it worked in,
    and the one before.

    The older one is for a server that was killed in a round and plays it again: the client then
    starts where it did at the first time.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def _rounds(self) -> list[int]:
        return sorted(
            int(path.stem.removeprefix("own-")) for path in self.folder.glob("own-*.safetensors")
        )

    def _path(self, round: int) -> Path:
        return self.folder / f"own-{round:06d}.safetensors"

    def read(self, round: int) -> Tree:
        """The state at the beginning of a round."""
        before = [found for found in self._rounds() if found < round]
        return load(self._path(before[-1])) if before else {}

    def write(self, round: int, client_state: Tree) -> None:
        """The state after a round; states that no server will ask for again go."""
        before = [found for found in self._rounds() if found < round]
        if client_state or before:
            save(client_state, self._path(round))
        for found in self._rounds():
            if found > round or found in before[:-1]:
                self._path(found).unlink(missing_ok=True)

    def supplement(self) -> Tree:
        """Samples that the server gave."""
        path = self.folder / "supplement.safetensors"
        return load(path) if path.exists() else {}

    def write_supplement(self, samples: Tree) -> None:
        """Samples that the server gives."""
        save(samples, self.folder / "supplement.safetensors")
