"""Privacy audits: what an attacker can rebuild of a client's data from its uploads."""

from fedhelix.privacy.inversion import Attacker, invert, label_of
from fedhelix.privacy.quality import psnr, ssim

__all__ = ["Attacker", "invert", "label_of", "psnr", "ssim"]
