"""Hooks whose answers do not fit are told by their names, before anything stumbles over what they
returned.
"""

import json
import math
import re

import numpy as np
import pytest
import torch

from fedhelix import FedAvg, GenFed, Phase, load
from fedhelix.core.errors import UserError
from helpers import small

DIGITS = load("digits").subsample(60, 30)
NONE = "a dict of named tensors and numbers, not None"


def run(hook: str, answer, **more):
    """A round of a method that answers with what one of its hooks would have said, changed."""

    def changed(self, *args):
        return answer(getattr(FedAvg, hook)(self, *args))

    method = type("Mine", (FedAvg,), {hook: changed, "name": "mine"})()
    return small(method, data=DIGITS, **more).fit(1, quiet=True)


@pytest.mark.parametrize(
    ("hook", "answer", "sentence"),
    [
        (
            "shared_params",
            lambda _: ["fc.weigth"],
            "unknown entry in mine.shared_params 'fc.weigth'; did you mean 'fc.weight'",
        ),
        (
            "server_init",
            lambda found: found[0],
            "mine.server_init must return two things, its first state and a dict of replies",
        ),
        (
            "server_init",
            lambda found: ({"parts": {0: {}}}, {}),
            "mine.server_init has the name 0 in 'parts'; names are text",
        ),
        (
            "server_init",
            lambda found: ({"a/b": 1}, {}),
            "mine.server_init has the name 'a/b'; names are text without a '/'",
        ),
        (
            "server_init",
            lambda found: ({"past": [torch.ones(1)]}, {}),
            "mine.server_init has a list as 'past'; only tensors",
        ),
        *(
            (
                hook,
                answer,
                f"mine.{hook} must return as 'model' a dict of tensors, not",
            )
            for hook, answer in (
                ("server_init", lambda found: ({"model": 3}, {})),
                ("download", lambda found: {"model": 3}),
                ("aggregate", lambda found: {**found, "model": None}),
            )
        ),
        (
            "upload",
            lambda found: (found[0], {"past": [1, 2]}),
            "mine.upload has a list as 'past'; only tensors",
        ),
        (
            "server_init",
            lambda found: (found[0], {0: None}),
            f"mine.server_init must return {NONE}",
        ),
        (
            "select_clients",
            lambda _: [1, 99],
            "mine.select_clients must return clients that are present, each once; client 99 is",
        ),
        ("candidates", lambda _: [99], "mine.candidates must return clients that are present"),
        ("select_clients", lambda _: [1, 1], r"each once; \[1, 1\] are not"),
        *(
            (
                "select_clients",
                lambda _, answer=answer: answer,
                rf"mine.select_clients must return a list of clients, {sentence}",
            )
            for answer, sentence in (
                (None, "not None"),
                (torch.tensor(1), r"not a Tensor of shape \(\)"),
                (torch.tensor([[1, 0]]), r"not a Tensor of shape \(1, 2\)"),
                ("012", "not a str"),
                (torch.tensor([True, False]), "which are whole numbers, but has True in it"),
                ([0, 1.5], r"which are whole numbers, but has 1\.5 in it"),
                ([[0], [1]], r"which are whole numbers, but has \[0\] in it"),
            )
        ),
        ("download", lambda _: None, f"mine.download must return {NONE}"),
        ("start", lambda found: found["model"], "mine.start must return models by their names"),
        (
            "start",
            lambda found: {"net": found["model"]},
            "mine.start must return models by their names, one of which is 'model'; .* 'net'",
        ),
        ("loss_context", lambda _: None, f"mine.loss_context must return {NONE}"),
        (
            "loss_context",
            lambda _: {"body": {}},
            "mine.loss_context returns an empty part 'body', perhaps of a network without such",
        ),
        ("phases", lambda _: Phase(), "mine.phases must return a tuple of phases, .*not a Phase"),
        (
            "phases",
            lambda _: (Phase("norm"),),
            "a phase trains one of the parts all, head, body, not 'norm'",
        ),
        (
            "phases",
            lambda _: (Phase(model="teacher"),),
            "unknown model in mine.phases 'teacher'; there are: model",
        ),
        (
            "loss",
            lambda found: found.expand(3),
            r"mine.loss must return .*one number .*, not a Tensor of shape \(3,\)",
        ),
        (
            "loss",
            lambda _: 1.0,
            "mine.loss must return a tensor with one number for the batch, not a float",
        ),
        (
            "upload",
            lambda found: (found[0], None),
            "mine.upload must return as what is kept a dict .*, not None",
        ),
        (
            "upload",
            lambda _: ({"model": torch.zeros(3)}, {}),
            "mine.upload must return as 'model' a dict of tensors",
        ),
        (
            "upload",
            lambda _: ({"model": {"fc.bias": np.ones(1)}}, {}),
            "has a ndarray as 'model/fc.bias'; only tensors",
        ),
        ("weights", lambda _: 1.0, "mine.weights must return a list of numbers, not a float"),
        *(
            ("weights", answer, f"mine.weights must return a list of numbers, not a {kind}")
            for answer, kind in (
                (lambda found: dict(enumerate(found)), "dict"),
                (lambda found: set(range(len(found))), "set"),
                (lambda found: dict.fromkeys(range(len(found))).keys(), "dict_keys"),
                (lambda found: bytes(len(found)), "bytes"),
            )
        ),
        (
            "weights",
            lambda _: ["much"] * 3,
            "mine.weights must return a list of numbers, not a list",
        ),
        ("weights", lambda found: found[1:], "mine.weights must return 3 finite weights"),
        (
            "weights",
            lambda found: [math.nan] * 3,
            r"mine.weights must return 3 finite .*, not \[nan, nan, nan\]",
        ),
        (
            "weights",
            lambda found: [-weight for weight in found],
            "mine.weights must return 3 finite weights of at least 0",
        ),
        ("aggregate", lambda _: None, f"mine.aggregate must return {NONE}"),
        (
            "aggregate",
            lambda found: found["model"],
            r"mine.aggregate must return the next server state, such as .*, but it lacks 'model'",
        ),
        (
            "aggregate",
            lambda found: {**found, **found["model"]},
            "mine.aggregate has the model's entries beside 'model', not in it; return",
        ),
        (
            "aggregate",
            lambda found: {**found, "n": {1, 2}},
            "mine.aggregate has a set as 'n'; only tensors",
        ),
        ("model", lambda _: 3, "mine.model must return a dict of tensors .*, or None, not a int"),
        (
            "model",
            lambda found: {"fc.weight": found["fc.weight"]},
            "mine.model must return a whole model; it lacks 'fc.bias'",
        ),
        ("check", lambda _: True, "mine.check must return nothing, not a bool"),
        ("personal", lambda _: "mine", "unknown model in mine.personal 'mine'; there are: model"),
        ("personalize", lambda _: Phase(), "mine.personalize must return a tuple of phases"),
    ],
)
def test_a_wrong_answer_is_told_by_its_hook(hook, answer, sentence):
    with pytest.raises(UserError, match=sentence):
        run(hook, answer)


@pytest.mark.parametrize("hook", ["phases", "personalize"])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"epochs": -1},
            r"epochs of a phase is a whole number of at least 0, or None .*, not -1\.",
        ),
        ({"epochs": 1.5}, r"epochs of a phase is a whole number of at least 0, .*, not 1\.5\."),
        ({"epochs": "2"}, "epochs of a phase is a whole number of at least 0, .*, not '2'"),
        ({"rate": math.nan}, r"rate of a phase is a number, a factor .*, not nan\."),
        (
            {"extra": "fc.bias"},
            "extra of a phase is a tuple of names of entries, .*, not 'fc.bias'",
        ),
        ({"frozen": (1,)}, r"frozen of a phase is a tuple of names of entries, .*, not \(1,\)"),
    ],
)
def test_a_wrong_phase_is_told_before_the_first_round(hook, wrong, sentence):
    method = type("Mine", (FedAvg,), {hook: lambda *_: (Phase(**wrong),), "name": "mine"})()
    with pytest.raises(UserError, match=f"^{sentence}"):
        small(method, data=DIGITS)


@pytest.mark.parametrize("hook", ["phases", "personalize"])
def test_phases_of_what_is_not_there_are_told_by_their_hook(hook):
    for wrong, sentence in (
        ({"model": "teacher"}, f"unknown model in mine.{hook} 'teacher'; there are: model"),
        ({"extra": ("nix",)}, f"unknown entry in mine.{hook} 'nix'; there are: fc.bias, fc.weight"),
        ({"frozen": ("fc.bais",)}, f"unknown entry in mine.{hook} 'fc.bais'; did you mean 'fc.bia"),
    ):
        with pytest.raises(UserError, match=f"^{sentence}"):
            run(hook, lambda _, wrong=wrong: (Phase(**wrong),))


def test_a_phase_takes_numbers_of_numpy_and_trains_no_entry_twice():
    for engine in ("serial", "batched"):
        run("phases", lambda _: (Phase(epochs=np.int64(1), extra=("fc.bias",)),), engine=engine)


def test_a_hook_of_phases_that_fails_is_named_when_it_is_due():
    method = type("Mine", (FedAvg,), {"phases": lambda *_: 1 / 0, "name": "mine"})()
    fed = small(method, data=DIGITS)
    with pytest.raises(ZeroDivisionError):
        fed.fit(1, quiet=True)


BARE = "it has the entry 'fc.weight' of the network outside of 'model', from where nothing takes"


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(
    ("hook", "answer", "right"),
    [
        ("upload", lambda found: (found[0]["model"], found[1]), "({'model': {...}}, client_state)"),
        ("server_init", lambda found: (found[0]["model"], {}), "({'model': {...}}, replies)"),
        ("download", lambda found: found["model"], "{'model': {...}}"),
        ("deliver", lambda found: found["model"], "{'model': {...}}"),
        ("decode", lambda found: found["model"], "{'model': {...}}"),
    ],
)
def test_entries_of_the_network_belong_into_model(hook, answer, right, engine):
    with pytest.raises(UserError, match=re.escape(f"mine.{hook} must return {right}: {BARE}")):
        run(hook, answer, engine=engine)


def test_what_a_client_changes_in_its_payload_no_other_client_sees():
    class Greedy(FedAvg):
        def start(self, payload, client_state, client):
            models = super().start(payload, client_state, client)
            payload["model"].clear()
            return models

    changed, usual = (
        small(method, engine="serial").fit(2, quiet=True) for method in (Greedy(), "fedavg")
    )
    assert [one["accuracy"] for one in changed.records] == [
        one["accuracy"] for one in usual.records
    ]


def test_what_other_hooks_take_may_have_any_name():
    class Bare(FedAvg):
        def upload(self, local):
            return super().upload(local)[0]["model"], local.client_state

        def aggregate(self, server, uploads, weights, ctx):
            sent = [upload._replace(tree={"model": upload.tree}) for upload in uploads]
            return super().aggregate(server, sent, weights, ctx)

        def download(self, server, client, ctx):
            return server["model"]

        def start(self, payload, client_state, client):
            return {"model": dict(payload)}

    plain, bare = (
        small(method, data=DIGITS).fit(2, quiet=True).state.server["model"]["fc.weight"]
        for method in (FedAvg(), Bare())
    )
    assert torch.equal(plain, bare)


@pytest.mark.parametrize("sent", [{}, {"weights": {"fc.weight": torch.ones(1)}}])
def test_uploads_without_a_model_are_told_in_the_first_round(sent):
    right = re.escape("must return ({'model': {...}}, client_state), but no client sends a 'model'")
    with pytest.raises(UserError, match=f"^mine.upload {right} in the first round"):
        run("upload", lambda found: (sent, found[1]), cohort=6)


def test_clients_may_be_silent_where_others_are_not_or_own_hooks_read_what_is_sent():
    class Silent(FedAvg):
        def upload(self, local):
            return ({}, {}) if local.client.id else super().upload(local)

    class Counted(FedAvg):
        def upload(self, local):
            return {"n": torch.ones(1)}, {}

        def weights(self, server, uploads, ctx):
            return [float(upload.tree["n"]) for upload in uploads]

    for method in (Silent(), Counted()):
        assert small(method, data=DIGITS).fit(1, quiet=True).records


@pytest.mark.parametrize("sent", [{}, {"weights": {"fc.weight": torch.ones(1)}}])
def test_downloads_without_a_model_are_told_when_clients_come_back(sent):
    class Empty(FedAvg):
        def download(self, server, client, ctx):
            return sent

    class Kept(Empty):
        def upload(self, local):
            upload, _ = super().upload(local)
            return upload, {"model": upload["model"]}

    small(Empty(), data=DIGITS).fit(1, quiet=True)  # nobody has come back
    assert len(small(Kept(), data=DIGITS).fit(3, quiet=True).records) == 3
    right = re.escape("Empty.download must return {'model': {...}}, unless there is a `start`")
    with pytest.raises(UserError, match=rf"^{right} .* begin at the initial weights again\.$"):
        small(Empty(), data=DIGITS).fit(3, quiet=True)


def test_aggregate_keeps_every_entry_of_the_model():
    def half(found):
        return {**found, "model": {"fc.bias": found["model"]["fc.bias"]}}

    sentence = re.escape("every entry that the model has had, such as {**server, 'model': {**ser")
    with pytest.raises(UserError, match=f"^mine.aggregate must return {sentence}.*'fc.weight'"):
        run("aggregate", half)

    class Own(FedAvg):
        def aggregate(self, server, uploads, weights, ctx):
            return half(super().aggregate(server, uploads, weights, ctx))

        def download(self, server, client, ctx):
            return {"model": {**ctx.initial, **server["model"]}}

    assert small(Own(), data=DIGITS).fit(1, quiet=True).records


@pytest.mark.parametrize(
    ("hook", "answer", "sentence"),
    [
        ("onboard_client", lambda _: None, f"mine.onboard_client must return {NONE}"),
        ("onboard_server", lambda found: found[:2], "mine.onboard_server must return three things"),
        ("onboard_state", lambda _: [], "mine.onboard_state must return a dict .* not a list"),
    ],
)
def test_so_is_one_to_a_newcomer(hook, answer, sentence):
    with pytest.raises(UserError, match=sentence):
        run(hook, answer).onboard((DIGITS.x[:20], DIGITS.y[:20]))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_loss_without_a_gradient_is_told(engine):
    with pytest.raises(UserError, match=r"^mine\.loss has no gradient with respect to the model;"):
        run("loss", lambda found: found.detach(), engine=engine)


def test_the_stacked_engine_looks_at_answers_too():
    for hook, answer in (("loss", lambda found: found.expand(3)), ("phases", lambda _: Phase())):
        with pytest.raises(UserError, match=f"mine.{hook} must return"):
            run(hook, answer, engine="batched")


@pytest.mark.parametrize("hook", ["download", "deliver"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_entries_that_the_network_lacks_are_refused_where_they_are_sent(hook, engine):
    few = "which the network lacks; there are: fc.weight, fc.bias"
    with pytest.raises(UserError, match=rf"^mine\.{hook} has the entry 'nix', {few}\.$"):
        run(hook, lambda _: {"model": {"nix": torch.ones(3)}}, engine=engine)
    with pytest.raises(UserError, match=r"entry 'fc\.wieght', .*did you mean 'fc\.weight'\?$"):
        run(hook, lambda found: {"model": {"fc.wieght": found["model"]["fc.weight"]}})
    sent = run(hook, lambda found: {"model": {"fc.bias": found["model"]["fc.bias"]}}, engine=engine)
    assert sent.records  # a part of the network, as methods with own heads send it


def test_of_many_entries_a_few_are_named():
    with pytest.raises(
        UserError, match=r"which the network lacks; there are: conv1\.weight, .* and 4 more"
    ):
        run("download", lambda _: {"model": {"nix": torch.ones(3)}}, model="digits-cnn")


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_so_are_entries_of_another_shape_and_what_start_adds(engine):
    with pytest.raises(UserError, match=r"^mine\.download has shape \(3,\) for 'fc\.bias' instead"):
        run("download", lambda _: {"model": {"fc.bias": torch.ones(3)}}, engine=engine)
    with pytest.raises(UserError, match=r"^mine\.start has the entry 'nix', which the network lac"):
        run("start", lambda found: {"model": found["model"] | {"nix": torch.ones(3)}})
    run("start", lambda found: {"model": found["model"] | {"(own)": torch.ones(3)}}, engine=engine)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_start_returns_whole_models(engine):
    with pytest.raises(
        UserError, match=r"^mine\.start lacks the entry 'fc\.weight' in 'model'; ret"
    ):
        run("start", lambda _: {"model": {}}, engine=engine)
    part = {"fc.weight": torch.zeros(10, 64)}
    with pytest.raises(
        UserError, match=r"^mine\.start lacks the entry 'fc\.bias' in 'model'; retur"
    ):
        run("start", lambda _: {"model": part}, engine=engine)

    class Mine(FedAvg):
        name = "mine"

        def start(self, payload, client_state, client):
            return {**super().start(payload, client_state, client), "own": part}

    run("start", lambda found: {**found, "own": part}, engine=engine)  # which nobody trains or uses
    for hook, answer in (("personal", "own"), ("phases", (Phase(model="own"),))):
        method = type("Mine", (Mine,), {hook: lambda *_, answer=answer: answer, "name": "mine"})()
        with pytest.raises(UserError, match=r"^mine\.start lacks the entry 'fc\.bias' in 'own'"):
            small(method, data=DIGITS, engine=engine).fit(1, quiet=True)


def cast(tree, kind):
    return {**tree, "model": {name: value.to(kind) for name, value in tree["model"].items()}}


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.int64])
def test_models_of_another_type_are_told_by_the_hook_that_made_them(kind, engine):
    sentence = rf"has {str(kind)[6:]} for 'fc\.weight' instead of float32\.$"
    for hook in ("download", "deliver", "start"):
        with pytest.raises(UserError, match=rf"^mine\.{hook} {sentence}"):
            run(hook, lambda found: cast(found, kind), engine=engine)
    with pytest.raises(UserError, match=rf"^mine\.upload {sentence}"):
        run("upload", lambda found: (cast(found[0], kind), found[1]), engine=engine)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_what_the_server_keeps_is_told_by_the_hook_that_made_it(engine):
    def with_model(found, change):
        model = change(found["model"] if isinstance(found, dict) else found[0]["model"])
        return {"model": model} if isinstance(found, dict) else ({"model": model}, {})

    for change, sentence in (
        (lambda model: {**model, "zz": torch.ones(2)}, "has the entry 'zz', which the network la"),
        (
            lambda model: {**model, "fc.bias": torch.ones(2)},
            r"has shape \(2,\) for 'fc\.bias' inst",
        ),
        (lambda model: cast({"model": model}, torch.half)["model"], "has float16 for 'fc.weight'"),
    ):
        for hook in ("server_init", "aggregate"):
            with pytest.raises(UserError, match=rf"^mine\.{hook} {sentence}"):
                run(hook, lambda found, change=change: with_model(found, change), engine=engine)


def test_counters_may_be_of_any_type_and_methods_may_unpack_what_they_pack():
    def floats(tree):
        return {**tree, "model": {name: value.float() for name, value in tree["model"].items()}}

    assert run("aggregate", floats, model="digits-bn-cnn").records

    class Halves(FedAvg):
        def upload(self, local):
            sent, kept = super().upload(local)
            return cast(sent, torch.float16), kept

        def decode(self, upload, payload, ctx):
            return cast(upload, torch.float32)

    assert small(Halves(), data=DIGITS).fit(1, quiet=True).records


def test_weights_may_be_a_tensor():
    listed, tensor = (
        run("weights", kind).state.server["model"]["fc.weight"] for kind in (list, torch.tensor)
    )
    assert torch.allclose(listed, tensor)


def test_tensors_are_noted_as_lists_and_what_cannot_be_written_is_refused():
    def noting(value):
        class Mine(FedAvg):
            def aggregate(self, server, uploads, weights, ctx):
                ctx.metadata["seen"] = {"now": value}
                return super().aggregate(server, uploads, weights, ctx)

        return (
            small(GenFed(Mine()), data=DIGITS, validation_size=10)
            .fit(1, quiet=True)
            .records[0]["metadata"]["seen"]
        )

    assert noting(torch.arange(3)) == {"now": [0, 1, 2]}
    assert noting((np.float32(0.5), None, "x")) == {"now": [0.5, None, "x"]}
    with pytest.raises(
        UserError, match="genfed\\+Mine records a set as 'seen'; record numbers or text"
    ):
        noting({1, 2})


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("aggregate", lambda found: {**found, "n": np.float32(3), "deep": {"m": np.int64(1)}}),
        ("select_clients", lambda found: {np.int64(client) for client in found}),
        ("select_clients", np.array),
        ("select_clients", torch.tensor),
        ("select_clients", lambda found: list(torch.tensor(found))),
        ("weights", lambda found: dict(enumerate(found)).values()),
        ("phases", lambda found: (phase for phase in found)),
    ],
)
def test_answers_that_mean_the_same_are_taken(hook, answer):
    done = run(hook, answer)
    json.dumps(done.records)
    assert hook != "aggregate" or done.state.server["deep"]["m"] == 1


def test_traffic_that_is_noted_is_counted():
    def noting(value):
        class Mine(FedAvg):
            name = "mine"

            def select_clients(self, server, cohort, ctx):
                ctx.metadata["other_bytes"] = value
                return cohort

        return small(Mine(), data=DIGITS).fit(1, quiet=True).records[0]["other_bytes"]

    assert noting(torch.tensor(5.0)) == 5
    with pytest.raises(
        UserError, match="mine records 'much' as 'other_bytes', which is a number of bytes"
    ):
        noting("much")
