"""What bad messages are sent to: a server in the middle of a round, and a site at work."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message as FlowerMessage

from fedhelix.deploy import messages
from fedhelix.deploy import site as site_module
from fedhelix.deploy.packing import pack
from fedhelix.deploy.remote_data import difference, odd_sites
from fedhelix.deploy.requests import MESSAGE_TYPE, PendingRequest
from fedhelix.engines.local import ClientTask
from fedhelix.federation import guard
from fedhelix.federation.uploads import decode_uploads, validate_uploads
from fedhelix.runs.spec import make_spec
from fedhelix.store.json import json_line
from in_process import InProcessDeployment, small_images

SITES, EVIL = 4, 2
SMALL = {
    "clients": SITES, "rounds": 3, "epochs": 1, "batch_size": 64, "kernels": "onednn",
    "model": "mlp", "partition": "iid",
}  # fmt: skip
# Uploads of every form: plain, with a control, packed, with numbers beside the model, with codes.
METHODS = ("fedavg", "scaffold", "compact+fedavg", "fedpac", "ifca", "fednova", "clustered+feddbe")


class Sample(NamedTuple):
    """An honest message: the request, and the answer to it."""

    request: PendingRequest
    answer: bytes


class ServerTarget:
    """A server that waits for the answer of one of four sites; the others have answered."""

    def __init__(self, folder: Path, method: str):
        data = small_images(folder)
        self.deployment = InProcessDeployment(folder, SITES, data, common=True)
        self.honest: dict[str, list[Sample]] = {}
        self.unexpected: list[str] = []
        self._record_answers()
        spec = make_spec(method, {**SMALL, "data": data})
        self.fed = self.deployment.federation(spec)
        self.engine = self.fed.engine
        self.state = self.fed.initialize(3)
        for _, state in self.fed.run_rounds(1, self.state):
            self.after = state
        del self.honest["describe"][:-1]
        method, ctx = self.fed.method, self.fed.context(0, 3)
        self.payloads = {i: method.download(self.state.server, i, ctx) for i in range(SITES)}
        self.answers = {
            kind: {i: messages.read(sample.answer) for i, sample in enumerate(samples)}
            for kind, samples in self.honest.items()
        }

    def _record_answers(self) -> None:
        for node, honest in list(self.deployment.grid.answers.items()):

            def answer(content: bytes, node: int = node, honest=honest) -> bytes:
                header, said = messages.read(content).header, honest(content)
                kind = header["kind"]
                site = "" if kind == "describe" else f"site-{node - 101}"
                request = PendingRequest(node, site, header, content, 1e12)
                self.honest.setdefault(kind, []).append(Sample(request, said))
                return said

            self.deployment.grid.answers[node] = answer

    def example(self, kind: str) -> bytes:
        """An honest answer."""
        return self.sample(kind).answer

    def sample(self, kind: str) -> Sample:
        """The evil site's honest answer to a request of a kind."""
        return self.honest[kind][min(EVIL, len(self.honest[kind]) - 1)]

    def send(self, kind: str, content: bytes) -> bool:
        """Let the server read an answer and go on with it; whether it was accepted."""
        request = self.sample(kind).request
        sent = FlowerMessage(pack(request.content), request.node, MESSAGE_TYPE)
        sent.metadata.__dict__["_message_id"] = "1"
        reply = FlowerMessage(pack(content), reply_to=sent)
        limit = self.engine._max_bytes
        answer = self.engine.transport._read(reply, request, limit)
        if isinstance(answer, str):
            assert len(answer) < 1000
            assert json_line({"why": answer})
            return False
        return bool(getattr(self, f"_{kind}")(answer))

    def _describe(self, answer: messages.Message) -> bool:
        known = {"a": {**answer.header}, "b": {"data": "x"}, "c": {"data": "x"}}
        odd_sites(known)
        difference(answer.header, answer.header, "a")
        return True

    def _train(self, answer: messages.Message) -> bool:
        ctx, method = self.fed.context(0, 3), self.fed.method
        results = list(self.engine.accept(self._with("train", answer)).values())
        plain, refused = decode_uploads(method, results, self.payloads, ctx, True)
        uploads, invalid = validate_uploads(plain, self.fed.initial, self.fed.needed)
        _, harmful, _ = guard.aggregate(method, self.state.server, uploads, ctx, True)
        return self._is_fine(refused | invalid | harmful)

    def _client_init(self, answer: messages.Message) -> bool:
        answers = self._with("client_init", answer)
        inits = self.engine.client_init([ClientTask(i, 0, {}, {}) for i in answers])
        server = guard.server_init(self.fed.method, inits, self.fed.context(0, 3), True)
        return self._is_fine(server[2])

    def _evaluate(self, answer: messages.Message) -> bool:
        self._with("evaluate", answer)
        record = self.fed.evaluate(self.after, self.fed.context(0, 3))
        assert json_line(record)
        return self._is_fine({})

    def _with(self, kind: str, answer: messages.Message) -> dict[int, messages.Message]:
        """All answers to a request, one of them the evil site's, which the engine then gets."""
        answers = self.answers[kind] | {EVIL: answer}
        self.engine.request = lambda *_: answers
        self.engine.missing.clear()
        return answers

    def _is_fine(self, blamed: Mapping[Any, str]) -> bool:
        """Whether nobody is blamed; only the evil site may be."""
        names = {int(client) for client in (*blamed, *self.engine.missing)}
        assert names <= {EVIL}, (names, blamed, self.engine.missing)
        return not names


class SiteTarget:
    """A site that has worked on a round."""

    def __init__(self, folder: Path, method: str):
        data = small_images(folder)
        deployment = InProcessDeployment(folder, SITES, data, common=True)
        self.site = deployment.sites[EVIL]
        self.honest: dict[str, list[bytes]] = {}
        self.unexpected: list[str] = []  # what the site had no sentence for
        self._record_requests(deployment)
        for _ in deployment.federation(make_spec(method, {**SMALL, "data": data})).run_rounds(1):
            pass

    def example(self, kind: str) -> bytes:
        """An honest request."""
        return self.honest[kind][0]

    def _record_requests(self, deployment: InProcessDeployment) -> None:
        node = list(deployment.grid.answers)[EVIL]
        honest = deployment.grid.answers[node]

        def answer(content: bytes) -> bytes:
            kind = messages.read(content).header["kind"]
            self.honest.setdefault(kind, []).append(content)
            return honest(content)

        deployment.grid.answers[node] = answer

    def send(self, kind: str, content: bytes) -> bool:
        """Let the site answer a request; whether it was accepted."""
        shown = site_module.write_traceback
        site_module.write_traceback = lambda: self.unexpected.append(
            traceback.format_exc().strip().splitlines()[-1]
        )
        try:
            answer = messages.read(self.site.answer(content))
        finally:
            site_module.write_traceback = shown
        return "error" not in answer.header
