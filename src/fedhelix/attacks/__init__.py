"""Attacks: some clients are malicious. They stand outermost and act on any method and engine alike.

A label flipper trains honestly on wrong labels. All others train, look at what the benign clients of the round are
about to send (the strongest position an attacker can have), and forge their own uploads before the server weighs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from fedhelix.client import Job, Outcome
from fedhelix.data import Dataset, Split
from fedhelix.errors import BadInput
from fedhelix.options import Checked, option
from fedhelix.seeds import draw, numpy_draw
from fedhelix.tree import State, add, subtract, take

USUAL_SCALE = {"ipm": 1.0, "sign-flip": 4.0, "noise": 1.0}


@dataclass(frozen=True)
class Attack(Checked):
    """Which attack, by how many, and how hard."""

    attack: Literal["none", "label-flip", "mimic", "ipm", "sign-flip", "noise"] = option(
        "none", "what malicious clients do: none, label-flip, mimic, ipm, sign-flip or noise"
    )
    attack_share: float = option(0.2, "share of the clients that are malicious", above=0, below=1)
    attack_scale: float | None = option(
        None, "ipm: times the benign mean (auto: 1); sign-flip: factor (4); noise: standard deviation (1)", above=0
    )


@dataclass(frozen=True, eq=False)
class Attackers:
    """A fixed random subset of the clients, and what they do."""

    asked: Attack
    clients: int
    parameters: Sequence[str]  # what ipm, sign-flip and noise forge; BatchNorm's statistics stay honest
    seed: int

    @cached_property
    def ids(self) -> frozenset[int]:
        """Who attacks."""
        if self.asked.attack == "none":
            return frozenset()
        count = max(1, round(self.asked.attack_share * self.clients))
        if count >= self.clients:
            share = self.asked.attack_share
            raise BadInput(f"attack_share = {share:g} leaves no benign client among {self.clients}; lower it.")
        return frozenset(numpy_draw(self.seed, "attackers").choice(self.clients, count, replace=False).tolist())

    @cached_property
    def target(self) -> int:
        """The benign client that mimics copy."""
        benign = sorted(set(range(self.clients)) - self.ids)
        return int(numpy_draw(self.seed, "mimic").choice(benign))

    def poison(self, data: Dataset, splits: Sequence[Split]) -> tuple[Dataset, list[Split]]:
        """For label flips: data with a second, flipped copy of the training pool, which the attackers train on."""
        attackers = self.ids  # found here, so that a wrong share shows at set-up
        if self.asked.attack != "label-flip":
            return data, list(splits)
        if data.classes is None:
            raise BadInput(f"labels can be flipped in a classification only, and '{data.name}' is none.")
        size, flipped = len(data.y), data.with_flipped()
        return flipped, [
            dataclasses.replace(split, train=split.train + size) if client in attackers else split
            for client, split in enumerate(splits)
        ]

    def forge(self, outcomes: Sequence[Outcome], jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of a round, with the attackers' uploads replaced."""
        if self.asked.attack in ("none", "label-flip"):
            return list(outcomes)
        received = {job.client: job.payload.get("model", {}) for job in jobs}
        sent = {outcome.client: outcome.upload["model"] for outcome in outcomes if outcome.upload.get("model")}
        benign = {
            client: subtract(model, {**model, **received[client]})
            for client, model in sent.items()
            if client not in self.ids
        }
        forged = []
        for outcome, job in zip(outcomes, jobs, strict=True):
            if outcome.client in self.ids and outcome.client in sent:
                model = {**outcome.upload["model"], **self._forged(outcome, job, received[outcome.client], benign)}
                outcome = outcome._replace(upload={**outcome.upload, "model": model})
            forged.append(outcome)
        return forged

    def _forged(self, outcome: Outcome, job: Job, received: State, benign: Mapping[int, State]) -> State:
        """The entries that an attacker replaces; without anybody benign it sends back what it received."""
        honest, asked = outcome.upload["model"], self.asked
        origin = take({**honest, **received}, honest)
        if not benign:
            return origin
        scale = asked.attack_scale or USUAL_SCALE.get(asked.attack, 1.0)
        names = [name for name in self.parameters if name in honest]
        if asked.attack == "mimic":
            random = numpy_draw(self.seed, "mimic", job.round).choice(sorted(benign))
            update = benign[self.target if self.target in benign else int(random)]
            return add(take(origin, update), take(update, origin))
        if asked.attack == "ipm":
            return {name: origin[name] - scale * _mean(name, benign, origin) for name in names}
        if asked.attack == "sign-flip":
            return {name: origin[name] - scale * (honest[name] - origin[name]) for name in names}
        generator = draw(self.seed, "attack-noise", job.round, job.client)
        return {
            name: honest[name] + scale * torch.randn(honest[name].shape, generator=generator).to(honest[name].device)
            for name in names
        }


def _mean(name: str, updates: Mapping[int, State], like: State) -> torch.Tensor:
    """The mean of what was sent of one entry; nothing was: zero."""
    found = [update[name] for update in updates.values() if name in update]
    return torch.stack(found).mean(0) if found else torch.zeros_like(like[name])
