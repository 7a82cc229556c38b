"""LearnGenes: which parameters matter, which layers are worth sending, and which clients are alike.

The maths of GENE-FL (arXiv:2504.14628) on plain tensors, without a federation: Fisher values and
the elastic mask (`fisher`), drift of layers (`drift`), scores of units and the choice of a gene
(`scores`), which units make a gene (`book`), one-shot clusters (`clusters`).
"""

from fedhelix.components.genes.clusters import (
    class_vectors,
    cluster,
    distances,
    layout,
    nearest,
    principal_vectors,
)
from fedhelix.components.genes.drift import drift, scales
from fedhelix.components.genes.fisher import elastic_mask, fisher_values, normalise
from fedhelix.components.genes.scores import choose, shrunk, unit_scores

__all__ = [
    "choose",
    "class_vectors",
    "cluster",
    "distances",
    "drift",
    "elastic_mask",
    "fisher_values",
    "layout",
    "nearest",
    "normalise",
    "principal_vectors",
    "scales",
    "shrunk",
    "unit_scores",
]
