"""Privacy audits: what an attacker who sees a client's uploads can rebuild of its data."""

from fedhelix.privacy.inversion import Attacker, invert, label_of
from fedhelix.privacy.quality import psnr, ssim

__all__ = ["Attacker", "invert", "label_of", "psnr", "ssim"]
