"""An engine whose clients are remote sites; the round loop is the same as in a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from fedhelix.core.errors import EngineFailure, UnusableMessage, UserError
from fedhelix.core.tree import State, Tree, drop, to_device
from fedhelix.deploy import messages
from fedhelix.deploy.budgets import budget
from fedhelix.deploy.consistency import inconsistent_trees
from fedhelix.deploy.messages import Message
from fedhelix.deploy.policy import GO_ON, UNTAKEN, also
from fedhelix.deploy.readiness import wait_for_budget, wait_for_minimum, why_not_asked
from fedhelix.deploy.registry import SiteRegistry
from fedhelix.deploy.requests import Request
from fedhelix.deploy.transport import Transport
from fedhelix.engines.base import Engine, Evaluation
from fedhelix.engines.local import ClientResult, ClientTask, PersonalModel, Scores, Setup
from fedhelix.federation.uploads import finite

NOTHING: Mapping[int, Tree] = MappingProxyType({})
SCORED = ("test", "test_loss", "valid")  # the numbers in a site's scores


class RemoteEngine(Engine):
    """Sends client tasks to sites and collects the results.

    Clients without a usable answer are in `missing`, with the reason. Client state stays at its
    site, so results come without it.
    """

    name: ClassVar[str] = "flower"
    deployed: ClassVar[bool] = True

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        registry: SiteRegistry,
        common_header: Mapping[str, Any],
        enough: int | None,
        evaluates: bool,
    ):
        super().__init__(setup)
        self.why = "the clients are sites"
        self.transport, self.registry = transport, registry
        self.common_header = dict(common_header)  # of every request: experiment, spec, classes
        self.enough = enough  # that many answers end a round with extra clients
        self.evaluates = evaluates  # whether the server has test samples
        self.supplements: dict[int, Tree] = {}  # samples still to be sent to clients
        self.missing: dict[int, str] = {}
        self._refusing: dict[int, None] = {}  # of a round: who did answer, but unusably
        self._counted = 0  # rounds up to the last one that had enough answers
        self._spends = budget(setup.method) < math.inf
        self._worked = False  # whether a round had enough answers since this engine was made
        self._said: dict[int, str] = {}  # why clients refused rounds with too few answers
        self._site_seconds = 0.0  # work of the slowest sites
        self._max_bytes = messages.max_message_bytes(setup.initial)

    def request(
        self,
        kind: str,
        tasks: Sequence[ClientTask],
        enough: int | None = None,
        bodies: Mapping[int, Tree] = NOTHING,
    ) -> dict[int, Message]:
        """The sites' answers by client; clients without one are in `missing`.

        `bodies` holds what a client gets besides its payload and state.
        """
        registry = self.registry
        registry.enrol(self.transport.descriptions, self.transport.connected)
        self._count(tasks)
        requests = {
            registry.sites[task.client]: self._write(kind, task, bodies.get(task.client, {}))
            for task in tasks
            if task.client < len(registry.sites)
        }
        replies = self.transport.request(requests, self._max_bytes, enough)
        if kind == "train":
            reached = self.transport.reached & requests.keys()
            self.reached = {registry.client_of(site) for site in reached}
        left_out = self.transport.left_out.values()
        refusing = also(named for named in left_out if named[0] not in registry.sites)
        self.missing = {
            task.client: f"{UNTAKEN}{refusing}"
            for task in tasks
            if task.client >= len(registry.sites)
        }
        self.missing |= {
            registry.client_of(site): f"{site} {why}"
            for site, why in (replies.refusals | replies.absences).items()
        }
        self._refusing |= dict.fromkeys(sorted(map(registry.client_of, replies.refusals)))
        answers = {registry.client_of(site): answer for site, answer in replies.answers.items()}
        for client, answer in answers.items():
            self.supplements.pop(client, None)
            if (state_of := answer.header.get("state_of")) is not None:
                self.transport.dropped[registry.sites[client]] = (
                    f"goes on with its state of round {state_of + 1}, since it has no other"
                )
            if answer.header.get("anew"):
                self.transport.dropped[registry.sites[client]] = (
                    "has lost what it kept of this run, and begins anew"
                )
        times = [answer.header["seconds"] for answer in answers.values()]
        self._site_seconds += max(filter(math.isfinite, times), default=0.0)
        return answers

    def _write(self, kind: str, task: ClientTask, more: Tree) -> Request:
        header = {
            "kind": kind,
            "round": task.round,
            "client": task.client,
            "trained": task.trained,
            # Nobody keeps a model that was never trained.
            "final": task.final and self._counted > 0,
            "counted": self._counted,
            "after": task.client_state.get("after"),
            **self.common_header,
        }
        body = {"payload": task.payload, "client_state": drop(task.client_state, ["after"]), **more}
        if task.client in self.supplements:
            body["supplement"] = self.supplements[task.client]
        return Request(header, messages.write(header, body))

    def _count(self, tasks: Sequence[ClientTask]) -> None:
        """In a run that goes on, what the server keeps of its clients says which rounds counted."""
        known = [task.client_state.get("after", -1) + 1 for task in tasks]
        self._counted = max([self._counted, *known])

    def refuse(self, client: int, why: object) -> None:
        """Record that a client's answer cannot be used."""
        self.missing[client] = f"{self.registry.sites[client]} sent an answer that {why}"
        self._refusing[client] = None

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the sites with a valid answer; none if they are fewer than the minimum."""
        self._wait_for_sites()
        self._count(tasks)
        self.reached, self.unused = set(), []
        self._refusing.clear()
        clients = [task.client for task in tasks]
        if self._spends and (idle := why_not_asked(self.transport, self.registry, clients)):
            self.missing, self.exchanged = idle, self.exchanged and 0
            return []
        results = self.results(tasks)
        least = self.transport.policy.minimum
        if len(results) < least:
            needed = max(least, self.needed(len(tasks)))
            self._stop_if_hopeless(clients, needed)
            for client in results:
                site = self.registry.sites[client]
                self.missing[client] = f"{site} answered, but {least} answers are needed"
            self.unused += [result.upload for result in results.values()]
            return []
        self._counted, self._worked = tasks[0].round + 1, True
        return [results[task.client] for task in tasks if task.client in results]

    def _wait_for_sites(self) -> None:
        """Before a round: wait for enough sites; where it spends budget, for those that have some
        left and do not refuse.
        """
        if self._spends or self.able is not None:
            least = max(self.transport.policy.minimum, self.needed(1))
            wait_for_budget(self.transport, self.registry, self.able, least)
        else:
            wait_for_minimum(self.transport, self.registry.sites)

    def needed(self, cohort: int) -> int:
        """How many clients of a cohort the method itself needs."""
        return 1

    def results(self, tasks: Sequence[ClientTask]) -> dict[int, ClientResult]:
        """The valid results by client; the other clients are in `missing`."""
        return self.accept(self.request("train", tasks, self.enough))

    def accept(self, answers: Mapping[int, Message]) -> dict[int, ClientResult]:
        """The results in those answers that are valid; the others are refused.

        The server keeps in which round a client's answer counted last: its site goes on from there,
        as if it had not worked in rounds where its answer came too late.
        """
        results = {}
        for client, answer in answers.items():
            try:
                messages.check_tree(answer.body, self.setup.initial)
            except UserError as problem:
                self.refuse(client, problem)
                continue
            samples, loss = answer.header["samples"], answer.header.get("loss")
            upload = to_device(answer.body, self.setup.device)
            results[client] = ClientResult(
                client,
                samples,
                upload,
                {"after": answer.header["round"]},
                None if loss is None else float(loss),
            )
        uploads = {client: result.upload for client, result in results.items() if result.upload}
        for client, why in inconsistent_trees(uploads).items():
            self.refuse(client, why)
            del results[client]
        return results

    def _stop_if_hopeless(self, clients: Sequence[int], least: int) -> None:
        """Stop a run in which too many sites refuse from the start: all rounds would be empty.

        In a run that goes on, they must refuse twice for the same reasons: a site may refuse rounds
        that it has answered before, and take part in those after them.
        """
        there = {client for client in clients if client < len(self.registry.sites)}
        hopeless = self._refusing.keys() == there or len(clients) - len(self._refusing) < least
        said = {i: self.missing[i] for i in self._refusing if i in self.missing}
        again = all(self._said.get(client) == why for client, why in said.items())
        self._said |= said
        if said and hopeless and not self._worked and (again or not self._counted):
            raise self._stopped(next(iter(said.values())))

    def _stopped(self, why: str) -> EngineFailure:
        others = also(self.transport.left_out.values())
        return EngineFailure(f"{why.rstrip('.')}{others}; {GO_ON} when that is fixed.")

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the sites send before round 0; the record of that round says whose is missing."""
        trees = self._trees("client_init", tasks)
        for client, why in inconsistent_trees(trees).items():
            self.refuse(client, why)
            del trees[client]
        if len(trees) < min(self.transport.policy.minimum, len(tasks)):
            raise self._stopped(next(iter(self.missing.values())))
        for client, why in self.missing.items():
            self.transport.dropped[f"client {client}"] = why
        return trees

    def onboard_client(self, task: ClientTask) -> Tree:
        """A newcomer's turn in its dialogue with the server, which waits for it to connect."""
        sites, client = self.registry.sites, task.client
        who = sites[client] if client < len(sites) else f"a new site, as client {client}"
        self.transport.require(lambda: self._is_connected(client), who)
        return self._request_one("onboard_client", task)

    def onboard_state(self, task: ClientTask) -> Tree:
        """Have the newcomer's site store its state; the answer is empty."""
        return {**self._request_one("onboard_state", task), "after": task.round - 1}

    def _is_connected(self, client: int) -> bool:
        self.registry.enrol(self.transport.descriptions, self.transport.connected)
        sites = self.registry.sites
        return client < len(sites) and sites[client] in self.transport.connected

    def _request_one(self, kind: str, task: ClientTask) -> Tree:
        """One site's answer outside of rounds; the next record says whose is missing."""
        trees = self._trees(kind, [task])
        if why := self.missing.get(task.client):
            self.transport.dropped[f"client {task.client}"] = why
            raise UnusableMessage(why)
        return trees[task.client]

    def _trees(self, kind: str, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """The valid trees that sites send outside of rounds, in the order of the tasks."""
        trees, answers = {}, self.request(kind, tasks)
        for client in (task.client for task in tasks if task.client in answers):
            body = answers[client].body
            try:
                messages.check_tree(body, self.setup.initial)
                if not finite([body])[0]:
                    raise UserError("holds values that are not finite.")
                trees[client] = to_device(body, self.setup.device)
            except UserError as problem:
                self.refuse(client, problem)
        return trees

    def personal(self, tasks: Sequence[ClientTask]) -> list[PersonalModel]:
        """Raise UserError: personal models never leave their sites."""
        raise UserError("the personal models of a deployment are at its sites.")

    def evaluate(
        self, tasks: Sequence[ClientTask], model: State | None = None
    ) -> tuple[list[Scores], Evaluation | None]:
        """Each site's scores, and the server's own if it has test samples."""
        server_scores = None
        if model is not None and self.evaluates:
            server_scores = self.score([model], "test")[0]
        return self._scores("evaluate", tasks), server_scores

    def evaluate_received(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """The scores of every personal model before it is personalized."""
        return self._scores("evaluate_received", tasks)

    def _scores(self, kind: str, tasks: Sequence[ClientTask]) -> list[Scores]:
        nothing = Scores(math.nan, math.nan, math.nan)
        scores: dict[int, Scores] = {}
        for client, (header, _) in self.request(kind, tasks).items():
            test, loss, valid = (float(header[key]) for key in SCORED)
            scores[client] = Scores(test, loss, valid, header["used"])
        return [scores.get(task.client, nothing) for task in tasks]

    def report(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Bytes sent and received, the slowest sites' seconds, and answers that were dropped."""
        dropped, metadata = self.transport.dropped, metadata | self._spent(metadata)
        report: dict[str, Any] = {"wire": self._wire(), "metadata": metadata}
        if dropped:
            report["troubles"] = dict(dropped)
        dropped.clear()
        return report

    def report_again(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The bytes and seconds of a record, with those since then."""
        return {"wire": {key: more + record["wire"][key] for key, more in self._wire().items()}}

    def _wire(self) -> dict[str, float]:
        """Bytes sent and received, and the slowest sites' seconds, since the last look."""
        transport = self.transport
        seen: dict[str, float] = {"sent": transport.sent, "received": transport.received}
        seen["site_seconds"] = self._site_seconds
        transport.sent, transport.received, self._site_seconds = 0, 0, 0.0
        return seen

    @property
    def spent(self) -> list[int]:
        """The clients whose sites count their own epsilon and have said that it is spent."""
        if not self.setup.method.capabilities.sample_gradients:
            return []
        return sorted(map(self.registry.client_of, self.transport.spending.exhausted))

    @property
    def counted(self) -> dict[int, int]:
        """How many rounds with noise sites say that they have answered, by client."""
        rounds = self.transport.spending.rounds.items()
        return {self.registry.client_of(site): count for site, count in rounds}

    def _spent(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The epsilon of every client and whose budget is spent, as sites know it too."""
        ledger = metadata.get("epsilon", {})
        spent = self.transport.spending.raised(ledger, self.registry.client_of)
        over = sorted({*metadata.get("budget_spent", ()), *self.spent})
        return {
            **({"epsilon": spent} if spent else {}),
            **({"budget_spent": over} if over else {}),
        }
