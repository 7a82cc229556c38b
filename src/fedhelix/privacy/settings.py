"""The settings of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhelix.core.options import Checked, option


@dataclass(frozen=True)
class Audit(Checked):
    """How hard an attacker tries, and on what."""

    data: str = option(
        "auto", "data set of the images (auto: cifar10, or digits if that is not on this machine)"
    )
    data_dir: str | None = option(None, "folder with the data sets")
    model: str = option(
        "lenet-sigmoid", "the network: lenet-sigmoid, for which the attack was made, resnet18, ..."
    )
    images: int = option(20, "number of images", low=1)
    restarts: int = option(3, "attempts at each image, of which the best counts", low=1)
    steps: int = option(2000, "steps of an attempt", low=1)
    optimiser: Literal["lbfgs", "adam"] = option("lbfgs", "optimiser of the images: lbfgs or adam")
    noise: float = option(
        0.001, "variance of Gaussian noise on the first method's gradients (0: no such row)", low=0
    )
    label: Literal["granted", "sought"] = option(
        "granted", "labels where the head is not uploaded: granted to the attacker, or sought"
    )
    seed: int = option(0, "every random draw follows from it", low=0)
    device: str = option("auto", "cpu, cuda or auto")
