"""Only what trains travels: frozen parameters stay in the network, the rest keeps its type."""

import pytest
import torch
from torch import nn

from fedhelix import Federation, add_lora, partition
from fedhelix.core.layers import Layers
from fedhelix.core.tree import flatten, masked_mean, payload_bytes
from fedhelix.data import Dataset
from fedhelix.engines.batched.stack import Stack
from fedhelix.models.text import Transformer
from helpers import agree

LENGTH, SYMBOLS, RANK = 6, 5, 2


def text(samples: int = 60) -> Dataset:
    """Sequences whose next symbol is the first one."""
    x = torch.randint(SYMBOLS, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    return Dataset("text", x, x[:, 0], x, x[:, 0], SYMBOLS)


class Adapted(nn.Module):
    """A tiny transformer with LoRA, a trained head, a buffer of whole numbers, and mixed types."""

    def __init__(self, half: torch.dtype = torch.float32):
        super().__init__()
        self.net = add_lora(Transformer(LENGTH, SYMBOLS), RANK, train=["head"])
        self.net.head.to(half)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int16))

    def forward(self, x):
        net = self.net
        found = net.attention(net.embedding(x) + net.places)
        hidden = torch.relu(net.hidden(found))
        return net.head(hidden.to(net.head.weight.dtype)).float()


def federation(engine: str = "serial", half: torch.dtype = torch.float32, **more) -> Federation:
    usual = {"lr": 0.1, "batch_size": 8, "epochs": 2, "kernels": "onednn", "cohort": 3}
    return Federation(
        text(), partition.iid(4), model=lambda: Adapted(half), engine=engine, **usual | more
    )


def adapter_values() -> int:
    """By hand: A is rank x inputs and B outputs x rank, of query, key, value and hidden."""
    return 3 * RANK * (32 + 32) + RANK * (32 + 64)


def test_frozen_parameters_are_a_role_of_their_own():
    layers = Layers.of(Adapted(), text().x[:2])
    assert set(layers.frozen) == {
        "net.places",
        "net.embedding.weight",
        *(f"net.attention.{name}.{kind}" for name in ("query", "key", "value")
          for kind in ("weight", "bias")),
        "net.hidden.weight",
        "net.hidden.bias",
    }  # fmt: skip
    assert not set(layers.frozen) & set(layers.names)
    assert layers.buffers == ("seen",)
    assert layers.head == ("net.head.weight", "net.head.bias")
    assert sum(layers.sizes[name] for name in layers.parameters) == adapter_values() + 65 * SYMBOLS


@pytest.mark.parametrize(("half", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_uplink_is_what_trains_in_its_own_type_to_the_byte(half, width):
    fed = federation(half=half)
    (record,) = fed.fit(1, quiet=True).records
    one = 4 * adapter_values() + width * 65 * SYMBOLS + 3 * 2  # int16 buffer
    assert record["uplink_bytes"] == record["downlink_bytes"] == 3 * one
    assert record["uplink_values"] == 3 * (adapter_values() + 65 * SYMBOLS + 3)


@pytest.mark.parametrize(
    ("engine", "half", "within"),
    [
        ("batched", torch.float32, 1e-5),
        ("batched", torch.bfloat16, 0.02),
        ("parallel", torch.bfloat16, 0),
    ],
)
def test_engines_send_and_learn_only_what_trains(engine, half, within):
    feds = [federation(kind, half) for kind in ("serial", engine)]
    runs = [fed.fit(3, quiet=True) for fed in feds]
    for fed in feds:
        fed.close()
    trees = [flatten(run.state.server) for run in runs]
    assert trees[0].keys() == trees[1].keys()
    assert not any(name in feds[0].layers.frozen for name in trees[0])
    for name, value in trees[0].items():
        other = trees[1][name]
        assert value.dtype == other.dtype
        assert torch.allclose(value.float(), other.float(), atol=within), name
    keys = ("uplink_bytes", "downlink_bytes", "participants")
    assert agree(*([{key: record[key] for key in keys} for record in run.records] for run in runs))


def test_a_stack_holds_no_frozen_value(monkeypatch):
    kept = []
    allocate = Stack._allocate

    def watched(self):
        allocate(self)
        kept.append(self)

    monkeypatch.setattr(Stack, "_allocate", watched)
    fed = federation("batched")
    fed.fit(1, quiet=True)
    assert kept
    for stack in kept:
        assert set(stack.names) == set(fed.layers.parameters)
        assert set(stack.fixed) == {"seen"}


def test_runs_with_other_frozen_values_share_no_stack():
    one, other = federation("batched"), federation("batched", seed=1)
    assert one.engine.setup.architecture == other.engine.setup.architecture
    assert one.engine.setup.frozen != other.engine.setup.frozen
    assert one.engine.setup.frozen == federation("serial").engine.setup.frozen


def test_a_model_that_was_trained_has_its_frozen_values():
    fed = federation()
    model = fed.fit(1, quiet=True).model()
    assert torch.equal(model.net.places, fed.engine.setup.module.net.places)
    assert model(text().x[:2]).shape == (2, SYMBOLS)


def test_half_precision_is_averaged_in_float32_and_integers_by_their_maximum():
    ones = {"w": torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16), "n": torch.tensor([3])}
    twos = {"w": torch.tensor([2.0, 1.015625], dtype=torch.bfloat16), "n": torch.tensor([5])}
    mean = masked_mean([ones] * 3 + [twos], [1, 1, 1, 1], ones)
    assert mean["w"].dtype == torch.bfloat16 and mean["n"].tolist() == [5]
    # 1.25 is exact in eight bits; 1.009765625 lies between 1.0078125 and 1.015625.
    assert mean["w"].tolist() == [1.25, 1.0078125]
    assert payload_bytes(mean) == 2 * 2 + 8
