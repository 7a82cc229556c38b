"""Helix: calibrated clients, few bits, a cull, momentum, ancestors and a personal finish."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedhelix.core.method import Method
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.ancestors import Ancestors
from fedhelix.methods.calibrated import Calibrated
from fedhelix.methods.cull import Cull
from fedhelix.methods.fedavgm import FedAvgM
from fedhelix.methods.finish import Finish


@register("helix", paper="fedhelix")
@dataclass(frozen=True)
class Helix(Wrapper):
    """All parts that proved worth it, each of which can be switched off."""

    inner: Method = field(init=False)
    tau: float = option(1.0, "how strongly a client's class shares count; 0: not at all", low=0)
    smooth: float = option(1.0, "added to the count of every class", above=0)
    server_momentum: float = option(0.8, "how much of its last step the server goes on with", low=0, below=1)
    kept: float = option(0.9, "how much of the mean of ancestors stays after a round", low=0, below=1)
    cull: bool = option(True, "drop models whose removal improves their mean")
    margin: float = option(0.3, "of the loss", low=0, below=1)
    rho_min: int = option(3, "models that stay in any case", low=1)
    finish: bool = option(True, "fine-tune personal models in the end")
    ft_rate: float = option(0.1, "", above=0)
    archive: float = option(0.0, "", low=0, below=1)

    def __post_init__(self) -> None:
        chain: Method = FedAvgM(self.server_momentum, for_absent=True)
        if self.kept:
            chain = Ancestors(chain, self.kept)
        if self.tau:
            chain = Calibrated(chain, self.tau, self.smooth)
        if self.finish:
            chain = Finish(chain, ft_rate=self.ft_rate, archive=self.archive)
        if self.cull:
            chain = Cull(chain, self.margin, self.rho_min)
        object.__setattr__(self, "inner", chain)
        super().__post_init__()

    @property
    def label(self) -> str:
        """What run folders, tables and progress call it."""
        return self.name
