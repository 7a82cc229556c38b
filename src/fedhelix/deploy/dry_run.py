"""What a run would reveal of a site, before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.options import build
from fedhelix.core.tree import encode
from fedhelix.data import Split
from fedhelix.deploy.audit_log import shapes
from fedhelix.deploy.code import SiteCode
from fedhelix.deploy.policy import RoundPolicy, sampled
from fedhelix.deploy.remote_data import (
    UNKNOWN_COUNTS,
    RemotePartition,
    describe_data,
    placeholder_data,
)
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_policy import chain
from fedhelix.deploy.site_setup import site_setup
from fedhelix.engines.local import ClientTask, Setup, make_client
from fedhelix.methods import DPSGD, Private
from fedhelix.methods.budget import Budgeted
from fedhelix.runs.spec import RunSpec, make_spec, read_spec


def asked_run(text: str, code: SiteCode) -> tuple[RunSpec, int, str]:
    """The run that a method's name, a config.toml or a run folder stands for, how many clients
    are sampled in addition to a cohort, and the experiment whose budget a site may have noted: a
    run folder is the run that goes on there, and a config.toml stands for a new one.
    """
    path = Path(text)
    goes_on = path.is_dir()
    path = path / "config.toml" if goes_on else path
    if path.suffix != ".toml":
        if len(path.parts) > 1 and not path.exists():
            raise UserError(f"there is no run folder '{path}', and no method has such a name.")
        return make_spec(text, {}), 0, ""
    settings = toml.read(path)
    known = isinstance(settings.get("method"), Mapping) and "name" in settings["method"]
    deployment = settings.get("deployment")
    terms = deployment if isinstance(deployment, Mapping) else {}
    extra = {"extra": terms["extra"]} if "extra" in terms else {}
    policy = build(RoundPolicy, extra, "the table [deployment]")
    spec = read_spec(code.localized(settings) if known else settings, path)
    return spec, policy.extra, str(terms.get("experiment", "")) if goes_on else ""


def reveals(site: Site, spec: RunSpec, extra: int = 0, experiment: str = "") -> Iterator[str]:
    """One sentence for everything that would leave the site; UserError if its policy refuses."""
    site.policy.check_run(spec, site.own_data.classes if site.own_data else None)
    site.policy.check_total(site.budgets.total(experiment, spec.method))
    setup = _setup(site, spec)
    shared = spec.method.shared_params(setup.layers)
    values = sum(setup.layers.sizes[name] for name in shared)
    site.policy.check_work(spec, len(setup.splits[0].train), sum(setup.layers.sizes.values()))
    _check_noise(site, spec, extra)
    needs = spec.method.capabilities
    if site.policy.hours is not None:
        yield f"only at {site.policy.hours} by this machine's clock: nothing at other times."
    yield "once: the shape and numbers of its samples, and how many classes it knows."
    if needs.client_init:
        site.policy.check_hello()
        yield f"before the first round: {_first_message(setup)}."
    if needs.masks is not None:
        yield f"every round: {values:,} values of {len(shared)} entries, of which the server"
        yield "  learns the sum over all sites only; keys and shares, which say nothing."
    else:
        yield f"every round: {values:,} values of {len(shared)} entries, which the server sees."
    if spec.method.overrides("upload"):
        yield f"  {spec.method.label} may pack them or add to them; the audit log names them all."
    for part in chain(spec.method):
        if isinstance(part, Private):
            sites = part.noise_by == "clients"
            who = "every site adds its share of the noise" if sites else "the server adds the noise"
            seen = "them" if needs.masks is None else "their sum"
            whom = "all who see the sum only" if sites else f"all but the server, which sees {seen}"
            yield f"  They are clipped, and {who}:"
            yield f"  epsilon {part.epsilon:g}, delta {part.delta:g} for {whom}."
            if part.quantile is not None and site.policy.max_clip is not None:
                yield "  The clip changes; rounds with a longer one than max_clip are refused."
        if isinstance(part, DPSGD):
            budget = f"epsilon {part.epsilon:g}, delta {part.delta:g}"
            yield f"  The gradient of every sample is clipped and gets noise: {budget}."
    spent = any(isinstance(part, Budgeted) for part in chain(spec.method))
    budget = ", and what is spent of its privacy budget" * spent
    yield f"every round: how many samples it has trained on, for how many seconds{budget}."
    if site.policy.metrics:
        yield "every round: its training loss; when evaluated: the scores of the models that it"
        yield "  uses and receives; all without noise."


def _check_noise(site: Site, spec: RunSpec, extra: int) -> None:
    """Refuse a run by the noise and the clip that its server would send in the first round."""
    config, method, own = spec.config, spec.method, dict[str, Any]()
    private = any(isinstance(part, Private) for part in chain(method))
    if not private or not site.policy.bounds_noise:
        return
    if site.own_data is not None:  # then the server knows as much as a site describes
        counts = [UNKNOWN_COUNTS] * (config.client_count + config.newcomers)
        own["partition"] = RemotePartition(counts, config.valid)
        own["data"] = placeholder_data(describe_data(site.own_data))
    server = config.federation(method, "serial", cohort=sampled(config, extra), **own)
    ctx = server.context(0, config.rounds)
    state, _ = method.server_init({}, ctx)
    site.policy.check_payload(method, method.deliver(state, 0, ctx))


def _first_message(setup: Setup) -> str:
    """What the method computes from this site's samples and sends once."""
    sent = setup.hooks.client_init(make_client(setup, ClientTask(0, 0, {}, {})))
    entries = [
        f"{name} ({'×'.join(map(str, shape))})" if isinstance(shape, list) and shape else name
        for name, shape in shapes(sent).items()
    ]
    return f"{', '.join(entries)}, computed from its samples; {len(encode(sent)):,} bytes"


def _setup(site: Site, spec: RunSpec) -> Setup:
    if site.own_data is None:
        return spec.config.federation(spec.method).engine.setup
    empty = np.empty(0, dtype=np.int64)
    split = Split(np.arange(len(site.own_data.x)), empty, empty)
    return site_setup(spec, site.own_data, [split])
