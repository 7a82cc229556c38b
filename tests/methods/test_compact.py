"""Compact: updates in few bits, with error feedback, around other methods."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn

from fedhelix import (
    METHODS,
    Clustered,
    Compact,
    FedAvg,
    FedLP,
    FedPer,
    FedProx,
    FedUmf,
    GenFed,
    LGFedAvg,
    Median,
    Method,
    Scaffold,
    UserError,
    Wrapper,
    load,
)
from fedhelix.components import codes
from fedhelix.core.registry import make
from fedhelix.core.tree import payload_bytes, subtract, take
from fedhelix.engines.local import ClientTask, make_client
from fedhelix.federation import uploads
from helpers import close, same, small, timeless, two_quadratics

DIGITS = load("digits").subsample(300, 100)
EVERY_CODE = [
    {"bits": 1},
    {"bits": 2},
    {"bits": 4},
    {"bits": 8},
    {"code": "top-k"},
    {"code": "units", "keep": 0.3},
    {"bits": 8, "download_bits": 4},
]


def words(options):
    return " ".join(f"{key}={value}" for key, value in options.items())


every_code = pytest.mark.parametrize("options", EVERY_CODE, ids=words)


def build(method, **more):
    return small(method, **{"model": "digits-bn-cnn", "data": DIGITS, "clients": 4} | more)


def round_of(fed, state, t=0):
    """The tasks and raw results of a round."""
    ctx = fed.context(t, 9)
    payloads = {i: fed.method.download(state.server, i, ctx) for i in fed.cohort(t)}
    tasks = [ClientTask(i, t, p, state.client_states.get(i, {})) for i, p in payloads.items()]
    return tasks, fed.engine.run_clients(tasks), ctx


def test_one_weight_by_hand():
    """Losses (w - 1)² and (w - 3)²: a step of 0.1 moves w by 0.2 and 0.6 from zero. A row of one
    value is its own mean, so one bit says all but the rounding of the scale, which is sent later.
    """
    fed = two_quadratics(Compact(), epochs=1)
    (_, first), (_, second) = fed.run_rounds(2)
    name = fed.layers.names[0]
    scales = torch.tensor([0.2, 0.6]).bfloat16().float()
    assert float(first.server["model"][name]) == pytest.approx(float(scales.mean()), rel=1e-6)
    for client, (moved, scale) in enumerate(zip((0.2, 0.6), scales.tolist(), strict=True)):
        lost = first.client_states[client]["residual"][name]
        assert float(lost) == pytest.approx(moved - scale, abs=1e-7)
    # From w each client moves by 0.2 (1 - w) and 0.2 (3 - w), and adds what was lost.
    w = float(scales.mean())
    updates = torch.tensor([0.2 * (1 - w) + 0.2 - scales[0], 0.2 * (3 - w) + 0.6 - scales[1]])
    after = w + float(updates.bfloat16().float().mean())
    assert float(second.server["model"][name]) == pytest.approx(after, rel=1e-6)


@every_code
def test_what_was_sent_differs_from_all_updates_by_the_last_residual_alone(options):
    """A client alone: after every round, model + residual is where its updates alone lead."""
    fed = build(Compact(**options), cohort=1, clients=1, partition="iid")
    sent = moved = None
    state = fed.initialize(3)
    for t in range(3):
        tasks, (result,), ctx = round_of(fed, state, t)
        received = fed.method._opened(tasks[0].payload, ctx)["model"]
        names = codes.packable(fed.layers, fed.initial)
        decoded = fed.method.decode(result.upload, tasks[0].payload, ctx)["model"]
        trained = plain(fed, tasks[0])
        step, update = (subtract(take(m, names), received) for m in (decoded, trained))
        sent = step if sent is None else {name: sent[name] + step[name] for name in names}
        moved = update if moved is None else {name: moved[name] + update[name] for name in names}
        lost = result.client_state["residual"]
        assert close({name: sent[name] + lost[name] for name in names}, moved, 1e-5)
        state = replace(
            state, server={"model": decoded}, client_states={0: result.client_state}, round=t + 1
        )


def plain(fed, task):
    """The model that the client has trained, as FedAvg would have sent it."""
    other = build(FedAvg(), cohort=1, clients=1, partition="iid")
    payload = fed.method._opened(task.payload, fed.context(task.round, 9))
    return other.engine.run_clients([task._replace(payload=payload, client_state={})])[0].upload[
        "model"
    ]


@every_code
def test_the_few_others_travel_as_they_are_and_weights_in_few_bytes(options):
    fed = build(Compact(**options))
    tasks, results, ctx = round_of(fed, fed.initialize(1))
    weights = [name for name in fed.layers.parameters if fed.initial[name].dim() >= 2]
    for task, result in zip(tasks, results, strict=True):
        assert set(result.upload) == {"model", "packed"}
        assert set(result.upload["model"]) == set(fed.layers.names) - set(weights)
        decoded = fed.method.decode(result.upload, task.payload, ctx)
        assert set(decoded) == {"model"} and set(decoded["model"]) == set(fed.layers.names)
        assert set(result.client_state["residual"]) == set(weights)
        assert payload_bytes(result.upload) < payload_bytes(decoded) / 2


def test_a_code_without_loss_is_the_inner_method():
    """Every value as bfloat16, which the residual makes up for: close to FedAvg."""
    runs = [
        build(method, cohort=4).fit(3, quiet=True)
        for method in (FedAvg(), Compact(code="top-k", keep=1.0))
    ]
    assert close(*(run.state.server["model"] for run in runs), 2e-3)


@pytest.mark.parametrize("options", EVERY_CODE[:5], ids=words)
def test_it_learns_like_fedavg(options):
    assert learnt(Compact(**options)) > learnt(FedAvg()) - 0.04 > 0.8


@cache
def learnt(method):
    """The accuracy after six rounds."""
    more = {"data": "digits", "partition": "iid", "batch_size": 16, "epochs": 2}
    fed = small(method, "digits-cnn", **more)
    return fed.fit(6, quiet=True, eval_every=6).summary["final_accuracy"]


AROUND = [
    Compact(FedProx(mu=0.1)),
    Compact(Scaffold(control="steps")),
    Compact(FedPer()),
    Compact(FedUmf()),
    Compact(FedLP()),
    Compact(LGFedAvg(warm_start=1), download_bits=8),
    GenFed(Compact()),
    Compact(GenFed()),
    Median(Compact()),
    Compact(Median()),
    Clustered(Compact(download_bits=4), clusters=2),
    Compact(FedPer(), code="units", keep=0.2, download_bits=8),
]


@pytest.mark.parametrize("method", AROUND, ids=lambda method: method.label)
def test_around_other_methods(method):
    run = build(method, validation_size=50, clients=6).fit(3, quiet=True)
    assert all(record["refused"] == {} for record in run.records)
    compact = method if method.name == "compact" else method.inner
    bare = build(compact.inner, validation_size=50, clients=6).fit(3, quiet=True)
    mine, its = ([r["uplink_bytes"] for r in done.records] for done in (run, bare))
    assert all(a < b for a, b in zip(mine, its, strict=True))


def test_inside_and_outside_of_a_selection_are_the_same():
    one, other = (
        build(method, validation_size=50).fit(3, quiet=True)
        for method in (GenFed(Compact(), rho_max=2), Compact(GenFed(rho_max=2)))
    )
    assert same(one.state.server, other.state.server)
    assert one.records[-1]["metadata"] == other.records[-1]["metadata"]


def test_what_stays_at_home_stays_there():
    fed = build(Compact(FedPer()))
    _, results, _ = round_of(fed, fed.initialize(1))
    head = set(fed.layers.head)
    for result in results:
        assert not head & (set(result.upload["model"]) | set(result.client_state["residual"]))
        assert head <= set(result.client_state["model"])
        assert result.upload["packed"]["entries"].tolist() == [1] * 3 + [0]


def test_a_layer_that_is_not_sent_keeps_its_residual():
    fed = build(Compact(FedLP(keep=0.5)), cohort=4)
    (_, first), (_, second) = fed.run_rounds(2)
    tasks, results, _ = round_of(fed, first, 1)
    waited = 0
    for task, result in zip(tasks, results, strict=True):
        names = codes.packable(fed.layers, fed.initial)
        mask = result.upload["packed"].get("entries", torch.ones(len(names))).tolist()
        for name, sent in zip(names, mask, strict=True):
            if not sent and name in task.client_state.get("residual", {}):
                waited += 1
                before, after = (s["residual"][name] for s in (task.client_state, result[3]))
                assert torch.equal(before, after)
    assert waited and second.round == 2


def test_a_client_that_sends_nothing_keeps_its_residual():
    fed = build(Compact(FedUmf()), cohort=2)
    state = fed.initialize(9)
    residual = {"any": torch.ones(1)}
    task = ClientTask(0, 0, fed.method.download(state.server, 0, fed.context(0, 9)), {})
    task.payload["role"]["sampled"] = torch.tensor(0.0)
    (result,) = fed.engine.run_clients([task._replace(client_state={"residual": residual})])
    assert result.upload == {} and result.client_state["residual"] == residual


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_download_is_unpacked_before_every_hook(bits):
    @dataclass(frozen=True)
    class Spy(FedAvg):
        def start(self, payload, client_state, client):
            seen.append(("start", payload))
            return super().start(payload, client_state, client)

        def loss_context(self, payload, client_state, client):
            seen.append(("loss_context", payload))
            return super().loss_context(payload, client_state, client)

        def upload(self, local):
            seen.append(("upload", local.payload))
            return super().upload(local)

        def onboard_client(self, payload, client):
            seen.append(("onboard_client", payload))
            return super().onboard_client(payload, client)

        def onboard_state(self, payload, client):
            seen.append(("onboard_state", payload))
            return super().onboard_state(payload, client)

    seen = []
    run = build(Compact(Spy(), download_bits=bits)).fit(1, quiet=True)
    fed = run.federation
    run.onboard((DIGITS.x[:40], DIGITS.y[:40]))
    fed.method.onboard_client(
        fed.method.download(run.state.server, 0, fed.context(1, 2)),
        make_client(fed.engine.setup, ClientTask(0, 1, {}, {})),
    )
    assert {hook for hook, _ in seen} == {
        "start", "loss_context", "upload", "onboard_client", "onboard_state"
    }  # fmt: skip
    for hook, payload in seen:
        assert payload.keys() == {"model"} or (hook == "onboard_client" and not payload)
        assert not payload or list(fed.layers.names) == sorted(
            payload["model"], key=list(fed.layers.names).index
        )


def test_a_packed_download_is_near_the_model_and_weighs_less():
    fed = build(Compact(download_bits=8))
    state, ctx = fed.initialize(1), fed.context(0, 1)
    payload = fed.method.download(state.server, 0, ctx)
    opened = fed.method._opened(payload, ctx)["model"]
    for name, value in state.server["model"].items():
        step = float(value.abs().max()) / 127 if value.dim() >= 2 else 0
        assert float((opened[name] - value).abs().max()) <= step
    assert payload_bytes(payload) < 0.35 * payload_bytes(state.server)
    # Everybody gets the very same tensors, so that one forward pass serves all.
    again = fed.method._opened(fed.method.download(state.server, 1, ctx), ctx)["model"]
    assert all(again[name] is value for name, value in opened.items())


def test_the_arrival_of_a_newcomer_is_packed_too():
    sizes = []
    for method in (METHODS["fedau"](), Compact(METHODS["fedau"](), download_bits=8), FedAvg()):
        run = build(method, newcomers=2, newcomers_after=1).fit(2, quiet=True)
        sizes.append(run.records[1]["arrival_bytes"])
    assert sizes[1] < 0.35 * sizes[0] and sizes[0] == sizes[2]


@dataclass(frozen=True)
class Greeting(Wrapper):
    """Newcomers say a number, and everybody receives one."""

    def client_init(self, client):
        return {"told": torch.tensor(client.id)}

    def download(self, server, client, ctx):
        return {**self.inner.download(server, client, ctx), "from": torch.tensor(client)}


def test_a_wrapper_around_it_is_heard_by_newcomers():
    fed = build(Greeting(Compact(download_bits=8)))
    server, ctx = fed.initialize(1).server, fed.context(0, 1)
    assert int(fed.engine.onboard_client(ClientTask(2, 0, {}, {}))["told"]) == 2
    _, payload, done = fed.method.onboard_server(server, {}, ctx)
    assert int(payload["from"]) == 4 and "packed" in payload and done


# Uploads that no client sends


def forged(fed, change):
    """A round in which one client's raw upload is changed: who is refused and why."""
    state, ctx = fed.initialize(1), fed.context(0, 1)
    tasks, results, _ = round_of(fed, state)
    results[0] = results[0]._replace(upload=change(results[0].upload))
    payloads = {task.client: task.payload for task in tasks}
    plain, refused = uploads.decode_uploads(fed.method, results, payloads, ctx)
    good, invalid = uploads.validate_uploads(plain, fed.initial, fed.needed)
    assert len(good) + len(refused | invalid) == len(tasks)
    return (refused | invalid).get(str(tasks[0].client))


def packed(**more):
    return lambda upload: {**upload, "packed": {**upload["packed"], **more}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda upload: upload, None),
        (lambda upload: {"model": upload["model"]}, "has no packed weights instead of some"),
        (packed(values=torch.zeros(3, dtype=torch.uint8)), "has shape (3,) for 'values' instead"),
        (packed(scales=torch.zeros(3, dtype=torch.bfloat16)), "has shape (3,) for 'scales'"),
        (packed(scales=torch.zeros(3)), "has torch.float32 for 'scales' instead of torch.bfloat16"),
        (packed(entries=torch.zeros(4, dtype=torch.uint8)), "has scales, values packed instead of"),
        (
            lambda upload: packed(scales=upload["packed"]["scales"] * float("nan"))(upload),
            "holds values that are not finite",
        ),
        (packed(more=torch.zeros(3)), "has more, scales, values packed instead of scales, values"),
        (
            lambda upload: {**upload, "packed": {"entries": torch.zeros(4, dtype=torch.uint8)}},
            "lacks the entry '",
        ),
        (
            lambda upload: {**upload, "model": {**upload["model"], "spy": torch.zeros(1)}},
            "has an unknown entry 'spy'",
        ),
        (
            lambda upload: {
                **upload,
                "model": {n: v * float("nan") for n, v in upload["model"].items()},
            },
            "holds values that are not finite",
        ),
    ],
)
def test_a_forged_upload_is_refused_and_the_others_are_not(change, reason):
    found = forged(build(Compact()), change)
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize("code", ["top-k", "units"])
def test_values_that_are_not_finite_are_refused(code):
    nan = lambda upload: packed(values=upload["packed"]["values"] * float("nan"))(upload)  # noqa: E731
    assert forged(build(Compact(code=code)), nan) == "holds values that are not finite"


def test_a_refused_upload_is_recorded_and_counted_and_the_round_goes_on(monkeypatch):
    fed = build(Compact())
    run_clients, size = fed.engine.run_clients, []

    def one_forged(tasks):
        results = run_clients(tasks)
        results[0] = results[0]._replace(upload=packed(more=torch.zeros(5))(results[0].upload))
        size.append(sum(payload_bytes(result.upload) for result in results))
        return results

    monkeypatch.setattr(fed.engine, "run_clients", one_forged)
    ((record, state),) = fed.run_rounds(1)
    first = str(record["participants"][0])
    assert list(record["refused"]) == [first] and "packed instead of" in record["refused"][first]
    name = codes.packable(fed.layers, fed.initial)[0]
    assert record["uplink_bytes"] == size[0]
    assert not torch.equal(state.server["model"][name], fed.initial[name])


@pytest.mark.parametrize("lr", [1e9, 1e30])
def test_a_round_that_diverged_leaves_no_absurd_residual(lr):
    fed = build(Compact(), lr=lr)
    (record, state), *_ = fed.run_rounds(1)
    assert len(record["refused"]) == 3
    residuals = [own.get("residual", {}).values() for own in state.client_states.values()]
    assert all(float(value.abs().max()) < 1e5 for own in residuals for value in own)
    (record, _), *_ = build(Compact(), cohort=4).run_rounds(2, state)
    assert record["refused"] == {}


@dataclass(frozen=True)
class Wrong(FedAvg):
    def decode(self, upload, payload, ctx):
        return None


def test_a_decode_that_returns_the_wrong_thing_stops_the_run():
    with pytest.raises(UserError, match=r"\.decode must return a dict of named tensors"):
        build(Wrong()).fit(1, quiet=True)


# What it refuses, and what others see


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("compact+fedlps", "compact cannot pack what fedlps has packed already"),
        ("compact+pfedhn", "compact sees no updates of a common model around pfedhn"),
        ("compact+fedproto", "compact sees no updates of a common model around fedproto"),
        ("compact+local", "compact sees no updates of a common model around local"),
        ("compact+clustered", "compact must stand inside of clustered"),
        ("compact+gene-fl", "compact cannot be put around gene-fl"),
    ],
)
def test_what_has_no_plain_updates_is_refused(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        build(make(spec))


def test_it_does_not_pack_twice():
    with pytest.raises(UserError, match="compact cannot pack what compact has packed already"):
        build(Compact(Compact(), code="top-k"))
    with pytest.raises(UserError, match="cannot pack what median"):
        build(Compact(Median(Compact())))


@pytest.mark.parametrize("inner", [FedAvg(), FedLP(), Scaffold(), GenFed()])
def test_on_the_server_uploads_are_the_inner_methods(inner):
    mine, its = Compact(inner).capabilities, inner.capabilities
    assert mine == its and not mine.packed_uploads
    assert Compact(inner, download_bits=8).capabilities.packed_downloads


@pytest.mark.parametrize("attack", ["mimic", "ipm", "sign-flip", "noise", "adaptive"])
def test_attackers_see_and_forge_plain_models(attack):
    more = {"attack": attack, "attack_share": 0.34, "cohort": 4}
    honest, attacked = (
        build(Compact(), **options).fit(1, quiet=True) for options in ({"cohort": 4}, more)
    )
    name = codes.packable(honest.federation.layers, honest.federation.initial)[0]
    assert attacked.records[0]["refused"] == {}
    models = [run.state.server["model"][name] for run in (honest, attacked)]
    assert not torch.equal(*models)
    with pytest.raises(UserError, match="cannot read what clients of compact receive"):
        build(Compact(download_bits=8), **more)


def test_engines_send_the_same():
    """Few bits magnify rounding: a sign may change where an update is nearly zero. What is sent and
    what stays make up the update, which is the same.
    """
    fed = {engine: build(Compact(), engine=engine) for engine in ("serial", "parallel", "batched")}
    rounds = {engine: round_of(f, f.initialize(1)) for engine, f in fed.items()}
    tasks, serial, ctx = rounds["serial"]
    for one, other in zip(serial, rounds["parallel"][1], strict=True):
        assert same(one.upload, other.upload) and same(one.client_state, other.client_state)
    for task, one, other in zip(tasks, serial, rounds["batched"][1], strict=True):
        whole = []
        for result in (one, other):
            model = Compact().decode(result.upload, task.payload, ctx)["model"]
            lost = result.client_state["residual"]
            whole.append({name: model[name] + lost[name] for name in lost})
        assert close(*whole, 1e-5)
        differ = one.upload["packed"]["values"] != other.upload["packed"]["values"]
        assert float(differ.float().mean()) < 0.01
    for each in fed.values():
        each.close()


def test_engines_end_alike():
    runs = [
        build(Compact(bits=4, download_bits=8), engine=engine).fit(2, quiet=True)
        for engine in ("serial", "parallel")
    ]
    assert same(runs[0].state.server, runs[1].state.server)
    assert timeless(runs[0].records) == timeless(runs[1].records)


def test_other_types_of_weights_keep_theirs():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10).double())
    fed = build(Compact(), model=lambda: _Double(network))
    run = fed.fit(1, quiet=True)
    assert run.records[0]["refused"] == {}
    assert {value.dtype for value in run.state.server["model"].values()} == {torch.float64}


class _Double(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x.double()).float()


def test_the_hook_is_fedavgs_for_everybody_else():
    packing = [name for name, kind in METHODS.items() if kind().overrides("decode")]
    # Helix holds a compact.
    assert sorted(packing) == ["compact", "fedrolex", "flexlora", "helix", "heterofl", "secure"]
    tree = {"model": {}}
    assert Method().decode(tree, {}, None) is tree
