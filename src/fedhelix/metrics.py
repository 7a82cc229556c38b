"""Ready metrics for `Federation(metric=...)` and `Run.evaluate`."""

from fedhelix.core.metrics import *  # noqa: F403 - its `__all__` says what
from fedhelix.core.metrics import __all__ as __all__
