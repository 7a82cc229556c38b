"""The first Ctrl-C is noted, the second acts as usual; where SIGTERM is the same."""

import signal
import threading

import pytest

from fedhelix.core.interrupts import noted_ctrl_c, sigterm_as_ctrl_c


@pytest.fixture(autouse=True)
def usual():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_does_not_wait():
    with pytest.raises(KeyboardInterrupt), noted_ctrl_c() as pressed:
        assert not pressed.is_set()
        signal.raise_signal(signal.SIGINT)
        reached = pressed.is_set()
        signal.raise_signal(signal.SIGINT)
        reached = False
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_ignores_it_still_does_and_threads_leave_it_alone():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with noted_ctrl_c() as pressed:
        signal.raise_signal(signal.SIGINT)
    assert not pressed.is_set() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    seen = []

    def work():
        with noted_ctrl_c():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_IGN]


def test_sigterm_is_ctrl_c_for_a_while():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []

    def work():
        with sigterm_as_ctrl_c():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
