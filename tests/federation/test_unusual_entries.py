"""Tensors that nobody can average or write: each has its sentence, in networks and in payloads."""

import pytest
import torch
from torch import nn

from fedhelix import FedAvg, UserError
from fedhelix.core.copies import copied
from helpers import small

UNUSUAL = {
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


class Net(nn.Module):
    """A network with one more entry."""

    def __init__(self, extra, persistent=True, trained=False):
        super().__init__()
        self.head = nn.Linear(64, 10)
        if trained:
            self.extra = nn.Parameter(extra)
        else:
            self.register_buffer("extra", extra, persistent=persistent)

    def forward(self, x):
        weights = self.extra.to_dense() if self.extra.layout != torch.strided else self.extra
        return self.head(x.flatten(1)) + weights.abs().sum()


class Sends(FedAvg):
    """It sends, keeps, or looks at one tensor more."""

    def __init__(self, where, extra):
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "extra", extra)

    def upload(self, local):
        sent, kept = super().upload(local)
        more = {"deep": {"extra": self.extra}}
        return (
            {**sent, **(more if self.where == "sent" else {})},
            {**kept, **(more if self.where == "kept" else {})},
        )

    def loss_context(self, payload, client_state, client):
        return {"extra": self.extra} if self.where == "seen" else {}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("trained", [False, True])
def test_entries_of_a_network_are_named(kind, trained):
    extra = UNUSUAL[kind]()
    with pytest.raises(UserError) as problem:
        small("fedavg", Net(extra, trained=trained))
    form = "complex" if kind == "complex" else "sparse"
    said = str(problem.value)
    assert f"the model has the {form} {'parameter' if trained else 'buffer'} 'extra'" in said
    assert ("persistent=False" in said) is not trained
    assert ("view_as_real" in said) is (kind == "complex")


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("method", ["fedavg", "helix"])
def test_buffers_that_do_not_travel_may_be_unusual(kind, method, tmp_path):
    run = small(method, Net(UNUSUAL[kind](), persistent=False)).fit(1, quiet=True)
    run.export(tmp_path / "model", client=0)
    assert run.predict(run.federation.data.x_test[:3], client=0).shape == (3,)


def test_copies_share_nothing():
    network = Net(torch.eye(2).to_sparse_csr())
    other = copied(network)
    other.extra.values().zero_()
    assert network.extra.to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("where", ["sent", "kept"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_what_a_method_sends_or_keeps_is_named(kind, where, engine):
    form = "complex" if kind == "complex" else "sparse"
    fed = small(Sends(where, UNUSUAL[kind]()), engine=engine)
    with pytest.raises(UserError, match=rf"upload has a {form} tensor as 'deep/extra'; only dense"):
        fed.fit(1, quiet=True)


def test_what_only_a_loss_looks_at_may_be_complex():
    small(Sends("seen", UNUSUAL["complex"]())).fit(1, quiet=True)
