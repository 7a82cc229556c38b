"""Whole numbers that `predict` gets are on the scale of the training samples, or refused."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays

PIXELS = np.random.default_rng(0).integers(256, size=(40, 3, 6, 6), dtype=np.uint8)
FLOATS = PIXELS.astype("float32") / 255
Y = np.arange(40) % 2


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(109, 2)

    def forward(self, image, age):
        return self.head(torch.cat([image.flatten(1), age], 1))


def fit(x, model="linear"):
    usual = {"engine": "serial", "kernels": "onednn", "epochs": 1}
    fed = Federation(from_arrays(x, Y), "iid", clients=2, model=model, **usual)
    return fed.fit(1, quiet=True)


def test_pixels_are_scaled_for_a_network_that_was_trained_on_floats():
    run = fit(FLOATS)
    outputs = run.predict(FLOATS, raw=True)
    for form in (PIXELS, PIXELS.transpose(0, 2, 3, 1), PIXELS.astype(int)):
        np.testing.assert_allclose(run.predict(form, raw=True), outputs, atol=1e-6)
    with pytest.raises(UserError, match="pixels are whole numbers from 0 to 255"):
        run.predict(PIXELS.astype(int) + 1)


def test_pixels_on_another_scale_are_refused():
    words = r"whole numbers up to 255 as uint8, but the network was trained on floats from -2 to 2"
    with pytest.raises(UserError, match=words):
        fit(4 * FLOATS - 2).predict(PIXELS)
    with pytest.raises(UserError, match="trained on floats from 0 to 1; give floats on that scale"):
        fit(FLOATS.reshape(40, -1)).predict(PIXELS.reshape(40, -1))


def test_whole_numbers_on_the_scale_of_the_training_stay():
    run = fit(PIXELS.astype("float32"))
    same = [run.predict(form, raw=True) for form in (PIXELS, PIXELS.astype("float32"))]
    np.testing.assert_array_equal(*same)
    table = (FLOATS.reshape(40, -1) > 0.5).astype("float32")  # columns of zeros and ones
    run = fit(table)
    same = [run.predict(form, raw=True) for form in (table, table.astype(np.uint8))]
    np.testing.assert_array_equal(*same)


def test_pixels_that_are_one_of_several_parts_are_scaled():
    new = {"image": PIXELS, "age": FLOATS[:, 0, 0, :1]}
    run = fit({**new, "image": FLOATS}, TwoParts)
    outputs = run.predict({**new, "image": FLOATS}, raw=True)
    np.testing.assert_allclose(run.predict(new, raw=True), outputs, atol=1e-6)
