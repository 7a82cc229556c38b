"""The scale of inputs: noticed, and standardised on request."""

import numpy as np
import pytest
import torch

from fedhelix import Federation, UserError, from_arrays
from fedhelix.data import scaled
from fedhelix.runs.config import Config

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 3)) * [1, 50, 0] + [0, 400, 7]
Y = np.arange(60) % 2


def test_large_columns_are_noticed_once_with_the_option_that_scales_them():
    with pytest.warns(UserWarning, match=r"column 1 has mean 4.*standardize=True") as warned:
        Federation(from_arrays(X, Y), "iid", clients=2)
    assert len([one for one in warned if "not scaled" in str(one.message)]) == 1


def test_columns_of_usual_size_and_images_pass(recwarn):
    scaled(from_arrays(X * [1, 0.01, 1], Y), standardize=False)
    scaled(from_arrays(np.full((20, 8, 8), 255, dtype=np.uint8), Y[:20]), standardize=False)
    assert not recwarn.list


def test_large_channels_of_float_images_are_noticed():
    images = DRAW.uniform(0, 255, size=(20, 8, 8, 3))
    with pytest.warns(UserWarning, match=r"\(channel . has mean 1"):
        scaled(from_arrays(images, Y[:20]), standardize=False)


def test_standardised_columns_have_mean_zero_and_deviation_one():
    data = scaled(from_arrays(X, Y, name="table"), standardize=True)
    inputs = data.prepare(data.x)
    assert torch.allclose(inputs.mean(0), torch.zeros(3), atol=1e-3)
    assert torch.allclose(inputs.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-3)
    # The test pool is scaled by the training pool's numbers.
    expected = (data.x_test[:, 0] - data.x[:, 0].mean()) / data.x[:, 0].std(correction=0)
    assert torch.allclose(data.prepare(data.x_test)[:, 0], expected, atol=1e-3)


def test_channels_of_images_are_standardised_too():
    pixels = DRAW.integers(0, 256, size=(30, 6, 6, 3), dtype=np.uint8)
    data = scaled(from_arrays(pixels, Y[:30]), standardize=True)
    assert torch.allclose(data.prepare(data.x).mean((0, 2, 3)), torch.zeros(3), atol=1e-4)


def test_what_cannot_be_standardised_is_refused():
    tokens = from_arrays(np.ones((20, 4), dtype=np.int64), Y[:20], name="text")
    with pytest.raises(UserError, match="inputs of 'text' are tokens"):
        scaled(tokens, standardize=True)
    normalised = from_arrays(X, Y, mean=(0.0,), std=(1.0,))
    with pytest.raises(UserError, match="leave out standardize"):
        scaled(normalised, standardize=True)


def test_it_is_a_setting_of_the_command_line():
    assert "standardize" in Config.names
