"""Attacks by malicious clients, which work with any method and engine.

A label flipper trains honestly on wrong labels. All others train, see what the benign clients of
the round are about to send (the strongest position an attacker can have), and forge their own
uploads before the server computes weights. An adaptive attacker also has samples like those of the
server's validation set: it goes as far against the benign mean as it can without scoring below the
median benign client.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from fedhelix.core.errors import UserError
from fedhelix.core.method import Scorer
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import draw, numpy_draw
from fedhelix.core.tree import State, add, subtract, take
from fedhelix.data import Dataset, Split, even_sample
from fedhelix.engines.local import ClientResult, ClientTask

USUAL_SCALE = {"ipm": 1.0, "sign-flip": 4.0, "noise": 1.0, "adaptive": 10.0}
USUALLY_STUDIED = 1000  # samples, if the server has no validation set
STEPS = 20  # between the benign mean and the farthest point that an adaptive attacker tries


@dataclass(frozen=True)
class Attack(Checked):
    """Which attack, by how many, and how hard."""

    attack: Literal["none", "label-flip", "mimic", "ipm", "sign-flip", "noise", "adaptive"] = (
        option(
            "none",
            "what malicious clients do: none, label-flip, mimic, ipm, sign-flip, noise or adaptive",
        )
    )
    attack_share: float = option(0.2, "share of the clients that are malicious", above=0, below=1)
    attack_scale: float | None = option(
        None,
        "ipm: times the benign mean (auto: 1); sign-flip: factor (4); noise: deviation (1); "
        "adaptive: farthest (10)",
        above=0,
    )


@dataclass(frozen=True, eq=False)
class Attackers:
    """A fixed random subset of the clients, and their attack."""

    settings: Attack
    clients: int
    # The entries that ipm, sign-flip and noise forge; BatchNorm's statistics stay honest.
    parameters: Sequence[str]
    seed: int

    @cached_property
    def ids(self) -> frozenset[int]:
        """The malicious clients."""
        if self.settings.attack == "none":
            return frozenset()
        count = max(1, round(self.settings.attack_share * self.clients))
        if count >= self.clients:
            share = self.settings.attack_share
            raise UserError(
                f"attack_share = {share:g} leaves no benign client among {self.clients}; lower it."
            )
        return frozenset(
            numpy_draw(self.seed, "attackers").choice(self.clients, count, replace=False).tolist()
        )

    @cached_property
    def target(self) -> int:
        """The benign client that mimics copy."""
        benign = sorted(set(range(self.clients)) - self.ids)
        return int(numpy_draw(self.seed, "mimic").choice(benign))

    def poison(self, data: Dataset, splits: Sequence[Split]) -> tuple[Dataset, list[Split]]:
        """For label flips, data with a second copy of the training set, whose labels are flipped.

        The attackers train on this copy.
        """
        attackers = self.ids  # computed here, so that a wrong share raises an error at set-up
        if self.settings.attack != "label-flip":
            return data, list(splits)
        if data.classes is None:
            raise UserError(
                f"labels can be flipped in a classification only, and '{data.name}' is none."
            )
        size, flipped = len(data.y), data.with_flipped()
        return flipped, [
            dataclasses.replace(split, train=split.train + size) if client in attackers else split
            for client, split in enumerate(splits)
        ]

    def studied(self, data: Dataset, splits: Sequence[Split], count: int) -> np.ndarray:
        """Training samples, balanced over classes, on which adaptive attackers score models."""
        if self.settings.attack != "adaptive":
            return np.zeros(0, dtype=np.int64)
        owned = np.unique(np.concatenate([split.train for split in splits]))
        return even_sample(
            data, owned, min(count or USUALLY_STUDIED, len(owned)), numpy_draw(self.seed, "studied")
        )

    def forge(
        self,
        results: Sequence[ClientResult],
        tasks: Sequence[ClientTask],
        score: Scorer | None = None,
    ) -> list[ClientResult]:
        """The results of a round with the attackers' uploads replaced.

        `score` evaluates models on the `studied` samples.
        """
        if self.settings.attack in ("none", "label-flip"):
            return list(results)
        received = {task.client: task.payload.get("model", {}) for task in tasks}
        sent = {
            result.client: result.upload["model"]
            for result in results
            if result.upload.get("model")
        }
        benign = {
            client: subtract(model, {**model, **received[client]})
            for client, model in sent.items()
            if client not in self.ids
        }
        malicious = [client for client in sent if client in self.ids]
        scale = self.settings.attack_scale or USUAL_SCALE.get(self.settings.attack, 1.0)
        if self.settings.attack == "adaptive" and benign and malicious:
            assert score is not None
            scale = self._reach(sent, received, benign, malicious[0], scale, score)
        forged = []
        for result, task in zip(results, tasks, strict=True):
            if result.client in malicious:
                entries = self._forged(
                    result.upload["model"], task, received[result.client], benign, scale
                )
                model = {**result.upload["model"], **entries}
                result = result._replace(upload={**result.upload, "model": model})
            forged.append(result)
        return forged

    def _forged(
        self,
        honest: State,
        task: ClientTask,
        received: State,
        benign: Mapping[int, State],
        scale: float,
    ) -> State:
        """The entries that an attacker replaces; with no benign client, those that it received."""
        origin = take({**honest, **received}, honest)
        if not benign:
            return origin
        names = [name for name in self.parameters if name in honest]
        if self.settings.attack == "mimic":
            random = numpy_draw(self.seed, "mimic", task.round).choice(sorted(benign))
            update = benign[self.target if self.target in benign else int(random)]
            moving = [
                name for name in update if name in origin and origin[name].is_floating_point()
            ]
            return add(take(origin, moving), take(update, moving))
        if self.settings.attack == "ipm":
            return {name: origin[name] - scale * _mean(name, benign, origin) for name in names}
        if self.settings.attack == "adaptive":
            return {
                name: origin[name] + (1 - scale) * _mean(name, benign, origin) for name in names
            }
        if self.settings.attack == "sign-flip":
            return {name: origin[name] - scale * (honest[name] - origin[name]) for name in names}
        generator = draw(self.seed, "attack-noise", task.round, task.client)
        return {
            name: honest[name]
            + scale * torch.randn(honest[name].shape, generator=generator).to(honest[name].device)
            for name in names
        }

    def _reach(
        self,
        sent: Mapping[int, State],
        received: Mapping[int, State],
        benign: Mapping[int, State],
        client: int,
        farthest: float,
        score: Scorer,
    ) -> float:
        """The longest way from the benign mean to its opposite that keeps the median fitness."""
        distances = [farthest * step / STEPS for step in range(STEPS + 1)]
        honest, task = sent[client], ClientTask(client, 0, {}, {})
        models = [{**received[other], **sent[other]} for other in benign]
        forged = [self._forged(honest, task, received[client], benign, d) for d in distances]
        tried = [{**received[client], **honest, **entries} for entries in forged]
        metrics = [metric for metric, _ in score([*models, *tried])]
        level = float(np.median(metrics[: len(models)]))
        scored = zip(distances, metrics[len(models) :], strict=True)
        return max((distance for distance, metric in scored if metric >= level), default=0.0)


def _mean(name: str, updates: Mapping[int, State], like: State) -> torch.Tensor:
    """The mean update of one entry; zero if nobody sent it."""
    values = [update[name] for update in updates.values() if name in update]
    return torch.stack(values).mean(0) if values else torch.zeros_like(like[name])
