"""The process at a site that holds data and models: letters come in on stdin, answers leave on
stdout.

It stays warm between rounds. The node that started it owns the other ends of the pipes, so nobody
else can write to it.
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
from typing import IO

from fedhelix.core.errors import EngineFailure

LENGTH = struct.Struct(">Q")


def put(pipe: IO[bytes], content: bytes) -> None:
    """Write one letter: its length, then itself."""
    pipe.write(LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def take(pipe: IO[bytes]) -> bytes | None:
    """Read one letter; None when the other side is gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    content = pipe.read(size)
    return content if len(content) == size else None


class SiteProcess:
    """The node's view of its worker process; one that died is replaced."""

    def __init__(self, arguments: list[str]):
        self.command = [sys.executable, "-m", "fedhelix.deploy.site_process", *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """The process, alive."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self.process

    def answer(self, content: bytes) -> bytes:
        """What the worker says to a letter; if it dies over it, a new one gets the letter, but only
        once.
        """
        for _ in range(2):
            process = self.start()
            assert process.stdin is not None and process.stdout is not None
            try:
                put(process.stdin, content)
                answer = take(process.stdout)
            except BrokenPipeError:
                answer = None
            if answer is not None:
                return answer
            code = process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            print(f"fedhelix: the worker died ({how}).", file=sys.stderr, flush=True)
        raise EngineFailure(f"the site's worker died twice over one letter ({how})")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Answer letters until the node is gone."""
    from fedhelix.deploy.site import Site  # the node has no use for it

    parser = argparse.ArgumentParser()
    for name in ("--name", "--data", "--folder", "--data-dir"):
        parser.add_argument(name)
    parser.add_argument("--common", action="store_true")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not stand between two letters
    site = Site(given.name, given.data, given.folder, given.data_dir, given.common)
    while (content := take(sys.stdin.buffer)) is not None:
        put(answers, site.answer(content))


if __name__ == "__main__":
    main()
