"""The options that decide which units make a gene."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhelix.components.genes.book import GeneSize, gene_units
from fedhelix.components.genes.scores import Measure, Per, Select
from fedhelix.core.layers import Granularity, Layers
from fedhelix.core.options import Checked, option


@dataclass(frozen=True)
class GeneOptions(Checked):
    """How units are scored and chosen, how large a gene is, and who receives it."""

    gene_score: Measure = option("similarity", "how a unit's change is measured")
    gene_per: Per = option(
        "value", "scores over the unit's size, as Eq. 9 has it (then size decides), or not"
    )
    gene_select: Select = option("highest", "which scores make the gene")
    gene_granularity: Granularity = option("conv", "what a unit is")
    gene_budget: float = option(
        0.25, "share of the model that a gene may weigh; 0: count units instead", low=0, high=1
    )
    gene_gamma0: int | None = option(
        None, "units of the first genes (auto: 4, or all that fit into the budget)", low=1
    )
    gene_gamma_min: int | None = option(
        None, "units of the last genes (auto: 1; with nothing but a budget, no shrinking)", low=1
    )
    gene_shrink_every: int | None = option(
        None, "rounds between two sizes (auto: a 33rd of all)", low=1
    )
    gene_shrink_tolerance: float = option(
        0.005, "a greater loss of validation accuracy stops the shrinking", low=0
    )
    gene_rotate: bool = option(False, "send those units first that were not sent for longest")
    gene_overwrite: bool = option(
        True, "load the cluster's gene into the client's model each round"
    )
    gene_inherit: Literal["gene", "body"] = option(
        "gene", "what newcomers get: the gene, or all that was learnt but for the head"
    )

    @property
    def _size(self) -> GeneSize:
        return GeneSize(
            self.gene_budget,
            self.gene_gamma0,
            self.gene_gamma_min,
            self.gene_shrink_every,
            self.gene_shrink_tolerance,
            self.gene_rotate,
        )

    @property
    def _scored(self) -> tuple[Measure, Per, Select]:
        return self.gene_score, self.gene_per, self.gene_select

    def _units(self, layers: Layers) -> dict[str, tuple[str, ...]]:
        return gene_units(layers, self.gene_granularity)
