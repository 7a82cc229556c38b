"""Sites outlive what happens to their server, and say what keeps them out: real processes."""

import subprocess
import sys
import time

import pytest

from fedhelix.deploy import keys
from fedhelix.deploy.audit_log import AuditLog, read_log
from fedhelix.deploy.localhost import LocalDeployment

pytestmark = pytest.mark.timeout(300)


def until(condition, seconds=60):
    """Wait for something that must happen."""
    late = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.2)


def test_a_site_outlives_a_server_that_is_away_for_long(tmp_path):
    """Flower ends such a process: on the way back its key still counts as connected."""
    with LocalDeployment(tmp_path, sites=1) as local, local.control() as control:
        site = local.sites["site-0"]
        until(lambda: "connected to" in site.log.read_text())
        local.superlink.running.kill()
        local.superlink.running.wait()
        until(lambda: site.log.read_text().count("no connection to") >= 5)
        local.superlink.start()
        local.wait_for_superlink()
        until(lambda: site.log.read_text().count("connected to") == 2)
        time.sleep(7)
        assert site.alive and control.connected() == ["site-0"]
        assert site.log.read_text().count("connected to") == 2
        assert "could not be deactivated" not in local.superlink.log.read_text()
        renew_key(local, control, site)


def test_a_server_that_was_started_again_calls_no_site_connected_that_is_not_back(tmp_path):
    """Flower does so for a minute."""
    with LocalDeployment(tmp_path, sites=2) as local, local.control() as control:
        until(lambda: control.connected() == ["site-0", "site-1"])
        for process in (local.sites["site-1"], local.superlink):
            process.running.kill()
            process.running.wait()
        local.superlink.start()
        local.wait_for_superlink()
        assert "site-1" not in control.connected() and "site-1" in control.admitted()
        until(lambda: control.connected() == ["site-0"])


def renew_key(local, control, site):
    """As the docs say it."""
    folder, old = local.folder / "sites", local.folder / "keys"
    former = (old / "site-0.key").rename(local.folder / "former.key")
    (old / "site-0.pub").unlink()
    keys.make_site_key(old, "site-0")
    local.admit("site-0")
    assert site.running.wait(30) == 2
    assert "was withdrawn permanently; the site needs a new key" in site.log.read_text()
    AuditLog(folder / "site-0.jsonl", former).append({"kind": "train"})  # as if it had taken part
    site.start()
    assert site.running.wait(60) == 2
    assert "site-0.jsonl' was written with another key; " in site.log.read_text()
    for name in ("site-0.jsonl", "site-0.head"):
        (folder / name).rename(local.folder / name)
    site.start()
    until(lambda: control.connected() == ["site-0"])
    assert read_log(folder / "site-0.jsonl", old / "site-0.pub")[0]["kind"] == "opened"


WRONG = """
import datetime, runpy
from flwr.supernode import node_auth_http_interceptor as signing

right = signing.now
signing.now = lambda: right() + datetime.timedelta(seconds=OFF)
runpy.run_module("fedhelix", run_name="__main__", alter_sys=True)
"""


def test_a_site_with_a_wrong_clock_says_so(tmp_path):
    """Flower would send it the signal of Ctrl-C."""
    with LocalDeployment(tmp_path, sites=1) as local:
        keys.make_site_key(local.folder / "keys", "site-1")
        local.admit("site-1")
        for number, off in enumerate((3600, -3600)):
            script = tmp_path / f"wrong{number}.py"
            script.write_text(WRONG.replace("OFF", str(off)))
            command = [sys.executable, str(script), *local.site_command("site-1")[3:]]
            ended = subprocess.run(command, env=local.env, capture_output=True, text=True)
            assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
            assert "its signature is not valid; set the clocks of both" in ended.stderr
