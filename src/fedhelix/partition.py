"""Who holds which samples: `partition.dirichlet(clients=6, alpha=0.5)` and others."""

from fedhelix.data.partitions import *  # noqa: F403 - its `__all__` says what
from fedhelix.data.partitions import __all__ as __all__
