"""An engine whose clients are sites: the round loop does not notice the difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fedhelix.channel import finite
from fedhelix.client import Job, Outcome, Scores, Setup
from fedhelix.deploy import letters
from fedhelix.deploy.letters import Letter
from fedhelix.deploy.post import Post
from fedhelix.deploy.roster import Roster
from fedhelix.engines.base import Engine, Judgement
from fedhelix.errors import BadInput, EngineFailure
from fedhelix.tree import State, Tree, flatten, to_device


class Remote(Engine):
    """Sends jobs to sites and takes what comes back; whoever does not answer is in `missing`, with the reason.

    What a client keeps stays at its site, so outcomes come without it.
    """

    name: ClassVar[str] = "flower"

    def __init__(
        self, setup: Setup, post: Post, roster: Roster, common: Mapping[str, Any], enough: int | None, judges: bool
    ):
        super().__init__(setup)
        self.why = "the clients are sites"
        self.post, self.roster, self.judges = post, roster, judges
        self.common = dict(common)  # words of every letter: experiment, plan, classes
        self.enough = enough  # that many answers end a round, where more clients were asked
        self.supplements: dict[int, Tree] = {}  # samples that clients have not got yet
        self.missing: dict[int, str] = {}
        self._refusing: set[int] = set()  # those of them who did answer, but not with what was asked for
        self._begun = False  # whether a round has had enough answers
        self._working = 0.0  # seconds that the slowest sites took for themselves
        self._largest = letters.room_for(setup.initial)

    def _ask(self, kind: str, jobs: Sequence[Job], enough: int | None = None) -> dict[int, Letter]:
        """The letters that came back, by client; the others are in `missing`."""
        self.roster.enrol(self.post.cards, self.post.connected)
        asked, placed = {}, [job for job in jobs if job.client < len(self.roster.sites)]
        for job in placed:
            about = {"kind": kind, "round": job.round, "client": job.client, "arriving": job.arriving, **self.common}
            body = {"payload": job.payload, "own": job.own}
            if job.client in self.supplements:
                body["supplement"] = self.supplements[job.client]
            asked[self.roster.sites[job.client]] = about, letters.write(about, body)
        answers, refusals, absences = self.post.ask(asked, self._largest, enough)
        self.missing = {job.client: "no site has taken this place yet" for job in jobs if job not in placed}
        self.missing |= {self.roster.number(site): f"{site} {why}" for site, why in (refusals | absences).items()}
        self._refusing = {self.roster.number(site) for site in refusals}
        found = {self.roster.number(site): letter for site, letter in answers.items()}
        self.supplements = {client: tree for client, tree in self.supplements.items() if client not in found}
        times = [letter.about.get("seconds") for letter in found.values()]
        self._working += max((time for time in times if isinstance(time, float)), default=0.0)
        return found

    def _refuse(self, client: int, why: object) -> None:
        self.missing[client] = f"{self.roster.sites[client]} sent an answer that {why}"
        self._refusing.add(client)

    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the sites that answered as they should."""
        self.post.await_some(self.roster.sites)
        outcomes = {}
        for client, letter in self._ask("work", jobs, self.enough).items():
            try:
                letters.check_tree(letter.body, self.setup.initial)
                samples = int(letters.number(letter.about, "samples", low=1))
                loss = letters.number(letter.about, "loss")
                upload = to_device(letter.body, self.setup.device)
                outcomes[client] = Outcome(client, samples, upload, {}, loss)
            except (BadInput, ValueError, OverflowError) as problem:
                self._refuse(client, problem)
        for client, why in odd_ones(outcomes).items():
            self._refuse(client, why)
            del outcomes[client]
        least = self.post.terms.minimum
        if len(outcomes) < least:
            self._stop_if_hopeless(len(jobs), least)
            for client in outcomes:
                self.missing[client] = f"{self.roster.sites[client]} answered, but {least} answers are needed"
            return []
        self._begun = True
        return [outcomes[job.client] for job in jobs if job.client in outcomes]

    def _stop_if_hopeless(self, asked: int, least: int) -> None:
        """Where so many sites refuse from the start that the others could not be enough, all rounds would be empty."""
        if not self._begun and self._refusing and asked - len(self._refusing) < least:
            raise _to_be_mended(self.missing[min(self._refusing)])

    def hello(self, jobs: Sequence[Job]) -> dict[int, Tree]:
        """What the sites tell before round 0; a method that wants hellos needs them all."""
        return self._told("hello", jobs)

    def reply(self, job: Job) -> Tree:
        """A newcomer's turn in its dialogue with the server, which waits for it to connect."""
        self.post.need(lambda: self._is_here(job.client), f"the site of client {job.client}")
        return self._told("reply", [job])[job.client]

    def settle(self, job: Job) -> Tree:
        """What a newcomer keeps stays at its site."""
        return self._told("settle", [job])[job.client]

    def _is_here(self, client: int) -> bool:
        self.roster.enrol(self.post.cards, self.post.connected)
        return client < len(self.roster.sites) and self.roster.sites[client] in self.post.connected

    def _told(self, kind: str, jobs: Sequence[Job]) -> dict[int, Tree]:
        """What sites say outside of rounds; without it the run cannot go on."""
        found = {}
        for client, letter in self._ask(kind, jobs).items():
            try:
                letters.check_tree(letter.body, self.setup.initial)
                found[client] = to_device(letter.body, self.setup.device)
                if not finite([letter.body])[0]:
                    raise BadInput("holds values that are not finite.")
            except BadInput as problem:
                self._refuse(client, problem)
        if self.missing:
            raise _to_be_mended(next(iter(self.missing.values())))
        return {job.client: found[job.client] for job in jobs}

    def personal(self, jobs: Sequence[Job]) -> list[State]:
        """Personal models never leave their sites."""
        raise BadInput("the personal models of a deployment are at its sites.")

    def evaluate(self, jobs: Sequence[Job], model: State | None = None) -> tuple[list[Scores], Judgement | None]:
        """Every site judges its personal model; the server judges its own where it has test samples."""
        judgement = self.score([model], "test")[0] if model is not None and self.judges else None
        return self._scores("evaluate", jobs), judgement

    def evaluate_received(self, jobs: Sequence[Job]) -> list[Scores]:
        """Every personal model as it is before `tune`."""
        return self._scores("judge", jobs)

    def _scores(self, kind: str, jobs: Sequence[Job]) -> list[Scores]:
        nothing = Scores(math.nan, math.nan, math.nan)
        found: dict[int, Scores] = {}
        for client, letter in self._ask(kind, jobs).items():
            try:
                found[client] = Scores(*(letters.number(letter.about, key) for key in Scores._fields))
            except BadInput as problem:
                self._refuse(client, problem)
        return [found.get(job.client, nothing) for job in jobs]

    def report(self) -> dict[str, Any]:
        """Bytes as they were sent, the slowest sites' seconds, and letters that came late, twice or from strangers."""
        wire = {"sent": self.post.sent, "received": self.post.received, "site_seconds": self._working}
        told: dict[str, Any] = {"wire": wire}
        if self.post.troubles:
            told["troubles"] = dict(self.post.troubles)
        self.post.sent, self.post.received, self._working = 0, 0, 0.0
        self.post.troubles.clear()
        return told


def _to_be_mended(why: str) -> EngineFailure:
    return EngineFailure(f"{why.rstrip('.')}; continue the run when that is mended.")


def odd_ones(outcomes: Mapping[int, Outcome]) -> dict[int, str]:
    """Answers without a part that all others have, or with another shape where all others agree.

    The model's own entries are checked against the network by the channel; of what else a method sends, the others
    are the only measure.
    """
    parts = {client: flatten(outcome.upload) for client, outcome in outcomes.items() if outcome.upload}
    found = {}
    for client, mine in parts.items():
        others = [part for other, part in parts.items() if other != client]
        if len(others) < 2:
            continue
        groups = Counter(group for part in others for group in {path.partition("/")[0] for path in part})
        lacking = {group for group, count in groups.items() if count == len(others)} - {
            path.partition("/")[0] for path in mine
        }
        if lacking:
            found[client] = f"lacks '{min(lacking)}', which all others have."
            continue
        for path, value in mine.items():
            shapes = {getattr(part[path], "shape", None) for part in others if path in part}
            if not path.startswith("model/") and len(shapes) == 1 and getattr(value, "shape", None) not in shapes:
                found[client] = f"has another shape for '{path}' than all others."
    return found
