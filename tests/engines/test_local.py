import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedhelix import (
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedRep,
    Phase,
    Scaffold,
    from_arrays,
    from_clients,
    partition,
)
from fedhelix.core.errors import UserError
from fedhelix.core.tree import State, clone, take
from fedhelix.engines.local import (
    PERSONALIZE,
    ClientTask,
    batch_schedule,
    gather,
    make_client,
    personal_model,
    run_client,
)
from fedhelix.engines.local.batches import SMALLEST, batch_sizes
from helpers import close, same, small


def task_for(fed, client: int = 0, round: int = 0, client_state: dict | None = None) -> ClientTask:
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    return ClientTask(
        client,
        round,
        fed.method.download(server, client, fed.context(round, 1)),
        client_state or {},
    )


def batches(
    fed, task: ClientTask, phase: Phase, purpose: str = "batches", index: int = 0
) -> list[torch.Tensor]:
    return [
        samples
        for samples, *_ in batch_schedule(fed.engine.setup, task, phase, purpose, index).steps()
    ]


def by_hand(
    fed, task: ClientTask, parts: list[tuple[str, int]], purpose: str = "batches", rate: float = 1.0
) -> State:
    """A client's training as anybody would write it in plain PyTorch, on the same batches."""
    setup, options = fed.engine.setup, fed.training
    model = copy.deepcopy(setup.module).train()
    model.load_state_dict(
        {**fed.initial, **task.client_state.get("model", {}), **task.payload["model"]}
    )
    trained = {"all": fed.layers.names, "head": fed.layers.head, "body": fed.layers.body}
    for index, (part, epochs) in enumerate(parts):
        chosen = [value for name, value in model.named_parameters() if name in trained[part]]
        lr = rate * options.lr * options.lr_decay**task.round
        optimiser = torch.optim.SGD(chosen, lr, options.momentum, weight_decay=options.weight_decay)
        for samples in batches(fed, task, Phase(part, epochs), purpose, index):
            model.zero_grad()
            F.cross_entropy(
                model(fed.data.prepare(fed.data.x[samples])), fed.data.y[samples]
            ).backward()
            optimiser.step()
    return model.state_dict()


def test_what_the_network_does_not_use_has_no_gradient():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(64, 10), nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.used(x.flatten(1))

    fed = small(Scaffold(), Spare)
    (found, *_) = make_client(fed.engine.setup, task_for(fed)).gradients(fed.initial)
    assert not found["spare"].any() and found["used.weight"].any()


# Batches


def test_every_epoch_visits_every_sample_once():
    fed = small(batch_size=16)
    client_state = np.sort(fed.splits[2].train)
    found = batches(fed, task_for(fed, 2), Phase(epochs=3))
    per_epoch = -(-len(client_state) // 16)
    assert len(found) == 3 * per_epoch
    epochs = [torch.cat(found[at : at + per_epoch]) for at in range(0, len(found), per_epoch)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), client_state)
    assert not torch.equal(epochs[0], epochs[1])
    assert all(len(batch) == 16 for batch in found[: per_epoch - 1])


def test_batches_follow_from_seed_purpose_round_and_client():
    fed = small()
    first = torch.cat(batches(fed, task_for(fed), Phase()))
    assert torch.equal(first, torch.cat(batches(fed, task_for(fed), Phase())))
    for other in (
        batches(fed, task_for(fed, round=1), Phase()),
        batches(fed, task_for(fed), Phase(), "tune"),
        batches(fed, task_for(fed), Phase(), index=1),
    ):
        assert not torch.equal(first, torch.cat(other))
    other_seed = (
        small(partition=partition.iid(6), seed=1),
        small(partition=partition.iid(6), seed=2),
    )
    orders = [
        np.argsort(torch.cat(batches(some, task_for(some), Phase())).numpy()) for some in other_seed
    ]
    assert not np.array_equal(*orders)


def test_a_phase_may_set_its_own_epochs():
    fed = small(epochs=4)
    one, usual = (len(batches(fed, task_for(fed), phase)) for phase in (Phase(epochs=1), Phase()))
    assert usual == 4 * one
    assert batches(fed, task_for(fed), Phase(epochs=0)) == []


def with_one_left_over(model: str):
    data = from_arrays(
        torch.randn(9, 1, 8, 8), torch.arange(9) % 2, torch.randn(4, 1, 8, 8), torch.arange(4) % 2
    )
    return small(
        model=model, data=data, partition=partition.iid(1, valid=0), cohort=1, batch_size=4
    )


def test_batchnorm_never_sees_a_single_sample():
    sizes = {
        model: [len(samples) for samples in batches(fed, task_for(fed), Phase(epochs=2))]
        for model in ("digits-cnn", "digits-bn-cnn")
        for fed in [with_one_left_over(model)]
    }
    assert sizes == {"digits-cnn": [4, 4, 1, 4, 4, 1], "digits-bn-cnn": [4, 4, 4, 4]}
    with_one_left_over("digits-bn-cnn").fit(1, quiet=True)


def test_a_network_returns_one_tensor_in_training_too():
    class Two(nn.Linear):
        def forward(self, x):
            found = super().forward(x.flatten(1))
            return (found, found) if self.training else found

    with pytest.raises(
        UserError, match=r"the model must return one tensor, or an object .* not tuple"
    ):
        small(model=Two(64, 10)).fit(1, quiet=True)


def test_batches_of_one_sample_cannot_have_batchnorm():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(
        UserError, match="BatchNorm needs two samples in a minibatch; set batch_size to 2 or more"
    ):
        small(model=flat, batch_size=1)
    small(
        model="digits-bn-cnn", batch_size=1
    )  # whose BatchNorm also goes over the places of a picture


def test_a_client_with_one_sample_cannot_have_batchnorm():
    images = torch.randn(6, 1, 8, 8)
    parts = [(images[:1], torch.zeros(1, dtype=torch.long)), (images[1:], torch.arange(5) % 2)]
    data = from_clients(parts, test=(torch.randn(4, 1, 8, 8), torch.arange(4) % 2))
    with pytest.raises(
        UserError,
        match=r"1 client has only one training sample, but BatchNorm needs two \(0 has 1 for "
        r"training and 0 for validation\); leave such owners out: min_samples=2 of "
        r"partition.natural, on the command line natural:2, or use a network",
    ):
        small(model="digits-bn-cnn", data=data, partition=partition.natural(valid=0), cohort=2)


@pytest.mark.parametrize(
    ("split", "said", "ways"),
    [
        (
            "natural",
            r"2 clients have .* \('b' has 1 for training and 1 for validation; 'd' has 1 for",
            [partition.natural(min_samples=3), "natural:3", partition.natural(valid=0)],
        ),
        ("iid", "12 clients have .* validation, ...\\); take fewer clients,", [partition.iid(4)]),
    ],
)
def test_ways_out_for_clients_too_small_for_batchnorm_work(split, said, ways):
    x, y = torch.randn(24, 1, 8, 8), torch.arange(24) % 2
    owners = np.repeat([*"abcd"], [12, 2, 8, 2]) if split == "natural" else None
    data = from_arrays(x, y, x, y, owners=owners)
    same = {"data": data, "model": "digits-bn-cnn", "cohort": 2}
    with pytest.raises(UserError, match=said) as problem:
        small(partition=split, **same, **({} if owners is not None else {"clients": 12}))
    sentence = str(problem.value)
    assert "valid=0 of the partition" in sentence and "use a network without" in sentence
    assert ("min_samples=3 of" in sentence) == (owners is not None)
    for way in ways:
        small(
            partition=way, **same, **({"clients": None} if owners is not None else {"clients": 4})
        )


def test_augmentation_moves_the_images_and_nothing_else():
    plain, moved = small(model="mlp"), small(model="mlp", augment=True)
    setup = moved.engine.setup
    steps = batch_schedule(setup, task_for(moved), Phase(), "batches").steps()
    samples, crops, _ = next(iter(steps))
    unmoved = batch_schedule(plain.engine.setup, task_for(plain), Phase(), "batches")
    assert crops is not None and unmoved.draws is None
    batch, untouched = gather(setup, samples, crops), gather(setup, samples, None)
    assert torch.equal(batch.y, untouched.y) and batch.x.shape == untouched.x.shape
    assert not torch.equal(batch.x, untouched.x)


# A client's round


@pytest.mark.parametrize(
    ("method", "model", "parts"),
    [
        (FedAvg(), "digits-cnn", [("all", 2)]),
        (FedAvg(), "digits-bn-cnn", [("all", 2)]),
        (FedRep(head_epochs=2), "digits-cnn", [("head", 2), ("body", 1)]),
        (FedBABU(), "digits-cnn", [("body", 2)]),
    ],
    ids=["fedavg", "fedavg-bn", "fedrep", "fedbabu"],
)
def test_a_round_is_a_plain_pytorch_loop(method, model, parts):
    fed = small(
        method,
        model,
        epochs=2,
        lr=0.05,
        lr_decay=0.5,
        momentum=0.9,
        weight_decay=1e-3,
        batch_size=32,
    )
    task = task_for(fed, client=1, round=2)
    result = run_client(fed.engine.setup, task)
    ours = {**result.client_state.get("model", {}), **result.upload["model"]}
    assert close({name: ours[name] for name in fed.layers.names}, by_hand(fed, task, parts))
    assert result.samples == len(fed.splits[1].train)


def test_the_loss_of_a_round_is_the_mean_over_its_steps():
    fed = small(lr=1e-12)
    task = task_for(fed)
    model = fed.engine.setup.module
    losses = [
        F.cross_entropy(model(fed.data.prepare(fed.data.x[samples])), fed.data.y[samples]).item()
        for samples in batches(fed, task, Phase())
    ]
    assert run_client(fed.engine.setup, task).loss == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("phase", "frozen"), [(Phase("head", 1), "body"), (Phase("body", 1), "head")]
)
def test_a_phase_changes_its_part_only(phase, frozen):
    class OnePart(FedAvg):
        def phases(self, client):
            return (phase,)

    fed = small(OnePart(), "digits-cnn")
    trained = run_client(fed.engine.setup, task_for(fed)).upload["model"]
    still = set(getattr(fed.layers, frozen))
    for name in fed.layers.names:
        assert torch.equal(trained[name], fed.initial[name]) == (name in still), name


def test_work_changes_nothing_that_it_was_given():
    fed = small(model="digits-bn-cnn")
    task = task_for(fed)
    before, module = clone(task.payload["model"]), clone(fed.engine.setup.module.state_dict())
    run_client(fed.engine.setup, task)
    personal_model(fed.engine.setup, task)
    assert same(task.payload["model"], before) and same(
        fed.engine.setup.module.state_dict(), module
    )
    assert not any(value.requires_grad for value in task.payload["model"].values())


def test_a_frozen_parameter_of_the_users_model_stays_frozen():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    model[1].weight.requires_grad_(False)
    fed = small(model=model)
    trained = run_client(fed.engine.setup, task_for(fed)).upload["model"]
    assert "1.weight" not in trained
    assert torch.equal(fed.engine.setup.module[1].weight, model[1].weight)
    assert not torch.equal(trained["3.weight"], model[3].weight)


# What a client knows


def test_a_client_sees_its_own_samples_and_this_rounds_rate():
    fed = small(lr=0.4, lr_decay=0.5)
    client = make_client(fed.engine.setup, task_for(fed, client=3, round=2))
    indices = fed.splits[3].train
    assert torch.equal(client.inputs(), fed.data.prepare(fed.data.x[indices]))
    assert torch.equal(client.targets(), fed.data.y[indices])
    assert (client.samples, client.lr) == (len(indices), 0.1)


def test_gradients_are_those_of_the_loss():
    fed = small(batch_size=10_000)
    client = make_client(fed.engine.setup, task_for(fed))
    (gradients,) = client.gradients(fed.initial)
    model = copy.deepcopy(fed.engine.setup.module)
    F.cross_entropy(model(client.inputs()), client.targets()).backward()
    assert close(gradients, {name: value.grad for name, value in model.named_parameters()}, 1e-5)
    (head,) = client.gradients(fed.initial, fed.layers.head)
    assert head.keys() == set(fed.layers.head) and close(head, take(gradients, head), 1e-6)


# Models in use


def test_personalization_is_training_for_use_only():
    fed = small(FedAvgFT(ft_epochs=2), "digits-cnn")
    task = task_for(fed, client=4)
    personal = personal_model(fed.engine.setup, task).state
    assert close(personal, by_hand(fed, task, [("all", 2)], PERSONALIZE))
    assert not same(personal, fed.initial)


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("kind", [FedAvgFT, FedBABU])
def test_personalization_may_take_smaller_steps(kind, engine):
    fed = small(kind(ft_epochs=1, ft_rate=0.25), "digits-cnn", engine=engine)
    task = task_for(fed, client=4)
    personal = fed.engine.personal([task])[0].state
    assert close(personal, by_hand(fed, task, [("all", 1)], PERSONALIZE, rate=0.25), 1e-5)
    assert not close(personal, by_hand(fed, task, [("all", 1)], PERSONALIZE), 1e-4)


@pytest.mark.parametrize("kind", [FedAvgFT, FedBABU])
def test_personalization_never_changes_what_is_sent_or_kept(kind):
    rounds = [small(kind(ft_epochs=epochs), "mlp").fit(2, quiet=True) for epochs in (0, 2)]
    assert same(*(run.state.server for run in rounds))
    assert rounds[0].state.client_states.keys() == rounds[1].state.client_states.keys()
    assert all(
        same(rounds[0].state.client_states[i], rounds[1].state.client_states[i])
        for i in rounds[0].state.client_states
    )
    assert rounds[0].records[-1]["personal"] != rounds[1].records[-1]["personal"]


def with_clients_of(*counts: int, engine: str = "serial"):
    parts = [(torch.randn(count, 1, 8, 8), torch.arange(count) % 2) for count in counts]
    data = from_clients(parts, test=(torch.randn(4, 1, 8, 8), torch.arange(4) % 2))
    natural, kind = partition.natural(valid=0), "digits-bn-cnn"
    return small(
        model=kind, data=data, partition=natural, cohort=len(counts), batch_size=16, engine=engine
    )


def test_batches_under_eight_samples_do_not_spoil_batchnorm():
    assert batch_sizes(450, 64, norm=True) == [64] * 7  # GENE-FL's clients: two are left over
    assert batch_sizes(450, 64, norm=False) == [64] * 7 + [2]
    assert batch_sizes(7 * 64 + 8, 64, norm=True) == [64] * 7 + [8]
    assert batch_sizes(5, 64, norm=True) == [5]  # all that the client has
    assert batch_sizes(9, 4, norm=True) == [4, 4]
    torch.manual_seed(0)
    fed = with_clients_of(5, 18)
    sizes = [
        [len(samples) for samples in batches(fed, task_for(fed, client), Phase(epochs=2))]
        for client in (0, 1)
    ]
    assert sizes == [[5, 5], [16, 16]]


@given(st.integers(2, 600), st.integers(2, 70))
def test_an_epoch_leaves_out_seven_samples_at_most(count, size):
    sizes = batch_sizes(count, size, norm=True)
    assert 0 <= count - sum(sizes) < SMALLEST and max(sizes) <= size
    assert all(one >= min(SMALLEST, size) for one in sizes) or sizes == [count]


@pytest.mark.parametrize("engine", ["parallel", "batched"])
def test_engines_leave_out_the_same_small_batches(engine):
    models = []
    for name in ("serial", engine):
        torch.manual_seed(0)
        fed = with_clients_of(5, 18, 33, engine=name)
        models.append(fed.fit(2, quiet=True).state.server["model"])
        fed.close()
    assert close(*models, tolerance=1e-4)


@dataclass(frozen=True)
class Taught(FedAvg):
    """FedAvg with a teacher of strength zero."""

    strength: object = 0.0

    def loss_context(self, payload, client_state, client):
        return {"teacher": payload["model"], "strength": self.strength}

    def loss(self, params, batch, local):
        penalty = local.outputs(local.context["teacher"], batch.x).sum()
        return local.base_loss(params, batch) + local.context["strength"] * penalty


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_teacher_in_the_loss_context_leaves_no_trace(engine):
    models = [
        small(method, model="digits-bn-cnn", engine=engine).fit(1, quiet=True).state.server["model"]
        for method in (FedAvg(), Taught(strength=torch.tensor(0.0)))
    ]
    assert same(*models) if engine == "serial" else close(*models, tolerance=1e-5)


def test_a_loss_context_holds_tensors():
    with pytest.raises(
        UserError, match="loss_context must return tensors alone; 'strength' is a float"
    ):
        small(Taught(), model="linear").fit(1, quiet=True)


class Forgetful(FedAvg):
    """Returns no client state from `upload`."""

    def upload(self, local):
        return {"model": local.models["model"]}


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_upload_is_what_is_sent_and_what_is_kept(engine):
    with pytest.raises(
        UserError, match="upload must return two trees, what is sent and what is kept, not a dict"
    ):
        small(Forgetful(), model="linear", engine=engine).fit(1, quiet=True)
