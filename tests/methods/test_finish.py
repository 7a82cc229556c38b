"""A personal finish: what a client ends up with, by validation losses worked out by hand."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedhelix import Calibrated, Ditto, FedAvg, FedAvgFT, Finish, LocalOnly, Method, Wrapper
from fedhelix.engines.local import ClientTask, make_client, personal_model
from helpers import check_resumed, close, same, small, two_quadratics

NAMES = ("received", "tuned", "archive", "archive-tuned")


def client_of(fed, final=True, losses=None, round=0):
    client = make_client(fed.engine.setup, ClientTask(0, round, {}, {}, final=final))
    if losses is None:
        return client
    return replace(client, valid_losses=lambda state: torch.tensor(losses[state["is"]]))


def chosen(losses, final=True):
    """What is chosen among models with these losses on the validation samples."""
    fed = small(Finish())
    models = {name: {"is": name} for name in ("model", *losses)}
    return fed.method.choose(models, client_of(fed, final, losses))


@pytest.mark.parametrize(
    ("received", "name"),
    [
        # Gains 1, 1, 1, 1: mean 1, no error.
        ([1.0, 1, 1, 1], "received"),
        # Gains 2, 0, 2, 0: mean 1, deviation sqrt(4/3) = 1.155, error 1.155/2 = 0.577 < 1.
        ([0.0, 2, 0, 2], "received"),
        # Gains 2, -1, 1, -1: mean 0.25, deviation 1.5, error 0.75: not clear.
        ([0.0, 3, 1, 3], "tuned"),
        # Gains 4, 0, 0, 0: mean 1, deviation 2, error 1: exactly not.
        ([-2.0, 2, 2, 2], "tuned"),
        # No gain at all.
        ([2.0, 2, 2, 2], "tuned"),
        ([9.0, 9, 9, 9], "tuned"),
    ],
)
def test_the_tuned_model_unless_another_is_clearly_better(received, name):
    assert chosen({"tuned": [2.0, 2, 2, 2], "received": received}) == name


def test_the_clearest_of_several_is_chosen():
    # Mean gains of 1 and 1.25 less errors of 0 and 0.75: the surer one.
    losses = {"tuned": [2.0] * 4, "received": [1.0] * 4, "archive": [-1.0, 2, 0, 2]}
    assert chosen(losses) == "received"
    assert chosen({**losses, "archive-tuned": [0.5] * 4}) == "archive-tuned"


def test_losses_are_compared_sample_by_sample():
    """Samples are easy or hard for both models alike: what counts is the difference."""
    assert chosen({"tuned": [0.0, 100, 50], "received": [-0.1, 99.8, 49.9]}) == "received"


@pytest.mark.parametrize("losses", [[], [3.0]])
def test_without_validation_samples_it_is_the_tuned_one(losses):
    assert chosen({"tuned": losses, "received": [0.0] * len(losses)}) == "tuned"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_diverged_is_not_chosen(bad):
    good, diverged = [1.0, 1, 1], [1.0, bad, 1]
    assert chosen({"tuned": diverged, "received": good}) == "received"
    assert chosen({"tuned": good, "received": diverged}) == "tuned"
    losses = {"tuned": [2.0] * 3, "received": diverged, "archive": good}
    assert chosen(losses) == "archive"
    # Where all have diverged, it does not matter.
    assert chosen({"tuned": diverged, "received": diverged}) in ("tuned", "received")


def test_before_the_end_nothing_happens():
    fed = small(Finish(archive=0.5))
    assert chosen({"tuned": [2.0] * 3, "received": [1.0] * 3}, final=False) == "model"
    client = client_of(fed, final=False)
    assert list(fed.method.personalize(client)) == []
    assert fed.method.start({"model": fed.initial}, {}, client).keys() == {"model"}


def test_in_the_end_there_are_candidates_of_which_two_are_tuned():
    fed = small(Finish(archive=0.5, ft_rate=0.2, ft_epochs=3))
    client = client_of(fed)
    models = fed.method.start({"model": fed.initial}, {}, client)
    assert models.keys() == {"model", *NAMES}
    phases = fed.method.personalize(client)
    assert [(p.model, p.epochs, p.rate) for p in phases] == [
        ("tuned", 3, 0.2), ("archive-tuned", 3, 0.2)
    ]  # fmt: skip
    plain = small(Finish())
    assert plain.method.start({"model": fed.initial}, {}, client).keys() == {"model", *NAMES[:2]}
    assert [phase.model for phase in plain.method.personalize(client)] == ["tuned"]


def test_an_archive_by_hand_over_two_rounds():
    """Losses (w - 1)² and (w - 3)²: a step of 0.1 moves w by 0.2 (1 - w) and 0.2 (3 - w)."""
    fed = two_quadratics(Finish(archive=0.75), epochs=1)
    (_, first), (_, second) = fed.run_rounds(2)
    name = fed.layers.names[0]

    def archives(state):
        return [float(state.client_states[i]["archive"][name]) for i in (0, 1)]

    # From 0 the clients move by 0.2 and 0.6; the server's model is then 0.4.
    assert archives(first) == pytest.approx([0.2, 0.6])
    # From 0.4 they move by 0.12 and 0.52, of which a quarter counts.
    moves = [0.75 * 0.2 + 0.25 * 0.12, 0.75 * 0.6 + 0.25 * 0.52]
    assert archives(second) == pytest.approx(moves)
    # The server's model is then 0.4 + 0.32 = 0.72, and in the end the archive lies on top.
    client = client_of(fed, round=2)
    payload = fed.method.deliver(second.server, 1, fed.context(2, 2))
    models = fed.method.start(payload, second.client_states[1], client)
    assert float(models["received"][name]) == pytest.approx(0.72)
    assert float(models["archive"][name]) == pytest.approx(0.72 + moves[1])


def test_a_client_that_never_took_part_has_an_empty_archive():
    fed = small(Finish(archive=0.5))
    models = fed.method.start({"model": fed.initial}, {}, client_of(fed))
    assert same(models["archive"], models["received"])


def test_fine_tuning_by_hand():
    """Without validation samples: from w, a step of 0.1 · 0.5 along 2 (w - 1) or 2 (w - 3)."""
    run = two_quadratics(Finish(ft_rate=0.5, ft_epochs=1), epochs=1).fit(1, quiet=True)
    # The server has 0.4; the clients end at 0.4 + 0.1 · 0.6 and 0.4 + 0.1 · 2.6.
    weights = [next(run.personal(i).parameters()).item() for i in (0, 1)]
    assert weights == pytest.approx([0.46, 0.66])
    assert run.records[-1]["used"] == {"tuned": 2}


def test_zero_epochs_are_the_received_model():
    run = small(Finish(ft_epochs=0)).fit(1, quiet=True)
    assert same(run.personal(0).state_dict(), run.state.server["model"])


def test_only_after_the_last_round_and_recorded():
    runs = [small(method).fit(3, quiet=True) for method in (FedAvg(), Finish(archive=0.5))]
    plain, mine = (run.records for run in runs)
    assert [record["personal"] for record in plain[:2]] == [
        record["personal"] for record in mine[:2]
    ]
    assert plain[2]["personal"] != mine[2]["personal"]
    assert ["used" in record for record in mine] == [False, False, True]
    assert not any("used" in record for record in plain)
    assert sum(mine[2]["used"].values()) == 6 and set(mine[2]["used"]) <= set(NAMES)
    # What was received is noted beside it, and what is learnt together is the same.
    assert mine[2]["untuned"] == pytest.approx(plain[2]["personal"])
    assert same(runs[0].state.server, runs[1].state.server)


def test_what_is_recorded_is_what_clients_use():
    run = small(Finish(archive=0.5)).fit(2, quiet=True)
    fed = run.federation
    used = fed.engine.personal(fed.tasks(run.state, range(6), fed.context(2, 2)))
    names = [model.name for model in used]
    assert run.records[-1]["used"] == {name: names.count(name) for name in names}
    for client, model in enumerate(used):
        assert close(run.personal(client).state_dict(), model.state)


def test_a_resumed_run_is_the_straight_one(tmp_path):
    run = check_resumed(lambda: small(Finish(archive=0.5)), tmp_path, 3, after=1)
    assert "used" in run.records[-1]


@pytest.mark.parametrize("engine", ["parallel", "batched"])
def test_every_engine_agrees_in_the_end(engine):
    one, other = (
        small(Finish(Calibrated(), archive=0.5), engine=name, workers=2).fit(2, quiet=True)
        for name in ("serial", engine)
    )
    assert one.records[-1]["used"] == other.records[-1]["used"]
    assert one.records[-1]["personal"] == pytest.approx(other.records[-1]["personal"], abs=0.02)
    for client in range(6):
        mine, its = (run.personal(client).state_dict() for run in (one, other))
        assert close(mine, its, 1e-4)
    other.federation.close()


@pytest.mark.parametrize("inner", [FedAvgFT(), Ditto(), LocalOnly()], ids=lambda m: m.name)
def test_around_methods_with_models_of_their_own(inner):
    run = small(Finish(inner, archive=0.5)).fit(2, quiet=True)
    assert sum(run.records[-1]["used"].values()) == 6
    fed = run.federation
    task = fed.tasks(run.state, [0], fed.context(2, 2))[0]
    models = fed.method.start(task.payload, task.client_state, client_of(fed, round=2))
    assert models["received"] is models[inner.personal(models)]
    assert personal_model(fed.engine.setup, task).name in NAMES


def test_a_client_knows_its_classes_its_end_and_its_losses_one_by_one():
    fed = small(FedAvg())
    client = client_of(fed)
    kept = torch.from_numpy(fed.splits[0].valid)
    x, y = fed.data.prepare(fed.data.x[kept]), fed.data.y[kept]
    outputs = x.flatten(1) @ client.initial["fc.weight"].T + client.initial["fc.bias"]
    expected = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
    torch.testing.assert_close(client.valid_losses(client.initial), expected)
    assert client.classes == 10 and client.final and not client_of(fed, final=False).final
    # A regression has no classes, and here no validation samples either.
    other = client_of(two_quadratics(FedAvg()))
    assert other.classes is None and other.valid_losses(other.initial).shape == (0,)


@dataclass(frozen=True)
class Own(Wrapper):
    """A wrapper that says which model is used, but nothing about what is chosen in the end."""

    inner: Method

    def personal(self, models):
        return "mine"


def test_before_the_end_the_model_of_a_wrapper_inside_is_used():
    fed = small(FedAvg())
    models = {"model": {}, "mine": {}}
    client = client_of(fed, final=False)
    assert Finish(Own(FedAvg())).choose(models, client) == "mine"
    assert Own(FedAvg()).choose(models, client) == "mine"
