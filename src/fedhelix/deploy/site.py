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

from fedhelix.channel import kept as sound
from fedhelix.client import (
    Job,
    Setup,
    Training,
    client_of,
    evaluate,
    judge_clients,
    predict,
    received_model,
    work,
)
from fedhelix.data import Dataset, Split
from fedhelix.data.datasets import canonical
from fedhelix.deploy import elsewhere, letters
from fedhelix.deploy.elsewhere import OWN, own_split
from fedhelix.deploy.letters import NAME, Letter
from fedhelix.errors import BadInput
from fedhelix.federation import device_of, network, setup_of
from fedhelix.registry import is_known
from fedhelix.runs.config import Config, Plan, located, read_plan
from fedhelix.task import task_for
from fedhelix.tree import Tree, load, save, to_device


class Site:
    """Answers letters with letters; what its client keeps lies in a folder, by experiment and site.

    `data` is FILE.npz or a folder with the site's own samples, or the name of a common data set, of which the site
    then takes the part of its number. With `common` the samples in FILE.npz are those of all sites, too.
    """

    def __init__(self, name: str, data: str, folder: Path | str, data_dir: str | None = None, common: bool = False):
        if not NAME.fullmatch(name):
            raise BadInput(f"a site's name has up to 63 letters, digits, dots and dashes, unlike '{name}'.")
        self.name, self.data_dir, self.folder = name, data_dir, Path(folder)
        own = not common and (Path(data).exists() or data.endswith(".npz"))
        self.own_data = elsewhere.read_own(data) if own else None
        self.source = OWN if own else common_source(data)
        self._setup: tuple[str, Setup] | None = None

    def check_data(self) -> None:
        """Load the data once, so that mistakes show at the start and not in the first round."""
        if self.own_data is None:
            Config(data=self.source, data_dir=self.data_dir).load()

    def answer(self, content: bytes) -> bytes:
        """The answer to a letter; what goes wrong is an answer too."""
        begun, about = time.monotonic(), dict[str, Any]()
        try:
            letter = letters.read(content)
            about = letter.about
            said, body = self._handler(about.get("kind"))(letter)
        except BadInput as problem:
            said, body = {"error": str(problem)}, {}
        except Exception as problem:
            traceback.print_exc()  # into the site's log
            said, body = {"error": f"{type(problem).__name__}: {problem}"}, {}
        same = {key: about.get(key) for key in letters.ASKED}
        took = {"site": self.name, "seconds": time.monotonic() - begun}
        return letters.write({**same, **took, **said}, body)

    def _handler(self, kind: Any) -> Callable[[Letter], tuple[dict[str, Any], Tree]]:
        known = {
            "who": self.who,
            "hello": self.hello,
            "reply": self.reply,
            "settle": self.settle,
            "work": self.work,
            "evaluate": self.evaluate,
            "judge": self.judge,
        }
        if kind not in known:
            raise BadInput(f"there is no request {kind!r}; is the server's fedhelix newer than the site's?")
        return known[kind]

    def who(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """Its name, and what kind of data it has."""
        return elsewhere.kind_of(self.own_data) if self.own_data else {"data": self.source}, {}

    def hello(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """What its client tells before round 0."""
        setup, job, _ = self._open(letter)
        return {}, setup.asked.hello(client_of(setup, job))

    def reply(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """A newcomer's turn in its dialogue with the server."""
        setup, job, _ = self._open(letter)
        return {}, setup.asked.reply(job.payload, client_of(setup, job))

    def settle(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """What a newcomer keeps of the dialogue is its state before its first round."""
        setup, job, kept = self._open(letter)
        kept.write(job.round - 1, setup.asked.settle(job.payload, client_of(setup, job)))
        return {}, {}

    def work(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """A round of its client. What the client keeps is on disk before the answer leaves."""
        setup, job, kept = self._open(letter)
        outcome = work(setup, job)
        kept.write(job.round, sound([outcome], {job.client: job.own})[job.client])
        return {"samples": outcome.samples, "loss": outcome.loss}, outcome.upload

    def evaluate(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """The client's personal model on its own samples."""
        setup, job, _ = self._open(letter)
        return evaluate(setup, job)._asdict(), {}

    def judge(self, letter: Letter) -> tuple[dict[str, Any], Tree]:
        """The same as it was received, before any training of the client's."""
        setup, job, _ = self._open(letter)
        outputs = partial(predict, setup, received_model(setup, job))
        return judge_clients(setup, [job.client], outputs)[job.client]._asdict(), {}

    def _open(self, letter: Letter) -> tuple[Setup, Job, Kept]:
        """Everything that the client's work depends on."""
        about = letter.about
        experiment, client, round = str(about.get("experiment")), about.get("client"), about.get("round")
        if not NAME.fullmatch(experiment) or type(client) is not int or type(round) is not int:
            raise BadInput("the letter does not say which experiment, client and round it is about.")
        kept = Kept(self.folder / experiment / self.name)
        if "supplement" in letter.body:
            kept.write_supplement(letter.body["supplement"])
        setup = self._setup_for(about, client, kept)
        # The server knows a client's state only before its first round: as its reply to the hello.
        own = kept.read(round) or letter.body.get("own", {})
        payload, own = (to_device(tree, setup.device) for tree in (letter.body.get("payload", {}), own))
        job = Job(client, round, payload, own, about.get("arriving") is True)
        return setup, job, kept

    def _setup_for(self, about: Mapping[str, Any], client: int, kept: Kept) -> Setup:
        key = json.dumps([about.get("plan"), about.get("classes"), client])
        if self._setup is None or self._setup[0] != key:
            self._setup = None  # two data sets need not be in memory at once
            self._setup = key, self._make_setup(about, client, kept)
        return self._setup[1]

    def _make_setup(self, about: Mapping[str, Any], client: int, kept: Kept) -> Setup:
        given = json.loads(about["plan"])
        # A name from the registry and nothing else: FILE.py would be code that the server chooses.
        if not is_known(str(given["method"]["name"])):
            raise BadInput(f"the site knows no method '{given['method']['name']}'.")
        plan = read_plan({**given, "data_dir": self.data_dir, "device": "auto", "engine": "serial"}, "the letter")
        if plan.config.data != self.source:
            raise BadInput(f"the run is about the data '{plan.config.data}', but the site has '{self.source}'.")
        if self.own_data is None:
            return plan.config.federation(plan.method).engine.setup
        data = dataclasses.replace(self.own_data, classes=about["classes"])
        nobody = Split(*[np.empty(0, dtype=np.int64)] * 3)  # of the other clients the site knows nothing
        splits = [nobody] * client
        splits.append(own_split(len(data.x), len(data.x_test), plan.config.valid, plan.config.seed, client))
        if supplement := kept.supplement():
            x, y = (torch.cat([getattr(data, name), supplement[name]]) for name in ("x", "y"))
            given = np.arange(len(data.x), len(x))
            splits[client] = dataclasses.replace(splits[client], train=np.append(splits[client].train, given))
            data = dataclasses.replace(data, x=x, y=y)
        return own_setup(plan, data, splits)


def common_source(data: str) -> str:
    """What runs call data of which each site takes its part: a data set by its name, or FILE.npz."""
    if data.endswith(".npz"):
        return str(located({"data": data})["data"])
    try:
        return canonical(data)
    except BadInput:
        if not Path(data).is_dir():
            raise
        raise BadInput(
            f"'{data}' is a folder; pack its arrays into one FILE.npz to spread them over sites, or start every site "
            "with a folder of its own by `fedhelix site`."
        ) from None


def own_setup(plan: Plan, data: Dataset, splits: list[Split]) -> Setup:
    """What `Federation` sets up for its engine, from the point of view of one site."""
    config = plan.config
    module, units = network(config.model, data, plan.method, config.seed)
    training = Training(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Training)})
    task, device = task_for(data.classes, None, None), device_of("auto")
    return setup_of(plan.method, module, units, data, splits, training, task, config.seed, device, config.kernels)


class Kept:
    """What one client keeps in one experiment: its state after the last round that it worked in, and the one before.

    The older one is for a server that was killed in a round and plays it again: the client then starts where it did
    at the first time.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("own-")) for path in self.folder.glob("own-*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"own-{round:06d}.safetensors"

    def read(self, round: int) -> Tree:
        """The state at the beginning of a round."""
        before = [found for found in self._rounds() if found < round]
        return load(self._path(before[-1])) if before else {}

    def write(self, round: int, own: Tree) -> None:
        """The state after a round; states that no server will ask for again go."""
        before = [found for found in self._rounds() if found < round]
        if own or before:
            save(own, self._path(round))
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
