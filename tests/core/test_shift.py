"""A model may carry a shift of its outputs, whatever its network looks like."""

from functools import partial

import pytest
import torch
from torch import nn

from fedhelix import Calibrated, FedAvg
from fedhelix.core.layers import Layers
from fedhelix.core.shift import SHIFT, Shifted, all_shifted, load_shifted, shifted, without_shift
from fedhelix.engines.local import ClientTask, evaluate, evaluate_clients, predict
from fedhelix.engines.local.setup import PersonalModel
from helpers import small

X = torch.tensor([[1.0, 0], [0, 2]])
MOVE = torch.tensor([10.0, 0, -10])


def linear(bias: bool = True) -> nn.Linear:
    """Rows (1, 0), (0, 1), (1, 1), and biases 1, 2, 3."""
    network = nn.Linear(2, 3, bias=bias)
    network.weight.data = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    if bias:
        network.bias.data = torch.tensor([1.0, 2, 3])
    return network


class Halved(nn.Module):
    """A network that does something with what its head returns."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        return self.fc(x) / 2


def loaded(network, **more):
    state = {**network.state_dict(), **more}
    return load_shifted(network, state, Layers.of(network, X), X)


def test_a_shift_goes_into_the_bias_of_the_head():
    network = linear()
    module = loaded(network, **{SHIFT: MOVE})
    assert isinstance(module, nn.Linear) and not module.training
    assert module.bias.tolist() == [11, 2, -7]
    # (1, 0) gives 1 + 1, 0 + 2, 1 + 3, and (0, 2) gives 0 + 1, 2 + 2, 2 + 3.
    assert module(X).tolist() == [[12, 2, -6], [11, 4, -5]]
    assert network.bias.tolist() == [1, 2, 3]  # a copy was made


def test_a_head_without_bias_is_wrapped():
    module = loaded(linear(bias=False), **{SHIFT: MOVE})
    assert isinstance(module, Shifted) and not module.training
    assert module(X).tolist() == [[11, 0, -9], [10, 2, -8]]


def test_a_network_that_goes_on_after_its_head_is_wrapped():
    # In the bias the shift would be halved, too.
    module = loaded(Halved(), **{SHIFT: MOVE})
    assert isinstance(module, Shifted)
    assert module(X).tolist() == [[11, 1, -8], [10.5, 2, -7.5]]


def test_a_model_without_shift_is_loaded_as_it_is():
    module = loaded(Halved())
    assert isinstance(module, Halved) and module(X).tolist() == [[1, 1, 2], [0.5, 2, 2.5]]


def test_states_with_and_without():
    state = {"a": X, SHIFT: MOVE}
    assert without_shift(state).keys() == {"a"} == without_shift({"a": X}).keys()
    assert shifted(state, torch.ones(3)).tolist() == [11, 1, -9]
    assert shifted({"a": X}, torch.ones(3)).tolist() == [1, 1, 1]
    both = all_shifted([{"a": X}, state])
    assert [one[SHIFT].tolist() for one in both] == [[0, 0, 0], [10, 0, -10]]
    plain = [{"a": X}]
    assert all_shifted(plain) is plain


@pytest.mark.parametrize("model", ["linear", "digits-cnn", "no bias"])
def test_a_personal_model_returns_shifted_outputs(model):
    if model == "no bias":
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    run = small(Calibrated(), model).fit(1, quiet=True)
    fed, used = run.federation, run.state.server["model"]
    indices = torch.arange(20)
    for client in (0, 3):
        y = fed.data.y[fed.splits[client].train]
        counts = torch.bincount(y, minlength=10) + 1.0
        expected = predict(fed.engine.setup, used, "test", indices) + (counts / counts.sum()).log()
        found = run.personal(client)(fed.data.prepare(fed.data.x_test[:20]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_servers_model_has_none():
    run = small(Calibrated(), "linear").fit(1, quiet=True)
    expected = predict(
        run.federation.engine.setup, run.state.server["model"], "test", torch.arange(5)
    )
    x = run.federation.data.prepare(run.federation.data.x_test[:5])
    torch.testing.assert_close(run.model()(x), expected)


def test_clients_who_share_all_but_the_shift_share_one_pass(monkeypatch):
    """And their scores are those of each of them alone; one of them has no shift at all."""
    fed = small(FedAvg(), partition="dirichlet:0.3")
    setup, passes = fed.engine.setup, []
    strong = torch.linspace(-3, 3, 10)
    users = {
        i: PersonalModel(
            {**fed.initial, **({SHIFT: strong.roll(i)} if i else {})}, "tuned" if i else "model"
        )
        for i in range(6)
    }

    def outputs(subset, indices):
        passes.append((subset, len(indices)))
        return predict(setup, fed.initial, subset, indices)

    together = evaluate_clients(setup, users, outputs)
    assert [subset for subset, _ in passes] == ["test", "train"]
    for client, used in users.items():
        pieces = partial(predict, setup, without_shift(used.state))
        alone = evaluate_clients(setup, {client: used}, pieces)[client]
        assert together[client][:3] == pytest.approx(alone[:3], rel=1e-6)
        assert together[client].used == used.name
        # The metric in the plainest way.
        part = torch.from_numpy(fed.splits[client].test)
        right = predict(setup, used.state, "test", part).argmax(1) == fed.data.y_test[part]
        assert together[client].test == pytest.approx(float(right.float().mean()))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_round_of_evaluation_is_that_of_each_client(engine):
    fed = small(Calibrated(), engine=engine)
    state = fed.initialize(2)
    tasks = fed.tasks(state, range(6), fed.context(0, 2))
    together, _ = fed.engine.evaluate(tasks, fed.initial)
    for task, scores in zip(tasks, together, strict=True):
        assert scores[:3] == pytest.approx(evaluate(fed.engine.setup, task)[:3], rel=1e-4)


def test_the_server_evaluates_its_model_once_for_all_clients(monkeypatch):
    fed = small(Calibrated())
    seen = []
    outputs = fed.engine.outputs
    monkeypatch.setattr(
        fed.engine, "outputs", lambda *args: (seen.append(args[1:]), outputs(*args))[1]
    )
    state = fed.initialize(2)
    fed.engine.evaluate(fed.tasks(state, range(6), fed.context(0, 2)), state.server["model"])
    # The whole test set, which clients share, and their validation samples.
    assert [subset for subset, _ in seen] == ["test", "train"]


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_models_with_and_without_a_shift_are_scored_side_by_side(engine):
    fed = small(FedAvg(), engine=engine)
    certain = torch.zeros(10)
    certain[3] = 1e6  # always says three
    plain, sure = fed.engine.score([fed.initial, {**fed.initial, SHIFT: certain}], "test")
    threes = float((fed.data.y_test == 3).float().mean())
    assert sure[0] == pytest.approx(threes) and plain[0] != pytest.approx(threes)


def test_a_task_may_name_its_end():
    assert not ClientTask(0, 0, {}, {}).final


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_a_shift_into_its_bias_only_where_that_is_exact(dtype):
    """Next to 2, numbers of eight or eleven bits are 2^-6 or 2^-9 apart."""
    network = linear().to(dtype)
    state = network.state_dict()
    x = X.to(dtype)
    half = torch.tensor([0.5, 0, -0.5])
    module = load_shifted(network, {**state, SHIFT: half}, Layers.of(network, x), x)
    assert module.bias.tolist() == [1.5, 2, 2.5] and module.bias.dtype == dtype
    little = torch.tensor([0.0, 2**-11, 0])
    module = load_shifted(network, {**state, SHIFT: little}, Layers.of(network, x), x)
    assert isinstance(module, Shifted)
    assert module(x).tolist() == [[2, 2 + 2**-11, 4], [1, 4 + 2**-11, 5]]
