"""Attacks by malicious clients, which work with any method and engine.

Who flips labels or plants a backdoor trains honestly on wrong samples. All others train, see what
the benign clients of the round are about to send (the strongest position an attacker can have), and
forge their own uploads before the server computes weights. An adaptive attacker also has samples
like those of the server's validation set: it goes as far against the benign mean as it can without
scoring below the median benign client, or (`adaptive-top`) below the best one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.method import Scorer
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.core.tree import State, subtract, take, widened
from fedhelix.data import Dataset, Split, even_sample
from fedhelix.engines.local import ClientResult, ClientTask
from fedhelix.robust.forging import FORGERIES, Position

AttackName = Literal[
    "none", "label-flip", "backdoor", "mimic", "ipm", "alie", "min-max", "sign-flip", "noise",
    "adaptive", "adaptive-top",
]  # fmt: skip
# How fit an adaptive attacker wants to be, by the metrics of the benign clients.
LEVELS: dict[str, Callable[[Sequence[float]], float]] = {
    "adaptive": lambda metrics: float(np.median(metrics)),
    "adaptive-top": lambda metrics: float(np.max(metrics)),
}
FARTHEST = 10.0  # times the benign mean that an adaptive attacker usually tries to go
USUALLY_STUDIED = 1000  # samples, if the server has no validation set
STEPS = 20  # between the benign mean and the farthest point that an adaptive attacker tries


@dataclass(frozen=True)
class Attack(Checked):
    """Which attack, by how many, and how hard."""

    attack: AttackName = option(
        "none",
        "what malicious clients do: none, label-flip, backdoor, mimic, ipm, alie, min-max, "
        "sign-flip, noise, adaptive or adaptive-top",
    )
    attack_share: float = option(
        0.2, "share of the clients that are malicious", above=0, below=1, needs="attack"
    )
    attack_scale: float | None = option(
        None,
        "ipm: times the benign mean (auto: 1); alie: deviations (by the paper's formula); "
        "sign-flip: factor (4); backdoor: factor (1); noise: deviation (1); adaptive: farthest "
        "(10)",
        above=0,
        needs="attack",
        idle_with={"attack": ("label-flip", "mimic", "min-max")},
    )

    @property
    def forges(self) -> bool:
        """Whether uploads are forged, and not only samples."""
        boosted = self.attack_scale not in (None, 1)
        return self.attack in FORGERIES and (self.attack != "backdoor" or boosted)


@dataclass(frozen=True, eq=False)
class Attackers:
    """A fixed random subset of the clients, and their attack."""

    settings: Attack
    clients: int
    parameters: Sequence[str]  # the entries that most attacks forge
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
        """For attacks on samples, data with a second copy of the training set, which is poisoned.

        Who flips labels trains on this copy. Who plants a backdoor takes every second of its
        samples from there.
        """
        attackers = self.ids  # computed here, so that a wrong share raises an error at set-up
        if self.settings.attack not in ("label-flip", "backdoor"):
            return data, list(splits)
        flip = self.settings.attack == "label-flip"
        if data.classes is None:
            raise UserError(
                f"labels can be {'flipped' if flip else 'forged'} in a classification only, and "
                f"'{data.name}' is none."
            )
        size, poisoned = len(data.y), data.with_flipped() if flip else data.with_trigger()
        return poisoned, [
            _moved(split, size, 1 if flip else 2) if client in attackers else split
            for client, split in enumerate(splits)
        ]

    def triggered(self, data: Dataset) -> np.ndarray:
        """Where data with a trigger hold the test samples that it should turn into class 0."""
        if self.settings.attack != "backdoor":
            return np.zeros(0, dtype=np.int64)
        return 2 * len(data.y) + np.flatnonzero(data.y_test.cpu().numpy())

    def studied(self, data: Dataset, splits: Sequence[Split], count: int) -> np.ndarray:
        """Training samples, balanced over classes, on which adaptive attackers score models."""
        if self.settings.attack not in LEVELS:
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
        initial: State | None = None,
    ) -> list[ClientResult]:
        """The results of a round with the attackers' uploads replaced.

        `score` evaluates models on the `studied` samples. What a client sends without having
        received it began as in the `initial` model.
        """
        if not self.settings.forges:
            return list(results)
        sent = {
            result.client: result.upload["model"]
            for result in results
            if result.upload.get("model")
        }
        received = {
            task.client: {
                **take(initial or {}, sent.get(task.client, {})),
                **task.payload.get("model", {}),
            }
            for task in tasks
        }
        benign = {
            client: subtract(model, {**model, **received[client]})
            for client, model in sent.items()
            if client not in self.ids
        }
        known = {
            task.client: self._position(task, sent, received, benign)
            for task in tasks
            if task.client in sent and task.client in self.ids
        }
        scale = self.settings.attack_scale
        if self.settings.attack in LEVELS and benign and known:
            assert score is not None
            models = [{**received[client], **sent[client]} for client in benign]
            at = next(iter(known.values()))
            scale = self._reach(at, received[at.client], models, score)
        forged = []
        for result in results:
            if result.client in known:
                at = dataclasses.replace(known[result.client], scale=scale)
                model = {**at.honest, **self._forged(at)}
                result = result._replace(upload={**result.upload, "model": model})
            forged.append(result)
        return forged

    def _position(
        self,
        task: ClientTask,
        sent: Mapping[int, State],
        received: Mapping[int, State],
        benign: Mapping[int, State],
    ) -> Position:
        """What one attacker knows."""
        honest = sent[task.client]
        return Position(
            honest=honest,
            origin=take({**honest, **received[task.client]}, honest),
            names=[name for name in self.parameters if name in honest],
            benign=benign,
            malicious=len(sent) - len(benign),
            scale=self.settings.attack_scale,
            target=self.target,
            seed=self.seed,
            round=task.round,
            client=task.client,
        )

    def _forged(self, at: Position) -> State:
        """The entries that an attacker replaces, in the types of honest ones; with no benign
        client, those that it received.
        """
        if not at.benign:
            return at.origin
        known = dataclasses.replace(
            at,
            honest=widened(at.honest),
            origin=widened(at.origin),
            benign={client: widened(update) for client, update in at.benign.items()},
        )
        forged = FORGERIES[self.settings.attack](known)
        return {name: value.to(at.honest[name].dtype) for name, value in forged.items()}

    def _reach(
        self, at: Position, received: State, models: Sequence[State], score: Scorer
    ) -> float:
        """The longest way from the benign mean to its opposite that is as fit as it has to be."""
        distances = [at.scaled(FARTHEST) * step / STEPS for step in range(STEPS + 1)]
        forged = [self._forged(dataclasses.replace(at, scale=distance)) for distance in distances]
        tried = [{**received, **at.honest, **entries} for entries in forged]
        metrics = [metric for metric, _ in score([*models, *tried])]
        level = LEVELS[self.settings.attack](metrics[: len(models)])
        scored = zip(distances, metrics[len(models) :], strict=True)
        return max((distance for distance, metric in scored if metric >= level), default=0.0)


def _moved(split: Split, by: int, every: int) -> Split:
    """A client with some of its training samples replaced by those that lie `by` later."""
    train = split.train.copy()
    train[::every] += by
    return dataclasses.replace(split, train=train)
