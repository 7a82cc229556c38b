"""What a site allows: its policy.toml, checked before any computation.

Whoever has no such file gets the defaults, which limit what a server can cost a site.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedhelix.core import toml
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.method import Method
from fedhelix.core.options import Checked, build, option
from fedhelix.core.registry import METHODS, make, option_names, resolve
from fedhelix.core.tree import Tree
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.budget import Budgeted
from fedhelix.methods.private import Private
from fedhelix.runs.spec import RunSpec

# Keys that bound what differential privacy adds: without it nothing would keep to them.
PRIVATE_ONLY = ("max_epsilon", "max_delta", "min_noise", "max_clip")
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
EVALUATIONS = ("evaluate", "evaluate_received")
ARRIVALS = ("onboard_client", "onboard_state")


@dataclass(frozen=True)
class SitePolicy(Checked):
    """The rules of one site; a request that breaks one is refused in a sentence."""

    methods: tuple[str, ...] = option(
        (), "methods that may run, such as secure+fedavg (default: all)"
    )
    options: tuple[str, ...] = option((), "KEY=VALUE: values that options of methods must have")
    require_privacy: bool = option(False, "only methods with differential privacy may run")
    max_epsilon: float | None = option(
        None, "largest privacy budget; runs without one are refused (default: any)", above=0
    )
    total_epsilon: float | None = option(
        None,
        "sum of the privacy budgets of all runs at the site; those without noise are refused "
        "(default: any)",
        above=0,
    )
    max_delta: float | None = option(
        None,
        "largest delta; runs without differential privacy are refused (default: any)",
        above=0,
        below=1,
    )
    server_noise: bool = option(True, "the server may add the noise of `private`, not the site")
    min_noise: float | None = option(
        None,
        "noise that the site itself adds in `private`, in clips; runs without differential privacy "
        "are refused (default: any)",
        above=0,
    )
    max_clip: float | None = option(
        None,
        "longest update that leaves the site in `private`; runs without differential privacy are "
        "refused (default: any)",
        above=0,
    )
    require_secure: bool = option(False, "only methods with secure aggregation may run")
    peers: str | None = option(
        None,
        "folder with SITE.pub of all sites, which must sign masking keys (default: unchecked)",
    )
    single_uploads: bool = option(True, "methods whose server compares single uploads may run")
    min_cohort: int = option(1, "clients that a round must have", low=1)
    min_samples: int = option(1, "samples without which the site takes no part", low=1)
    hellos: bool = option(True, "the site may send something before the first round")
    newcomers: bool = option(True, "the site may join a run that has begun")
    supplements: bool = option(True, "the server may send samples to train on")
    metrics: bool = option(True, "the site reports its losses and scores")
    max_rounds: int = option(10_000, "rounds of a run", low=1)
    max_epochs: int = option(100, "local epochs of a round", low=0)
    max_steps: int = option(1_000_000, "optimiser steps of a round", low=1)
    max_clients: int = option(100_000, "clients of a run", low=1)
    max_classes: int = option(100_000, "classes that the server may announce", low=1)
    max_parameters: int = option(200_000_000, "values of a model", low=1)
    max_bytes: int = option(
        4_000_000_000, "bytes of a message to the site, or of its answer", low=1
    )
    max_seconds: float = option(86_400.0, "seconds that a request may take", above=0)
    hours: str | None = option(
        None,
        "when requests are answered, such as 20:00-06:00, by the site's clock (default: always)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            resolve(name)
        known = {name for kind in METHODS.values() for name in option_names(kind)}
        for text in self.options:
            if "=" not in text:
                raise UserError(f"options of a policy are KEY=VALUE, not '{text}'.")
            if (key := _assigned(text)[0]) not in known:
                raise unknown("option of a policy", key, known)
        if self.hours is not None and not HOURS.fullmatch(self.hours):
            raise UserError(f"hours must be HH:MM-HH:MM, not '{self.hours}'.")
        if self.hours is not None and self.hours[:5] == self.hours[6:]:
            raise UserError(f"hours = '{self.hours}' are none; leave hours out to answer always.")

    @classmethod
    def read(cls, path: Path | str | None) -> SitePolicy:
        """The policy in a file; unknown keys are refused."""
        if path is None:
            return cls()
        policy: SitePolicy = build(cls, toml.read(path), f"the policy '{path}'", grouped=False)
        here = policy.peers and str(Path(path).parent / policy.peers)  # as written in that file
        return replace(policy, peers=here)

    # Before anything else -----------------------------------------------------------------------

    def check_message(
        self, header: Mapping[str, Any], body: Mapping[str, Any], now: datetime.time
    ) -> None:
        """Refuse a request by what it asks for."""
        kind = header.get("kind")
        if not self._open_at(now):
            raise refusal(f"answers requests at {self.hours} only")
        if kind == "client_init":
            self.check_hello()
        if kind in ARRIVALS and not self.newcomers:
            raise refusal("joins no run that has begun (newcomers = false)")
        if kind in EVALUATIONS and not (kind == "evaluate" and header.get("final") is True):
            self.check_scores()  # after the last round the site stores its model first
        if "supplement" in body and not self.supplements:
            raise refusal("takes no samples from the server (supplements = false)")
        self._check_masked(header, body)
        for name, limit in (("round", self.max_rounds), ("client", self.max_clients)):
            value = header.get(name)
            done = name == "round" and kind in EVALUATIONS  # it counts rounds that are over
            if isinstance(value, int) and not 0 <= value < limit + done:
                raise refusal(f"allows {limit} {name}s, and this is {name} {value + 1}")

    def _check_masked(self, header: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        """Refuse sums over too few clients, whatever the run's settings say."""
        survivors = body.get("survivors", {}).get("clients")
        if header.get("kind") == "masking_shares":
            self._at_least("min_cohort", len(body.get("keys", {})), "clients")
        if isinstance(survivors, Tensor):
            self._at_least("min_cohort", len(set(survivors.flatten().tolist())), "clients in a sum")

    def check_hello(self) -> None:
        """Refuse what a method asks of every client before the first round."""
        if not self.hellos:
            raise refusal("sends nothing before the first round (hellos = false)")

    def check_scores(self) -> None:
        """Refuse to say how good the site's model is."""
        if not self.metrics:
            raise refusal("reports no scores (metrics = false)")

    def check_bytes(self, count: int) -> None:
        """Refuse a message that is too large, in either direction."""
        self._at_most("max_bytes", count, "bytes")

    def _open_at(self, now: datetime.time) -> bool:
        if self.hours is None:
            return True
        begin, end = map(datetime.time.fromisoformat, self.hours.split("-"))
        return begin <= now < end if begin <= end else now >= begin or now < end

    def opens_in(self, now: datetime.datetime) -> float:
        """Seconds until the site's hours begin; none where requests are answered."""
        if self.hours is None or self._open_at(now.time()):
            return 0.0
        begin = datetime.datetime.combine(now, datetime.time.fromisoformat(self.hours[:5]))
        begin += datetime.timedelta(days=begin < now)
        return begin.timestamp() - now.timestamp()  # also on days when clocks are changed

    # When a run is set up -----------------------------------------------------------------------

    def check_run(self, spec: RunSpec, classes: Any) -> None:
        """Refuse a run by its method and settings."""
        self._check_method(spec)
        config = spec.config
        self._at_least(
            "min_cohort", min(config.cohort or 10, config.client_count), "clients in a round"
        )
        self._at_most("max_rounds", config.rounds, "rounds")
        self._at_most("max_epochs", config.epochs, "local epochs")
        self._at_most("max_clients", config.client_count + config.newcomers, "clients")
        if isinstance(classes, int):
            self._at_most("max_classes", classes, "classes")

    def _check_method(self, spec: RunSpec) -> None:
        method = spec.method
        if self.methods and method.label not in [make(name).label for name in self.methods]:
            raise refusal(f"runs {', '.join(self.methods)} only, not {spec.spec}")
        secure = method.capabilities.masks is not None
        if self.require_secure and not secure:
            raise refusal(f"needs secure aggregation, which {spec.spec} has not")
        compares = method.capabilities.single_uploads or method.capabilities.compares_uploads
        if not self.single_uploads and (compares or method.overrides("weights")) and not secure:
            raise refusal(f"gives {spec.spec} no single uploads to look at")
        private = [part for part in chain(method) if isinstance(part, Budgeted)]
        bound = next((name for name in PRIVATE_ONLY if getattr(self, name) is not None), None)
        if (self.require_privacy or bound) and not private:
            why = "require_privacy" if self.require_privacy else bound
            raise refusal(f"needs differential privacy, which {spec.spec} has not ({why})")
        for part in private:
            self._at_most("max_epsilon", part.epsilon, "as epsilon")
            self._at_most("max_delta", part.delta, "as delta")
            self._check_noise(part)
        chosen = method.options()
        allowed: dict[str, list[str]] = {}
        for key, value in map(_assigned, self.options):
            allowed.setdefault(key, []).append(value)
        for key, values in allowed.items():
            if key in chosen and not any(_is(chosen[key], value) for value in values):
                raise refusal(f"needs {key} = {' or '.join(values)}, not {chosen[key]}")

    def _check_noise(self, part: Budgeted) -> None:
        if not isinstance(part, Private) or part.noise_by == "clients":
            return
        if not self.server_noise:
            raise refusal("gives the server no updates without noise (server_noise = false)")
        if self.min_noise is not None:
            raise refusal(f"needs a noise of {self.min_noise:g} at the site, not at the server")

    @property
    def bounds_noise(self) -> bool:
        """Whether `check_payload` may refuse a round."""
        return self.min_noise is not None or self.max_clip is not None

    def check_payload(self, method: Method, payload: Tree) -> None:
        """Refuse a round by the noise and the clip that the server sends for it."""
        for part in chain(method):
            if isinstance(part, Private):
                rule = payload.get("privacy", {})
                noise, clip = (float(rule.get(name, math.nan)) for name in ("share", "clip"))
                if self.min_noise is not None and not noise >= self.min_noise:
                    raise refusal(f"needs a noise of {self.min_noise:g}, not {noise:g} (min_noise)")
                if self.max_clip is not None and not 0 < clip <= self.max_clip:
                    raise refusal(f"allows a clip of {self.max_clip:g}, not {clip:g} (max_clip)")

    def check_total(self, epsilon: float) -> None:
        """Refuse a run that would spend more than is left by the runs before it."""
        if self.total_epsilon is not None and epsilon == math.inf:
            raise refusal(
                "needs runs with a privacy budget, and this one adds no noise (total_epsilon)"
            )
        self._at_most("total_epsilon", epsilon, "as epsilon of all runs together")

    def check_work(self, spec: RunSpec, samples: int, parameters: int) -> None:
        """Refuse a run by what it means for this site's samples, and by the size of its model."""
        self._at_least("min_samples", samples, "samples")
        steps = spec.config.epochs * math.ceil(samples / spec.config.batch_size)
        self._at_most("max_steps", steps, "steps in a round")
        self._at_most("max_parameters", parameters, "values in a model")

    def _at_most(self, name: str, value: float, what: str) -> None:
        limit = getattr(self, name)
        if limit is not None and value > limit:
            raise refusal(f"allows {limit:,} {what}, not {value:,} ({name})")

    def _at_least(self, name: str, value: float, what: str) -> None:
        if value < getattr(self, name):
            raise refusal(f"needs {getattr(self, name):,} {what}, not {value:,} ({name})")


def chain(method: Method) -> Iterator[Method]:
    """A method and those inside of it."""
    yield method
    if isinstance(method, Wrapper):
        yield from chain(method.inner)


class PolicyRefusal(UserError):
    """A site's policy does not allow what the server asks for."""


def refusal(why: str) -> PolicyRefusal:
    """What the server is told."""
    return PolicyRefusal(f"the site's policy {why}.")


def _assigned(text: str) -> tuple[str, str]:
    """The option and the value of KEY=VALUE; `method.KEY` and `NAME.KEY` are the same option."""
    key, _, value = (word.strip() for word in text.partition("="))
    return key.rpartition(".")[2].replace("-", "_"), value


def _is(value: Any, text: str) -> bool:
    """Whether an option has the value that a text stands for: 8 is 8.0, and auto is None."""
    if value is None:
        return text.lower() in ("none", "auto")
    try:
        return bool(float(text) == float(value))
    except (TypeError, ValueError):
        return str(value).lower() == text.lower()
