"""A site: one client with its data and its state, which answers the server's requests."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedhelix.core.errors import BudgetSpent, UserError
from fedhelix.core.imports import from_extra
from fedhelix.core.shift import unshifted
from fedhelix.core.tree import State, Tree, payload_bytes, to_device
from fedhelix.data.scaling import large_inputs
from fedhelix.deploy import messages
from fedhelix.deploy.audit_log import AuditLog, fingerprint, shapes
from fedhelix.deploy.budgets import Budgets, check_counted, spent_by_round
from fedhelix.deploy.code import SiteCode
from fedhelix.deploy.key_ring import KeyRing
from fedhelix.deploy.logs import say, write_traceback
from fedhelix.deploy.masked import Masker, task_digest
from fedhelix.deploy.messages import Message
from fedhelix.deploy.remote_data import (
    OWN,
    common_source,
    describe_data,
    read_site_data,
)
from fedhelix.deploy.schema import NAME, clipped
from fedhelix.deploy.site_policy import PolicyRefusal, SitePolicy, chain
from fedhelix.deploy.site_setup import own_setup
from fedhelix.deploy.site_state import GONE_BACK, SiteState, disk_error, draws_once, latest_model
from fedhelix.engines.local import (
    ClientTask,
    Setup,
    evaluate_clients,
    make_client,
    personal_model,
    predict,
    received_model,
    run_client,
)
from fedhelix.federation.uploads import keep_states
from fedhelix.methods.budget import Budgeted
from fedhelix.runs.config import Config
from fedhelix.runs.spec import RunSpec, read_spec
from fedhelix.store.progress import human_seconds

Answer = tuple[dict[str, Any], Tree]  # header fields and body
MOST_EXPERIMENTS = 256  # whose state a site keeps


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
        policy: SitePolicy | None = None,
        log: AuditLog | None = None,
        code: SiteCode | None = None,
        key: Path | None = None,
    ):
        if not NAME.fullmatch(name):
            raise UserError(
                f"a site's name has up to 63 letters, digits, dots and dashes, unlike '{name}'."
            )
        self.name, self.data_dir, self.folder = name, data_dir, Path(folder)
        has_own = not common and (Path(data).exists() or data.endswith(".npz"))
        self.own_data = read_site_data(data) if has_own else None
        self.source, self.place = OWN if has_own else common_source(data), data
        self._setup: tuple[str, Setup] | None = None
        self.policy, self.log, self.code = policy or SitePolicy(), log, code or SiteCode()
        self._masker = Masker(KeyRing(key, self.policy.peers))
        self.budgets = Budgets(self.folder / f"{name}.budgets.json")

    def check_data(self) -> None:
        """Load the data once, so that mistakes, and columns of large numbers, show at the start."""
        if self.own_data is None:
            Config(data=self.source, data_dir=self.data_dir).load()
        elif large := large_inputs(self.own_data, self.place):
            say(f"{large}, at all sites; scale the columns as the other sites do", "warning")

    def answer(self, content: bytes) -> bytes:
        """Answer a request; errors become answers too."""
        begun, header = time.monotonic(), dict[str, Any]()
        try:
            self.policy.check_bytes(len(content))
            message = messages.read_request(content)
            header = message.header
            self.policy.check_message(header, message.body, datetime.datetime.now().time())
            fields, body = self._handlers[header["kind"]](message)
            self.policy.check_bytes(payload_bytes(body))
        except UserError as problem:
            say(f"refused: {str(problem).rstrip('.')}", "warning")
            fields, body = {"error": str(problem), **self._spent(header)}, {}
            for flag, kind in (("policy", PolicyRefusal), ("spent", BudgetSpent)):
                fields |= {flag: True} if isinstance(problem, kind) else {}
            if wait := self.policy.opens_in(datetime.datetime.now()):
                fields["opens_in"] = wait
        except OSError as problem:
            fields, body = disk_error(problem), {}
        except Exception as problem:
            write_traceback()
            words = clipped(f"{type(problem).__name__}: {problem}")
            fields, body = {"error": f"the site cannot work on what the server sent ({words})"}, {}
        if "loss" in fields and not self.policy.metrics:
            fields = {**fields, "loss": None}
        repeated = {key: header.get(key) for key in messages.REPEATED}
        took = {"site": self.name, "seconds": time.monotonic() - begun}
        said = {**repeated, **took, **fields}
        answer = messages.write(said, body)
        if self.log is not None:
            digest = fingerprint(content)["sha256"]
            asked = {"method": messages.method_name(header), "asked": digest}
            try:
                self.log.append({**said, **asked, "sent": shapes(body), **fingerprint(answer)})
            except OSError as problem:  # nothing else leaves without a line in the log
                return messages.write({**repeated, **took, **disk_error(problem)})
        return answer

    def _spent(self, header: Mapping[str, Any]) -> dict[str, float]:
        """The epsilon of a run as the site's last answer had it, which the server may have lost."""
        try:
            return SiteState(self.folder / header["experiment"] / self.name).spent()
        except (LookupError, UserError, OSError):  # no request of a run, or an unreadable file
            return {}

    @property
    def _handlers(self) -> dict[str, Callable[[Message], Answer]]:
        return {
            "describe": self.describe,
            "client_init": self.client_init,
            "onboard_client": self.onboard_client,
            "onboard_state": self.onboard_state,
            "masking_keys": self.masking_keys,
            "masking_shares": self.masking_shares,
            "train": self.train,
            "masking_agree": self.masking_agree,
            "masking_reveal": self.masking_reveal,
            "evaluate": self.evaluate,
            "evaluate_received": self.evaluate_received,
        }

    def describe(self, message: Message) -> Answer:
        """Describe the site's data; the site's log says so where a run goes on without it."""
        if why := message.header.get("left_out"):
            say(f"the run goes on without this site, which {clipped(why)}", "warning")
        else:
            say("a run asks which data this site has")
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
        if not kept.has_sent:  # else it has joined, and goes on counting what it has spent
            kept.write(task.round - 1, state)
        return {}, {}

    def train(self, message: Message) -> Answer:
        """One round of the client; its new state is on disk before the answer leaves."""
        setup, task, kept = self._open(message)
        name = message.header["experiment"]
        self._check_noise(name, setup, task)
        if is_masked := setup.method.capabilities.masks is not None:
            self._masker.check_shares(name, task, message.body)
        self.budgets.reserve(name, setup.method)
        sent = self._trained(setup, task, kept, task_digest(message.header, task.payload))
        if not is_masked:
            return sent["fields"], sent["upload"]
        return sent["fields"], self._masker.upload(name, task, message.body, sent, kept)

    def _check_noise(self, experiment: str, setup: Setup, task: ClientTask) -> None:
        """Refuse a round, or its scores, by its noise and clip and by what all runs have spent."""
        self.policy.check_payload(setup.method, task.payload)
        self.policy.check_total(self.budgets.total(experiment, setup.method))

    def _trained(self, setup: Setup, task: ClientTask, kept: SiteState, digest: bytes) -> Tree:
        """What a round of the client gives; where it has noise, this is drawn and counted once,
        and the round of an earlier number is refused.
        """
        drawn_once = draws_once(setup.method)
        if drawn_once and (sent := kept.sent(task.round)):
            if sent["task"] != digest.hex():  # a masked upload would make the sum nonsense
                raise UserError(
                    f"round {task.round + 1} was answered for another model or other settings "
                    f"already; {GONE_BACK}"
                )
            return to_device(sent, setup.device)
        check_counted(setup.method, task.payload, kept.spent().get("noisy_rounds", 0))
        begun = time.monotonic()
        result = run_client(setup, task)
        seconds = time.monotonic() - begun
        said = f"{result.samples} samples, loss {result.loss or 0:.4g}, {human_seconds(seconds)}"
        say(f"round {task.round + 1}: {said}")
        kept.write(task.round, keep_states([result], {task.client: task.client_state})[task.client])
        fields = {"samples": result.samples, "loss": result.loss, "seconds": seconds, **kept.remark}
        fields |= spent_by_round(setup, task, result.client_state)
        sent = {"round": task.round, "fields": fields, "upload": result.upload}
        sent["task"] = digest.hex()
        if drawn_once:
            kept.write_sent(sent)
        return sent

    def masking_keys(self, message: Message) -> Answer:
        """The site's public keys for the masks of a round."""
        setup, task, kept = self._open(message)
        return {}, self._masker.keys(message.header["experiment"], setup.method, task, kept)

    def masking_shares(self, message: Message) -> Answer:
        """Shares of its secrets for the other sites."""
        _, task, _ = self._open(message)
        return {}, self._masker.shares(message.header["experiment"], task, message.body)

    def masking_agree(self, message: Message) -> Answer:
        """Its signature on who has answered."""
        _, task, kept = self._open(message)
        return {}, self._masker.agree(message.header["experiment"], task, message.body, kept)

    def masking_reveal(self, message: Message) -> Answer:
        """Its shares of what unmasks the sum."""
        _, task, kept = self._open(message)
        return {}, self._masker.reveal(message.header["experiment"], task, message.body, kept)

    def evaluate(self, message: Message) -> Answer:
        """The scores of the client's personal model on its own samples."""
        setup, task, kept = self._open(message)
        used = personal_model(setup, task)
        if task.final:
            kept.write_model(setup, used.state, {**message.header, "kind": "used"})
        self.policy.check_scores()
        self._check_noise(message.header["experiment"], setup, task)
        outputs = partial(predict, setup, unshifted(used.state))
        scores = evaluate_clients(setup, {task.client: used}, outputs)[task.client]
        say(f"after round {task.round}: {setup.objective.name} {scores.test:.4f} on own samples")
        return {**scores._asdict(), **kept.remark}, {}

    def evaluate_received(self, message: Message) -> Answer:
        """The scores of the model as received, before any training by the client."""
        setup, task, _ = self._open(message)
        self._check_noise(message.header["experiment"], setup, task)
        used = received_model(setup, task)
        outputs = partial(predict, setup, unshifted(used.state))
        return evaluate_clients(setup, {task.client: used}, outputs)[task.client]._asdict(), {}

    def used_model(self) -> tuple[Setup, State]:
        """The site's own model after its rounds of the latest run, and its set-up."""
        kept = SiteState(latest_model(self.folder, self.name).parent)
        header, state = kept.used()
        return self._setup_for(header, header["client"], kept), state

    def _open(self, message: Message) -> tuple[Setup, ClientTask, SiteState]:
        """Everything that the client's work depends on."""
        header, body = message
        experiment, client, round = header["experiment"], header["client"], header["round"]
        self._check_room(experiment)
        kept = SiteState(self.folder / experiment / self.name, header.get("after"))
        if "supplement" in body:
            kept.write_supplement(body["supplement"])
        setup = self._setup_for(header, client, kept)
        # The server knows a client's state only before its first round: its reply to client_init.
        reply = body.get("client_state", {})
        if draws_once(setup.method):  # whatever left counts, and no server says otherwise
            is_spent = any(isinstance(part, Budgeted) for part in chain(setup.method))
            kept.go_on_once(round, header.get("after"), is_spent)
            reply = {}
        else:
            kept.go_on_after(header.get("after"))
        client_state = to_device(kept.read() or reply, setup.device)
        payload = to_device(body.get("payload", {}), setup.device)
        plain = not setup.method.capabilities.packed_downloads
        messages.check_payload(payload, setup.initial, plain)
        flags = (header.get("trained") is True, header.get("final") is True)
        task = ClientTask(client, round, payload, client_state, *flags)
        return setup, task, kept

    def _check_room(self, experiment: str) -> None:
        """Refuse one experiment more than a site keeps the state of."""
        known = list(self.folder.glob(f"*/{self.name}")) if self.folder.exists() else []
        if len(known) >= MOST_EXPERIMENTS and self.folder / experiment / self.name not in known:
            raise UserError(
                f"the site keeps the state of {MOST_EXPERIMENTS} experiments; delete those that "
                f"are over in '{self.folder}'."
            )

    def _setup_for(self, header: Mapping[str, Any], client: int, kept: SiteState) -> Setup:
        told = [header.get(name) for name in ("experiment", "spec", "classes", "code")]
        key = json.dumps([*told, client])
        if self._setup is None or self._setup[0] != key:
            self._setup = None  # so that two data sets are never in memory at once
            setup = self._make_setup(header, client, kept)
            self._setup = key, dataclasses.replace(setup, deployed=True)
        return self._setup[1]

    def _make_setup(self, header: Mapping[str, Any], client: int, kept: SiteState) -> Setup:
        try:
            settings = json.loads(header["spec"])
            str(settings["method"]["name"])
        except (ValueError, TypeError, LookupError, RecursionError):
            raise UserError("the message does not say what to run.") from None
        # The site's own files alone: any other FILE.py would be code that the server chooses.
        settings = self.code.settled(settings, header.get("code") or {})
        here = {"data_dir": self.data_dir, "device": "auto", "engine": "serial"}
        spec = read_spec({**settings, **here}, "the message")
        if spec.method.capabilities.sample_gradients:  # the site counts its epsilon
            from_extra("dp_accounting", "privacy")
        self.policy.check_run(spec, header.get("classes"))
        self.policy.check_total(self.budgets.total(header["experiment"], spec.method))
        if spec.config.data != self.source:
            raise UserError(
                f"the run is about the data '{spec.config.data}', but the site has '{self.source}'."
            )
        if client >= spec.config.client_count + spec.config.newcomers:
            raise UserError(f"the run has no client {client}.")
        setup = self._setup_of(spec, header, client, kept)
        parameters = sum(setup.layers.sizes.values())
        self.policy.check_work(spec, len(setup.splits[client].train), parameters)
        return setup

    def _setup_of(
        self, spec: RunSpec, header: Mapping[str, Any], client: int, kept: SiteState
    ) -> Setup:
        if self.own_data is None:
            return spec.config.federation(spec.method).engine.setup
        data = dataclasses.replace(self.own_data, classes=header.get("classes"))
        return own_setup(spec, data, client, kept.supplement())
