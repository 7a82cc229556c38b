"""The same methods across real machines.

The server runs the round loop inside Flower's ServerApp. Each site does one client's work and
keeps that client's data and state. No other package imports this one, except the command line;
`fedhelix.load_run` is here too, since it also loads runs across sites.
"""

from __future__ import annotations

import importlib.util

from fedhelix.core.errors import UserError


def need_flower() -> None:
    """Raise an error that says how to install Flower, which only deployments need."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError('deployment needs Flower; install it with: pip install "fedhelix[flower]"')
