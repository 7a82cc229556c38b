"""The same methods across real machines: the round loop behind Flower's ServerApp, a client's work
at its site.

`up` and `site` start processes, `run` submits a run. Everything below `deploy/` knows nothing of
it.
"""

from __future__ import annotations

import importlib.util

from fedhelix.core.errors import UserError


def need_flower() -> None:
    """Deployment is the one part that needs Flower."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError('deployment needs Flower; install it with: pip install "fedhelix[flower]"')
