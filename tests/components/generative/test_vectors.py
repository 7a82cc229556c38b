import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fedhelix import UserError
from fedhelix.components.generative import Buffer, Layout, Normaliser, slice_of
from fedhelix.components.generative.buffer import neighbourhoods, shaken
from fedhelix.core.layers import Layers
from fedhelix.models import build


def units_of(name, shape, outputs=10):
    return Layers.of(build(name, shape, outputs), torch.zeros(2, *shape))


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "slice", "size"),
    [
        ("fedpac-cnn", (3, 32, 32), 10, "all", 107_690),
        ("fedpac-cnn", (3, 32, 32), 10, "last:2", 75_146),
        ("fedpac-cnn", (1, 28, 28), 62, "all", 123_774),
        ("fedpac-cnn", (1, 28, 28), 62, "fc1, fc2", 110_526),
        ("fedpac-cnn", (1, 28, 28), 10, "all", 117_066),
        ("small-cnn", (1, 28, 28), 10, "all", 20_522),
        ("small-cnn", (1, 28, 28), 10, "conv1", 208),
    ],
)
def test_the_papers_slices(name, shape, outputs, slice, size):
    layers = units_of(name, shape, outputs)
    assert sum(layers.sizes[entry] for entry in slice_of(layers, slice)) == size


@pytest.mark.parametrize(
    ("slice", "words"),
    [
        ("fc9", "names no layer 'fc9'; the model has conv1"),
        ("", "no layer ''"),
        ("last:x", "whole"),
        ("last:9", "9"),
    ],
)
def test_a_slice_that_names_no_layer(slice, words):
    with pytest.raises(UserError, match=words):
        slice_of(units_of("digits-cnn", (1, 8, 8)), slice)


def test_a_slice_has_no_buffers():
    layers = units_of("digits-bn-cnn", (1, 8, 8))
    assert set(slice_of(layers, "bn1")) == {"bn1.weight", "bn1.bias"}


@given(
    some.lists(some.tuples(some.integers(0, 3), some.integers(1, 3)), min_size=1, max_size=4),
    some.integers(1, 3),
)
def test_vectors_become_the_same_tensors_again(shapes, count):
    states = [{str(i): torch.randn(shape) for i, shape in enumerate(shapes)} for _ in range(count)]
    layout = Layout.of(states[0], states[0])
    rows = layout.flatten(states)
    assert rows.shape == (count, sum(layout.sizes))
    for row, state in zip(rows, states, strict=True):
        back = layout.unflatten(row)
        assert all(torch.equal(back[name], value) for name, value in state.items())


def test_a_model_of_another_architecture_is_refused():
    layout = Layout.of({"fc.weight": torch.zeros(2, 3)}, ["fc.weight"])
    for state, words in [
        ({}, "nothing for 'fc.weight'"),
        ({"fc.weight": torch.zeros(3, 3)}, "same architecture"),
    ]:
        with pytest.raises(UserError, match=words):
            layout.accepts(state, "the newcomer's model")
    assert layout.accepts({"fc.weight": torch.zeros(2, 3)}, "it")
    assert not layout.accepts({"fc.weight": torch.full((2, 3), torch.nan)}, "it")


def test_residuals_are_centred_by_coordinate_and_scaled_by_tensor():
    vectors = torch.tensor([[1.0, 10.0, 7.0], [3.0, 14.0, 7.0]])
    normaliser = Normaliser.fit(vectors, [2, 1], "residual")
    assert normaliser.centre.tolist() == [2, 12, 7]
    # The squared residuals of the first tensor are 1, 1, 4, 4; the second has none and stays as it
    # is.
    assert normaliser.scale.tolist() == pytest.approx([2.5**0.5, 2.5**0.5, 1])
    assert torch.allclose(normaliser.undo(normaliser.apply(vectors)), vectors)
    whole = Normaliser.fit(vectors, [2, 1], "tensor")
    assert whole.centre.tolist() == [7, 7, 7] and float(
        whole.apply(vectors)[:, :2].square().mean()
    ) == pytest.approx(1)


def filled():
    buffer = Buffer.of(None, 2, torch.device("cpu"))
    buffer = buffer.add(
        torch.tensor([[1.0, 0.0], [2.0, 0.0]]),
        [4, 1],
        [0.5, 0.0],
        torch.tensor([1.0, 1.0]),
        0,
        keep=2,
    )
    return buffer.add(torch.tensor([[5.0, 0.0]]), [4], [1.0], torch.tensor([2.0, 2.0]), 1, keep=2)


def test_a_buffer_knows_owners_and_updates():
    buffer = filled()
    assert buffer.owners == [1, 4]
    assert buffer.latest().tolist() == [[2, 0], [5, 0]]
    assert buffer.means().tolist() == [[2, 0], [3, 0]]
    assert buffer.updates().vectors.tolist() == [[0, -1], [1, -1], [3, -2]]
    assert buffer.trusted().tolist() == [[1, 0], [5, 0]]  # client 1 was left out of the average
    assert buffer.since(1).owners == [4] and buffer.since(1).starts.tolist() == [[2, 2]]


def test_a_buffer_forgets_old_rounds():
    buffer = filled().add(
        torch.tensor([[9.0, 9.0]]), [0], [1.0], torch.tensor([3.0, 3.0]), 2, keep=2
    )
    assert buffer.rounds.tolist() == [1, 2] and buffer.clients.tolist() == [4, 0]
    assert buffer.starts.tolist() == [[2, 2], [3, 3]]
    assert buffer.updates().vectors.tolist() == [[3, -2], [6, 6]]


def test_neighbourhoods_and_noise():
    vectors = torch.tensor([[0.0], [1.0], [10.0]])
    assert neighbourhoods(vectors, 2).tolist() == [[0.5], [0.5], [5.5]]
    assert neighbourhoods(vectors, 9).flatten().tolist() == pytest.approx([11 / 3] * 3)
    far = torch.randn(3, 50)
    moved = (shaken(far, 0.3, seed=1) - far).norm(dim=1) / (far - far.mean(0)).norm(dim=1)
    assert moved.tolist() == pytest.approx([0.3] * 3, rel=1e-4)
