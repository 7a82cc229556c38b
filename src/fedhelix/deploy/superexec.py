"""Flower's SuperExec, which the SuperLink starts, with log lines in the chosen format.

It takes the arguments of `flower-superexec`. The server apps that it starts print nothing.
"""

from __future__ import annotations

from flwr.supercore.cli import flower_superexec

from fedhelix.deploy.logs import format_all

if __name__ == "__main__":
    format_all()
    flower_superexec()
