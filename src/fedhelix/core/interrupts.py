"""Ctrl-C where an exception at any moment would leave something half done, and SIGTERM where it is
the same as Ctrl-C.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_ctrl_c() -> Iterator[threading.Event]:
    """What the first Ctrl-C sets instead of raising an exception; a second one acts as usual."""
    before, pressed = signal.getsignal(signal.SIGINT), threading.Event()
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            before(number, frame)
        pressed.set()

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM, as `kill` and service managers send it, raises KeyboardInterrupt, too."""
    if threading.current_thread() is not threading.main_thread():  # only it receives signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
