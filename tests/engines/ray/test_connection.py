"""What can go wrong before there is a cluster; needs no Ray."""

import subprocess
import sys

import pytest

from fedhelix.core.errors import UserError
from helpers import small


def test_without_ray_a_sentence_says_what_to_install(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = cli("run", "fedavg", "--engine", "ray", "--rounds", 1)
    assert done.code == 2 and "pip install 'fedhelix[ray]'" in " ".join(done.err.split())


def test_an_address_is_for_ray_alone():
    with pytest.raises(UserError, match="address is for the ray engine, not for serial"):
        small(address="127.0.0.1:6379")


def test_ray_is_imported_by_its_engine_alone():
    code = "import sys, fedhelix.cli.train, fedhelix.federation.public; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
