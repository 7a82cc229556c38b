"""A site's worker process, which holds data and models: requests on stdin, answers on stdout.

It stays warm between rounds. The node that started it owns the other ends of the pipes, so no
other process can write to it.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy.logs import format_all, say, write

LENGTH = struct.Struct(">Q")
BAD_INPUT = 2  # exit code, as of all commands


def write_frame(pipe: IO[bytes], content: bytes) -> None:
    """Write one message: its length, then its bytes."""
    pipe.write(LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Read one message; None when the other side is gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    content = pipe.read(size)
    return content if len(content) == size else None


class SiteProcess:
    """The node's handle on its worker process; one that died is replaced."""

    def __init__(self, arguments: list[str], max_seconds: float = math.inf):
        self.max_seconds = max_seconds  # that a request may take
        self.command = [sys.executable, "-m", "fedhelix.deploy.site_process", *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process unless it is running."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self.process

    def answer(self, content: bytes) -> bytes:
        """The worker's answer to a request; if it dies, a new one gets the request once more."""
        for _ in range(2):
            process = self.start()
            answer = self._asked(process, content)
            if answer is not None:
                return answer
            code = process.wait()
            if code == BAD_INPUT:  # it has said what; nothing can be answered until that is mended
                raise SystemExit(BAD_INPUT)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            say(f"the worker died ({how})")
        raise EngineFailure(f"the site's worker died twice over one request ({how})")

    def _asked(self, process: subprocess.Popen[bytes], content: bytes) -> bytes | None:
        """One attempt; None if the worker died, and an error if the time was up."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(min(self.max_seconds, threading.TIMEOUT_MAX), stop)
        timer.daemon = True
        timer.start()
        try:
            write_frame(process.stdin, content)
            answer = read_frame(process.stdout)
        except BrokenPipeError:
            answer = None
        finally:
            timer.cancel()
        if answer is None and late.is_set():
            process.wait()
            raise EngineFailure(
                f"the site's policy allows {self.max_seconds:g} seconds for a request (max_seconds)"
            )
        return answer

    def stop(self) -> None:
        """End the process, and close its pipes."""
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError), self.process:  # which waits for its end
                pass


def main() -> None:
    """Answer requests until the node is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends this process
    from fedhelix.deploy.audit_log import AuditLog  # the node does not need these
    from fedhelix.deploy.code import SiteCode
    from fedhelix.deploy.site import Site
    from fedhelix.deploy.site_policy import SitePolicy

    parser = argparse.ArgumentParser()
    for name in ("--name", "--data", "--folder", "--data-dir", "--policy", "--key"):
        parser.add_argument(name)
    parser.add_argument("--common", action="store_true")
    parser.add_argument("--code", action="append", default=[])
    arguments = parser.parse_args()
    format_all()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not end up between two answers
    code = SiteCode(arguments.code)  # first: the policy may name its methods
    policy, log, key = SitePolicy.read(arguments.policy), None, None
    if arguments.key:
        key = Path(arguments.key)
        log = AuditLog(Path(arguments.folder) / f"{arguments.name}.jsonl", key)
    site = Site(
        arguments.name, arguments.data, arguments.folder, arguments.data_dir, arguments.common,
        policy, log, code, key,
    )  # fmt: skip
    inbox: SimpleQueue[bytes] = SimpleQueue()
    # A reader of its own: Python cannot shut down while another thread waits on sys.stdin.
    requests = os.fdopen(os.dup(0), "rb")
    threading.Thread(target=listen, args=(requests, inbox), daemon=True).start()
    while True:
        write_frame(answers, site.answer(inbox.get()))


def listen(requests: IO[bytes], inbox: SimpleQueue[bytes]) -> None:
    """Queue requests. When the node is gone, end this process, even in the middle of one."""
    while (content := read_frame(requests)) is not None:
        inbox.put(content)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except UserError as problem:
        write(str(problem), "error")
        sys.exit(BAD_INPUT)
