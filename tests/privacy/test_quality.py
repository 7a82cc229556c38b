"""PSNR and SSIM by hand and against each other."""

import pytest
import torch

from fedhelix.privacy import psnr, ssim


def test_psnr_by_hand():
    truth = torch.full((2, 1, 8, 8), 0.5)
    rebuilt = truth.clone()
    rebuilt[0] += 0.1  # squared error 0.01
    rebuilt[1] -= 0.01
    assert psnr(rebuilt, truth).tolist() == pytest.approx([20, 40], abs=1e-4)
    assert (
        float(psnr(torch.full((1, 1, 2, 2), 7.0), torch.ones(1, 1, 2, 2))) == 120
    )  # clamped into the range


def test_ssim_by_hand():
    torch.manual_seed(0)
    truth = torch.rand(1, 3, 16, 16)
    assert float(ssim(truth, truth)) == pytest.approx(1, abs=1e-5)
    # Two constant images have no structure: only the means count, (2ab + c) / (a² + b² + c).
    flat, other = torch.full((1, 1, 9, 9), 0.2), torch.full((1, 1, 9, 9), 0.6)
    assert float(ssim(flat, other)) == pytest.approx(
        (2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-3
    )
    noisy = (truth + 0.3 * torch.randn_like(truth)).clamp(0, 1)
    assert float(ssim(noisy, truth)) < 0.9
