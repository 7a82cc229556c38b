import os
import signal

from fedhelix.deploy.localhost import signals_ignored


def test_a_second_ctrl_c_waits_until_all_is_stopped():
    before = signal.getsignal(signal.SIGINT)
    with signals_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
