import os
import signal

from fedhelix.deploy.localhost import undisturbed


def test_a_second_ctrl_c_waits_until_all_is_stopped():
    before = signal.getsignal(signal.SIGINT)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
