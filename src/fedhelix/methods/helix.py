"""Helix: warm start, calibrated clients, compact updates, cull, momentum, ancestors, finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fedhelix.core.method import Method
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.ancestors import Ancestors
from fedhelix.methods.calibrated import Calibrated, Prior
from fedhelix.methods.compact import Compact
from fedhelix.methods.cull import Cull
from fedhelix.methods.denoised_heads import DenoisedHeads
from fedhelix.methods.fedavg import FedAvg
from fedhelix.methods.fedavgm import FedAvgM
from fedhelix.methods.finish import Finish
from fedhelix.methods.warm_start import WarmStart


@register("helix", paper="fedhelix")
@dataclass(frozen=True)
class Helix(Wrapper):
    """A global model and a personal one per client, in few bits.

    A global model and a personal one for each client, in few bits and without harmful updates.

    It is made of parts, each of which can be switched off and used around other methods.
    """

    # Its parts that noise can protect.
    instead = (("finish+calibrated+ancestors+dp-sgd+fedavgm", {"trained": "false"}),)
    if_summed = (("cull", False), ("heads", "common"))
    without_classes = "tau = 0"

    inner: Method = field(init=False)  # the parts, put together
    tau: float = option(
        1.0, "calibrated: how strongly class shares count; 0 switches it off", low=0
    )
    smooth: float = option(1.0, "calibrated: added to the count of every class", above=0)
    sharpen: float = option(
        1.5,
        "calibrated: how much more class shares count when a model is used, if the metric is "
        "accuracy",
        above=0,
    )
    prior: Prior = option(
        "uniform", "calibrated: for a pretrained network initial, whose shares then count as known"
    )
    bits: Literal[1, 2, 4, 8, 32] = option(
        1, "compact: bits per value of an update; 32 switches it off"
    )
    cull: bool = option(True, "drop models whose removal improves the mean")
    margin: float = option(
        0.02, "cull: the loss must fall by more than this share of it", low=0, below=1
    )
    rho_min: int = option(1, "cull: models that stay in any case", low=1)
    server_momentum: float = option(
        0.9, "momentum of the server at most; it adapts to who is absent", low=0, below=1
    )
    ancestors: float = option(
        0.9, "how much of the mean of ancestors stays after a round; 0 switches it off",
        low=0, below=1,
    )  # fmt: skip
    heads: Literal["common", "denoised"] = option(
        "common",
        "denoised: every client gets a head of its own, where groups of clients disagree about "
        "labels",
    )
    finish: bool = option(True, "fine-tune personal models in the end, where that helps")
    ft_rate: float = option(0.15, "finish: factor on the learning rate", above=0)
    warm_epochs: int = option(
        10,
        "warm-start: epochs on the server's samples, if it has any, before the first round; "
        "0 switches it off",
        low=0,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", FedAvg())
        super().__post_init__()  # reads options that are text
        object.__setattr__(self, "inner", self._parts())

    def _parts(self) -> Method:
        """The parts that are switched on, put together."""
        method: Method = FedAvgM(self.server_momentum, adaptive=True)
        if self.ancestors:
            method = Ancestors(method, self.ancestors)
        if self.finish:
            method = Finish(method, self.ft_rate)
        if self.tau:
            method = Calibrated(
                method, self.tau, self.smooth, sharpen=self.sharpen, prior=self.prior
            )
        if self.cull:
            method = Cull(method, self.margin, self.rho_min)
        if self.heads == "denoised":
            method = DenoisedHeads(method)
        if self.warm_epochs:
            method = WarmStart(method, self.warm_epochs, required=False)
        if self.bits != 32:
            method = Compact(method, bits=self.bits)
        return method

    @property
    def label(self) -> str:
        """What run folders, tables and progress call it."""
        return self.name

    def options(self) -> dict[str, Any]:
        """Its own hyperparameters, which decide those of its parts."""
        return {name: value for name, value in vars(self).items() if name != "inner"}
