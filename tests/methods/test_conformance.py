"""What must hold for every registered method; a new one is covered as soon as it is registered."""

import dataclasses
import math
from importlib.util import find_spec

import pytest
import torch

from fedhelix import METHODS, FedBN, FedPer, load
from fedhelix.components.pruning import prunable
from fedhelix.core.shift import without_shift
from fedhelix.core.tree import payload_bytes
from fedhelix.engines.local import ClientTask, make_client
from fedhelix.federation import loop
from helpers import NETWORKS, cheap, check_resumed, same, small, timeless

DIGITS = load("digits").subsample(300, 100)
# Options that change what travels or what is kept.
VARIANTS = {
    "apfl": [{"adaptive": False}],
    "ancestors": [{"inner": FedPer()}],
    "calibrated": [{"inner": FedPer()}, {"inner": METHODS["scaffold"]()}, {"trained": False}],
    "compact": [{"bits": 4}, {"bits": 8, "download_bits": 8}],
    "denoised-heads": [{"inner": METHODS["fedavgm"]()}],
    "clustered": [{"clusters": 2, "vectors": 2, "inner": METHODS["fedper"]()}],
    "fedlps": [{"prune_ratio": 0.3}],
    "finish": [{"archive": 0.5}],
    "helix": [{"bits": 32, "finish": False}, {"heads": "denoised"}],
    "gene-fl": [
        {
            "clusters": 2,
            "gene_score": "similarity",
            "gene_select": "highest",
            "gene_budget": 0.0,
            "elg_hard": True,
        },
        {
            "clusters": 1,
            "cluster_distance": "pacfl",
            "gene_granularity": "module",
            "fisher_mode": "batch",
        },
    ],
    "fedavgm": [{"adaptive": True}],
    "fedbn": [{"bn_filter": "name"}],
    "fedlg": [{"select": "gradient", "layers": 1}],
    "fedlp": [{"redraw": "run"}],
    "fedopt": [{"server_optimizer": "yogi", "bias_correction": True}],
    "genfed": [{"inner": FedPer(), "schedule": "constant", "rho_max": 2}, {"inner": FedBN()}],
    "lg-fedavg": [{"warm_start": 1}, {"shared_layers": 2}],
    "local": [{"follow_sampling": True}],
    "pfedgpa": [{"mode": "online", "warmup": 0, "slice": "last:1"}],
    "private": [{"inner": FedPer(), "noise_by": "clients", "quantile": 0.5}],
    "scaffold": [{"control": "steps"}],
}
# Numbers that a client uploads besides its model: density of the mask and accuracy on validation
# samples; shares of ten classes; local work; shares and variance; the choice, of eight bytes; a
# policy for 64 features; class embeddings and a valve for as many.
EXTRA = {
    "gene-fl": 2, "fedproto": 10, "fednova": 1, "fedpac": 11, "ifca": 2,
    "fedcp": 8576, "gpfl": 9216,
}  # fmt: skip
METHOD_CASES = [
    cheap(name, **options)
    for name in METHODS
    if name not in ("private", "dp-sgd") or find_spec("dp_accounting")
    for options in ({}, *VARIANTS.get(name, []))
]


CUT = ("heterofl", "fedrolex")  # clients have and send a part of every entry


def network(method) -> str:
    return NETWORKS.get(method.label.rpartition("+")[2], "digits-cnn")


def label(method) -> str:
    plain = cheap(method.name)
    options = vars(method).items()
    changed = [
        f"{key}={value}" for key, value in options if key != "inner" and value != vars(plain)[key]
    ]
    return " ".join([method.label, *changed])


every_method = pytest.mark.parametrize("method", METHOD_CASES, ids=label)


def build(method, **more):
    # Three of four: whoever works in one round mostly works in the next one too, with what it kept.
    usual = {"model": network(method), "data": DIGITS, "clients": 4, "batch_size": 32}
    return small(method, **usual | more)


@every_method
def test_resuming_gives_the_straight_run_to_the_bit(method, tmp_path):
    """Both begin with the same round, so that two runs are equal to the bit, too."""
    check_resumed(lambda: build(method), tmp_path, 2, after=1)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        pytest.param(method, model, id=f"{label(method)} {model}")
        for method in METHOD_CASES
        for model in dict.fromkeys([network(method), "digits-bn-cnn"])
        if model == network(method) or network(method) != "lora-mlp"
        if method.name not in ("private", "dp-sgd") or model != "digits-bn-cnn"  # refused
        if method.name != "secure"  # whose words test_secure.py counts
    ],
)
def test_only_what_is_declared_travels_and_every_byte_is_counted(method, model, monkeypatch):
    fed, seen = build(method, model=model), []
    validate = loop.validate_uploads

    def spy(results, initial, needed):
        seen.extend(results)
        return validate(results, initial, needed)

    monkeypatch.setattr(loop, "validate_uploads", spy)
    (record, state), *_ = fed.run_rounds(1)
    shared, sizes = set(method.shared_params(fed.layers)), fed.layers.sizes
    if method.name == "lg-fedavg" and method.warm_start:
        shared = set(fed.layers.names)  # round 0 warms up
    assert [result.client for result in seen] == record["participants"]
    silent = {
        result.client for result in seen if not result.upload
    }  # FedUmf's clients that train in advance
    assert silent == (
        set(record["participants"]) - set(fed.cohort(0)) if "fedumf" in method.label else set()
    )
    seen = [result for result in seen if result.upload]
    for result in seen:
        sent = result.upload.get("model", {})
        assert set(sent) <= shared
        if method.name not in ("fedlp", "fedlg", "fedlps", "gene-fl"):
            assert set(sent) == shared
        assert all(value.shape == fed.initial[name].shape for name, value in sent.items())
        # What stays and what leaves make up the whole model.
        kept = result.client_state.get("trained", result.client_state.get("model", {}))
        drawn = {pair.a for pair in fed.layers.adapters if method.name == "ffa-lora"}
        assert set(kept) | set(sent) | drawn >= set(fed.layers.names)
        changing = method.name == "gene-fl" or (
            method.name == "fedlg" and method.select == "gradient"
        )
        assert changing or not set(result.client_state.get("model", {})) & set(sent)
    extra = EXTRA.get(method.name, 0)
    if method.label.rpartition("+")[2] == "scaffold":
        extra = sum(sizes[name] for name in fed.layers.parameters)
    elif method.name == "fedlg" and method.select == "gradient":
        extra = len(fed.layers.convs)
    elif method.name == "fedlps":
        (pruned,) = prunable(fed.layers)[:1]
        weight = fed.initial[pruned]
        left = (
            math.ceil((1 - method.prune_ratio) * len(weight)) * weight[0].numel()
        )  # all inputs of the first stay
        assert all(result.upload["values"][pruned].numel() == left for result in seen)
        trees = [(result.upload["values"], *result.upload["channels"].values()) for result in seen]
        extra = sum(
            bytes_of(value) for tree in trees for part in tree for value in part.values()
        ) / (4 * len(seen))
    elif method.name == "fedpac":
        extra += sizes[fed.layers.head[0]]  # a mean for each class and feature
    elif method.name == "private" and method.quantile:
        extra = 1  # whether the update was shorter than the clip
    trees = [result.upload for result in seen]
    size = sum(bytes_of(fed.initial[name]) for tree in trees for name in tree.get("model", {}))
    size += sum(payload_bytes(tree.get("prototypes", {})) for tree in trees)
    size += 4 * len(seen) * extra
    size -= len(seen) * saved(method, fed.initial)
    if method.name in CUT:
        size = sum(
            payload_bytes(method.download(state.server, result.client, fed.context(0, 1)))
            for result in seen
        )
    assert (record["uplink_bytes"], record["refused"]) == (size, {})
    assert 0 <= record["personal_accuracy"] <= 1
    models = [
        part.get("model", {}) for part in state.server.get("parts", {"": state.server}).values()
    ]
    assert all(bool(value.isfinite().all()) for model in models for value in model.values())


def saved(method, initial):
    """What packing saves: few bits and a scale per row instead of 4 bytes per weight."""
    weights = [value for value in initial.values() if value.dim() >= 2]
    count, rows = sum(map(torch.numel, weights)), sum(map(len, weights))
    if method.name == "helix":
        return saved(method.inner, initial)
    if method.name != "compact":
        return 0
    return 4 * count - math.ceil(method.bits * count / 8) - 2 * rows


def bytes_of(value):
    """The bytes of a tensor."""
    return value.numel() * value.element_size()


@every_method
def test_downloads_are_counted_and_hold_nothing_personal(method):
    fed = build(method)
    state = fed.initialize(2)
    for round, (record, after) in enumerate(fed.run_rounds(2)):
        # The participants of an asynchronous method may have started before.
        started = record.get("started", record["participants"])
        payloads = [method.download(state.server, i, fed.context(round, 2)) for i in started]
        assert record["downlink_bytes"] == sum(map(payload_bytes, payloads))
        state = after


@every_method
def test_an_unseen_client_can_start(method):
    run = build(method).fit(1, quiet=True)
    fed = run.federation
    number = run.onboard((DIGITS.x[:40], DIGITS.y[:40]))
    assert number == 4 == fed.clients - 1
    payload = method.deliver(run.state.server, number, fed.context(1, 2))
    newcomer = make_client(fed.engine.setup, ClientTask(number, 1, {}, {}))
    models = method.start(payload, run.state.client_states.get(number, {}), newcomer)
    used = without_shift(models[method.personal(models)])
    assert list(used) == list(fed.layers.names)
    # It gets what the others learned together, and draws the rest.
    payload = method._opened(payload, newcomer) if method.name == "compact" else payload
    inherited = received = run.state.client_states.get(number, payload).get("model", {})
    if method.name in CUT:
        inherited = used  # whose zeros and scales test_heterofl.py checks
    if method.name == "ifca":  # one of several
        inherited = next(model for model in payload.values() if same(model, used))
    for name, value in used.items():
        assert torch.equal(value, inherited.get(name, fed.initial[name]))
    (record, _), *_ = fed.run_rounds(2, run.state)
    assert len(record["personal"]) == 5
    if method.name != "compact":  # which may pack it
        assert record["other_bytes"] >= 4 * sum(map(torch.numel, received.values()))


@every_method
def test_a_method_is_described_by_its_options(method):
    assert dataclasses.is_dataclass(method) and type(method).__dataclass_params__.frozen
    options = [field for field in dataclasses.fields(method) if field.init]
    assert all(field.metadata["meaning"] for field in options)
    assert type(method)(**{field.name: getattr(method, field.name) for field in options}) == method


def test_methods_that_share_everything_and_never_tune_begin_alike():
    """The first round of the variants of FedAvg trains the same models on the same batches."""
    names = ["fedavg", "fedavg-ft", "fedopt", "ditto", "scaffold", "fedlp"]
    losses = {
        name: timeless(build(METHODS[name]()).fit(1, quiet=True).records)[0]["train_loss"]
        for name in names
    }
    assert losses["fedavg"] == losses["fedavg-ft"] == losses["fedopt"] == losses["fedlp"]
    assert losses["scaffold"] == pytest.approx(
        losses["fedavg"], rel=1e-6
    )  # its controls are still zero
