"""Real processes, real sockets, TLS and keys: one run, and everybody who must not get in."""

import subprocess
import sys
import time

import httpx
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedhelix.deploy import keys, submit
from fedhelix.deploy.audit_log import read_log
from fedhelix.deploy.health import ALIVE, READY, answers
from fedhelix.deploy.keys import read_private_key
from fedhelix.deploy.localhost import LocalDeployment
from fedhelix.runs.spec import make_spec
from helpers import checkpoint, same

pytestmark = pytest.mark.timeout(600)  # a busy machine takes its time to start nine processes


def activate(address, key=None, certificate=None):
    """Ask to be let in, as a site does when it connects."""
    checks = [RuntimeVersionHttpInterceptor(component_name="SuperNode")]
    root, public = certificate and certificate.read_bytes(), b""
    if key is not None:
        private = read_private_key(key)
        pair = private, private.public_key()
        checks.append(NodeAuthHttpInterceptor(*pair))
        public = public_key_to_bytes(pair[1])
    with FleetHttpClient.from_server_address(
        address, root is None, root, interceptors=checks
    ) as client:
        client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30))


def test_a_run_across_processes(tmp_path):
    spec = make_spec(
        "fedper",
        {
            "clients": 2,
            "rounds": 2,
            "epochs": 1,
            "eval_every": 2,
            "kernels": "onednn",
            "model": "mlp",
        },
    )
    local = LocalDeployment(tmp_path / "deployment", sites=2)
    with local, local.control() as control:
        keys.make_site_key(tmp_path, "stranger")
        keys.make_certificates(tmp_path / "other", [])
        assert all(answers(f"https://{local.address}{path}") for path in (ALIVE, READY))
        command = [*(sys.executable, "-m", "fedhelix", "site", "--name", "x", "--data", "digits")]
        command += ["--superlink", local.address, "--folder", str(local.folder / "x")]
        command += ["--key", str(tmp_path / "stranger.key"), "--cert", str(local.certificate)]
        stranger = subprocess.Popen(
            command, env=local.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        run = submit.create(spec, tmp_path / "run", ["deadline=300"])
        number = control.submit(run.path)
        assert control.active_run_id(run.path) == number and control.active_run_id(tmp_path) is None
        submit.follow(control, run, quiet=True)  # which does not submit it again
        assert (
            control.active_run_id(run.path) is None and control.status(number).result == "completed"
        )
        said, _ = stranger.communicate(timeout=120)
        assert stranger.returncode == 2 and "connected to" not in said, (
            f"an unregistered key: {said}"
        )
        assert "it is not admitted" in said and "another site" not in said
        registered = local.folder / "keys/site-0.key"
        with pytest.raises(httpx.HTTPStatusError) as refused:  # site-0 is connected with it
            activate(local.address, registered, local.certificate)
        assert keys.KEY_IN_USE in refused.value.response.text
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            activate(local.address, registered, tmp_path / "other/ca.pem")
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            activate(local.address, None, local.certificate)
        with pytest.raises(httpx.TransportError):  # plain HTTP
            activate(local.address, registered)
        keys.make_site_key(tmp_path / "new", "site-0")
        control.register("site-0", tmp_path / "new/site-0.pub")
        with pytest.raises(httpx.HTTPStatusError):  # the key that was replaced
            activate(local.address, registered, local.certificate)
        activate(local.address, tmp_path / "new/site-0.key", local.certificate)
        control.expel("site-0")
        with pytest.raises(httpx.HTTPStatusError):
            activate(local.address, tmp_path / "new/site-0.key", local.certificate)
        kinds = {entry["kind"] for entry in read_log(run.path / "audit.jsonl", None)}
        assert {"opened", "describe", "train", "evaluate", "aggregate"} <= kinds
        processes = [local.superlink, *local.sites.values()]
    assert not any(process.alive for process in processes)
    spec.config.federation(spec.method, engine="serial").fit(
        2, eval_every=2, out=tmp_path / "here", quiet=True
    )
    assert same(checkpoint(tmp_path / "run")["server"], checkpoint(tmp_path / "here")["server"])
    until = time.monotonic() + 30
    while (
        subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout
        and time.monotonic() < until
    ):
        time.sleep(0.5)
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout, (
        "a process is left over"
    )


LOSSY = """
import runpy
import httpx
from flwr.supernode.fleet_http_client import FleetHttpClient

pull, pulled = FleetHttpClient.PullMessages, []

def lossy(self, request):
    answer = pull(self, request)
    pulled.extend(answer.messages_list)
    if answer.messages_list and len(pulled) in LOST:
        raise httpx.ReadError("the connection broke")
    return answer

FleetHttpClient.PullMessages = lossy
runpy.run_module("fedhelix", run_name="__main__", alter_sys=True)
"""


def run_with_a_site_of_its_own(tmp_path, script, deadline):
    """A run at two sites, of which the first is another program."""
    small = {"clients": 2, "rounds": 2, "epochs": 1, "kernels": "onednn", "model": "mlp"}
    spec, path = make_spec("fedper", small), tmp_path / "site.py"
    path.write_text(script)
    local = LocalDeployment(tmp_path / "deployment", sites=2)
    site = local.sites["site-1"]
    site.command = [sys.executable, str(path), *site.command[3:]]
    with local:
        run = submit.create(spec, tmp_path / "run", [f"deadline={deadline}"])
        with local.control() as control:
            submit.follow(control, run, quiet=True)
    return spec, run, site


def test_a_message_that_is_lost_on_its_way_is_sent_again(tmp_path):
    """The SuperLink regards it as delivered, so it would never send it on its own."""
    spec, run, site = run_with_a_site_of_its_own(tmp_path, LOSSY.replace("LOST", "(3, 5)"), 120)
    assert [record["missing"] for record in run.records()] == [{}, {}]
    assert site.log.read_text().count("connected to") == 3
    spec.config.federation(spec.method, engine="serial").fit(2, out=tmp_path / "here", quiet=True)
    assert same(checkpoint(tmp_path / "run")["server"], checkpoint(tmp_path / "here")["server"])


DYING = """
import os, runpy, sys
from pathlib import Path
from fedhelix.deploy import connection

again, push, died, answers = [sys.executable, *sys.argv], connection.push_objects, Path(DIED), []

def dies(*args, **more):
    answers.append(args)
    if len(answers) == 2 and not died.exists():
        died.touch()
        os.execv(again[0], again)
    push(*args, **more)

connection.push_objects = dies
runpy.run_module("fedhelix", run_name="__main__", alter_sys=True)
"""


def test_a_site_that_dies_while_it_sends_its_answer_gets_the_request_again(tmp_path):
    """Flower waits three minutes for the rest of an answer that was announced."""
    dying = DYING.replace("DIED", repr(str(tmp_path / "died")))
    spec, run, site = run_with_a_site_of_its_own(tmp_path, dying, 400)
    assert (tmp_path / "died").exists() and site.log.read_text().count("connected to") == 2
    assert [record["missing"] for record in run.records()] == [{}, {}]
    assert not any("unevaluated" in record for record in run.records())
    assert sum(record["seconds"] for record in run.records()) < 100
    spec.config.federation(spec.method, engine="serial").fit(2, out=tmp_path / "here", quiet=True)
    assert same(checkpoint(tmp_path / "run")["server"], checkpoint(tmp_path / "here")["server"])
