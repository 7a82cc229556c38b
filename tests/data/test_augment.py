from __future__ import annotations

import pytest
import torch

from fedhelix.core.errors import UserError
from fedhelix.core.seeds import draw
from fedhelix.data import crop_and_flip, draw_crops


def one_by_one(x: torch.Tensor, crops: torch.Tensor, pad: int) -> torch.Tensor:
    images = []
    for image, (dy, dx, flip) in zip(x, crops.tolist(), strict=True):
        channels, height, width = image.shape
        padded = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=x.dtype)
        padded[:, pad : pad + height, pad : pad + width] = image
        cut = padded[:, dy : dy + height, dx : dx + width]
        images.append(cut.flip(-1) if flip else cut)
    return torch.stack(images)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("pad", [0, 2, 4])
def test_same_as_one_by_one(dtype, pad):
    x = torch.randint(1, 255, (12, 3, 8, 10), generator=draw(0, "pictures")).to(dtype)
    crops = draw_crops(12, draw(1, "crops"), pad)
    expected = one_by_one(x, crops, pad)
    assert torch.equal(crop_and_flip(x, crops, pad), expected)
    stacked = crop_and_flip(x.view(3, 4, 3, 8, 10), crops.view(3, 4, 3), pad)
    assert torch.equal(stacked, expected.view(3, 4, 3, 8, 10))


def test_the_middle_without_flip_changes_nothing():
    x = torch.rand(2, 1, 5, 5)
    assert torch.equal(crop_and_flip(x, torch.tensor([[4, 4, 0], [4, 4, 0]])), x)


def test_draws_cover_their_range_and_repeat():
    crops = draw_crops(2000, draw(0, "crops"))
    assert crops.dtype == torch.int64
    assert crops.amin(0).tolist() == [0, 0, 0]
    assert crops.amax(0).tolist() == [8, 8, 1]
    assert torch.equal(crops, draw_crops(2000, draw(0, "crops")))


def test_tables_cannot_be_cropped():
    with pytest.raises(UserError, match="crops need images"):
        crop_and_flip(torch.zeros(3, 7), draw_crops(3, draw(0, "crops")))
