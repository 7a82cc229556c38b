"""Real processes, real sockets, TLS and keys: one run, and everybody who must not get in."""

import subprocess
import sys
import time

import httpx
import pytest

from fedhelix.deploy import keys, submit
from fedhelix.deploy.local import Local
from fedhelix.runs.config import make_plan
from helpers import checkpoint, same

pytestmark = pytest.mark.timeout(600)  # a busy machine takes its time to start nine processes


def site(local, key, certificate, *more):
    """What becomes of a site that should not get in."""
    command = [*(sys.executable, "-m", "fedhelix.cli", "site", "--name", "x", "--data", "digits"), *more]
    command += ["--superlink", local.address, "--folder", str(local.folder / "x")]
    command += [] if more else ["--key", str(key), "--cert", str(certificate)]
    return subprocess.Popen(command, env=local.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_across_processes(tmp_path):
    plan = make_plan("fedper", {"clients": 2, "rounds": 2, "epochs": 1, "kernels": "onednn", "model": "mlp"})
    with Local(tmp_path / "deployment", sites=2) as local:
        keys.make_site_key(tmp_path, "stranger")
        keys.make_certificates(tmp_path / "other", [])
        strangers = {
            "an unregistered key": site(local, tmp_path / "stranger.key", local.certificate),
            "a wrong certificate": site(local, local.folder / "keys/site-0.key", tmp_path / "other/ca.pem"),
            "plain HTTP": site(local, None, None, "--insecure"),
        }
        submit.play(local.control(), submit.create(plan, tmp_path / "run", ["deadline=300"]), quiet=True)
        for who, process in strangers.items():
            if who == "plain HTTP" and process.poll() is None:
                process.terminate()  # it tries again and again
            said, _ = process.communicate(timeout=120)
            assert process.returncode != 0 and "connected to" not in said, f"{who}: {said}"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{local.address}/v1/fleet/pull-messages", timeout=20).raise_for_status()
        processes = [local.superlink, *local.sites.values()]
    assert not any(process.alive for process in processes)
    plan.config.federation(plan.method, engine="serial").fit(2, out=tmp_path / "here", quiet=True)
    assert same(checkpoint(tmp_path / "run")["server"], checkpoint(tmp_path / "here")["server"])
    until = time.monotonic() + 30
    while subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout and time.monotonic() < until:
        time.sleep(0.5)
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout, "a process is left over"
