"""Commands that a user is told to type: they work as they are, in the folder of the last one."""

from __future__ import annotations

import shlex
from pathlib import Path

FOLDER = Path("deployment")
SERVER = "127.0.0.1:8000"  # where `deploy serve` listens by default


def where(superlink: str | None, folder: Path) -> str:
    """The options that name a deployment."""
    given = {"--superlink": superlink, "--folder": None if folder == FOLDER else str(folder)}
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in given.items() if value)


def named(where: str) -> dict[str, str]:
    """The values of such options."""
    words = shlex.split(where)
    return dict(zip(words[::2], words[1::2], strict=False))


def resumption(run: Path, where: str, *more: str) -> str:
    """The command that goes on with a run, as a sentence has it."""
    return f"`{shlex.join(['fedhelix', 'deploy', 'resume', str(run), *more])}{where}`"


def serve_command(address: str, folder: Path) -> str:
    """The command that starts a SuperLink at an address of this machine."""
    port = address.rpartition(":")[2]
    other = f" --port {shlex.quote(port)}" if port != SERVER.rpartition(":")[2] else ""
    return f"fedhelix deploy serve{other}{where(None, folder)}"
