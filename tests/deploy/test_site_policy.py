"""A site's policy: every rule refuses in one sentence before any computation."""

import dataclasses
import datetime
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhelix.cli.app import main
from fedhelix.core import toml
from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy import messages, submit
from fedhelix.deploy.code import SiteCode
from fedhelix.deploy.dry_run import asked_run, reveals
from fedhelix.deploy.server import _public
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.deploy.site_process import SiteProcess
from fedhelix.deploy.site_state import MODEL
from fedhelix.runs.spec import make_spec
from in_process import InProcessDeployment

SMALL = {"clients": 4, "rounds": 2, "epochs": 1, "model": "linear", "kernels": "onednn"}

PRIVATE = ("secure+private", {"method.noise_by": "clients"}, {})


def rule(noise, clip):
    """What the server sends for a round of `private`."""
    values = {"share": torch.tensor(noise), "clip": torch.tensor(clip)}
    return {"payload": {"privacy": values}}


# Rules, what the server asks for (method, settings, header, body), and what it is told.
CASES = {
    "methods": ({"methods": ["fedper"]}, "fedavg", {}, {}, {}, "runs fedper only, not fedavg"),
    "options": (
        {"options": ["mu=0.1", "mu=1.0"]}, "fedprox", {"method.mu": 5.0}, {}, {},
        "needs mu = 0.1 or 1.0, not 5.0",
    ),
    "privacy": ({"require_privacy": True}, "fedavg", {}, {}, {}, "needs differential privacy"),
    "bounded": ({"max_epsilon": 8.0}, "fedavg", {}, {}, {}, "fedavg has not (max_epsilon)"),
    "clipped": ({"max_clip": 1.0}, "fedavg", {}, {}, {}, "fedavg has not (max_clip)"),
    "epsilon": (
        {"max_epsilon": 4}, "private", {"method.epsilon": 8}, {}, {}, "4.0 as epsilon, not 8",
    ),
    "epsilon of samples": (
        {"max_epsilon": 4}, "dp-sgd", {"method.epsilon": 8}, {}, {}, "4.0 as epsilon, not 8",
    ),
    "epsilon of all runs": (
        {"total_epsilon": 4}, "private", {"method.epsilon": 8}, {}, {}, "all runs together, not 8",
    ),
    "delta": (
        {"max_delta": 1e-6}, "secure+private", {"method.delta": 1e-5}, {}, {}, "delta, not 1e-05",
    ),
    "noise of the server": (
        {"server_noise": False}, "secure+private", {}, {}, {}, "no updates without noise",
    ),
    "noise elsewhere": (
        {"min_noise": 0.5}, "private", {}, {}, {}, "a noise of 0.5 at the site, not at the server",
    ),
    "noise": ({"min_noise": 0.5}, *PRIVATE, rule(0.4, 1.0), "needs a noise of 0.5, not 0.4"),
    "no noise": ({"min_noise": 0.5}, *PRIVATE, rule(math.nan, 1.0), "a noise of 0.5, not nan"),
    "nothing of noise": ({"min_noise": 0.5}, *PRIVATE, {}, "needs a noise of 0.5, not nan"),
    "clip": ({"max_clip": 2}, *PRIVATE, rule(0.4, 2.5), "allows a clip of 2, not 2.5"),
    "scores of too little noise": (
        {"min_noise": 0.5}, *PRIVATE[:2], {"kind": "evaluate"}, rule(0.4, 1.0),
        "needs a noise of 0.5, not 0.4",
    ),
    "scores of too long a clip": (
        {"max_clip": 2}, *PRIVATE[:2], {"kind": "evaluate_received"}, rule(0.4, 2.5),
        "allows a clip of 2, not 2.5",
    ),
    "negative clip": ({"max_clip": 2}, *PRIVATE, rule(0.4, -9.0), "a clip of 2, not -9"),
    "no clip": ({"max_clip": 2}, *PRIVATE, rule(0.4, math.inf), "allows a clip of 2, not inf"),
    "secure": (
        {"require_secure": True}, "private", {}, {}, {}, "needs secure aggregation, which private",
    ),
    "single": ({"single_uploads": False}, "median", {}, {}, {}, "gives median no single uploads"),
    "single weights": (
        {"single_uploads": False}, "genfed", {"validation_size": 50}, {}, {}, "no single uploads",
    ),
    "cohort": ({"min_cohort": 3}, "fedavg", {"cohort": 2}, {}, {}, "needs 3 clients in a round"),
    "masked cohort": (
        {"min_cohort": 4}, "secure", {}, {"kind": "masking_shares"},
        {"keys": {"0": torch.zeros(64, dtype=torch.uint8)}}, "needs 4 clients, not 1",
    ),
    "masked sum": (
        {"min_cohort": 3}, "secure", {}, {"kind": "masking_agree"},
        {"survivors": {"clients": torch.tensor([0, 1, 1])}}, "needs 3 clients in a sum, not 2",
    ),
    "samples": ({"min_samples": 5000}, "fedavg", {}, {}, {}, "needs 5,000 samples, not"),
    "hellos": (
        {"hellos": False}, "clustered", {}, {"kind": "client_init"}, {}, "before the first round",
    ),
    "newcomers": (
        {"newcomers": False}, "fedavg", {}, {"kind": "onboard_client"}, {}, "joins no run",
    ),
    "newcomers' state": (
        {"newcomers": False}, "fedavg", {}, {"kind": "onboard_state"}, {}, "joins no run",
    ),
    "supplements": (
        {"supplements": False}, "fedavg", {}, {}, {"supplement": {}}, "takes no samples",
    ),
    "scores": ({"metrics": False}, "fedavg", {}, {"kind": "evaluate"}, {}, "reports no scores"),
    "scores as received": (
        {"metrics": False}, "fedavg", {}, {"kind": "evaluate_received"}, {}, "reports no scores",
    ),
    "rounds": ({"max_rounds": 5}, "fedavg", {"rounds": 6}, {}, {}, "allows 5 rounds, not 6"),
    "a round": ({"max_rounds": 5}, "fedavg", {}, {"round": 5}, {}, "and this is round 6"),
    "epochs": ({"max_epochs": 3}, "fedavg", {"epochs": 4}, {}, {}, "allows 3 local epochs, not 4"),
    "steps": ({"max_steps": 5}, "fedavg", {"batch_size": 1}, {}, {}, "allows 5 steps in a round"),
    "clients": ({"max_clients": 3}, "fedavg", {}, {}, {}, "allows 3 clients, not 4"),
    "a client": ({}, "fedavg", {}, {"client": 200_000}, {}, "allows 100000 clients, and this is"),
    "classes": ({"max_classes": 5}, "fedavg", {}, {"classes": 6}, {}, "allows 5 classes, not 6"),
    "parameters": ({"max_parameters": 100}, "fedavg", {}, {}, {}, "allows 100 values in a model"),
    "bytes": ({"max_bytes": 1000}, "fedavg", {}, {}, {}, "allows 1,000 bytes, not"),
    "bytes of an answer": ({"max_bytes": 2500}, "fedavg", {}, {}, {}, "allows 2,500 bytes, not"),
    "default epochs": ({}, "fedavg", {"epochs": 101}, {}, {}, "allows 100 local epochs"),
    "default rounds": ({}, "fedavg", {"rounds": 10_001}, {}, {}, "allows 10,000 rounds"),
}  # fmt: skip


def test_a_method_may_run_whether_or_not_its_fedavg_is_named():
    for allowed, asked in [
        ("secure+private+fedavg", "secure+private"),
        ("secure", "secure+fedavg"),
    ]:
        SitePolicy(methods=(allowed,)).check_run(make_spec(asked, SMALL), None)
    SitePolicy(methods=("helix",)).check_run(make_spec("helix@cull=false", SMALL), None)


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_asks_for_more_than_the_policy_allows_is_refused(case, tmp_path, monkeypatch):
    rules, method, settings, header, body, said = CASES[case]
    if "answer" not in case:  # nothing is computed
        monkeypatch.setattr("fedhelix.deploy.site.run_client", lambda *_: pytest.fail("computed"))
    site = Site("north", "digits", tmp_path, policy=SitePolicy(**rules))
    spec = json.dumps(_public(make_spec(method, {**SMALL, **settings})))
    usual = {"kind": "train", "experiment": "0" * 32, "round": 0, "client": 0, "spec": spec}
    answer = messages.read(site.answer(messages.write({**usual, **header}, body)))
    assert said in answer.header["error"]
    assert answer.header["error"].startswith("the site's policy ")
    assert answer.body == {} and "\n" not in answer.header["error"]


@pytest.mark.parametrize(
    ("hours", "now", "is_open"),
    [
        ("09:00-17:00", "12:00", True), ("09:00-17:00", "17:00", False),
        ("20:00-06:00", "23:59", True), ("20:00-06:00", "05:59", True),
        ("20:00-06:00", "12:00", False), (None, "03:00", True),
    ],
)  # fmt: skip
def test_hours(hours, now, is_open):
    policy, now = SitePolicy(hours=hours), datetime.time.fromisoformat(now)
    opens_in = policy.opens_in(datetime.datetime.combine(datetime.date(2026, 7, 1), now))
    assert opens_in == (0 if is_open else {"17:00": 16, "12:00": 8}[f"{now:%H:%M}"] * 3600)
    if is_open:
        policy.check_message({"kind": "train"}, {}, now)
    else:
        with pytest.raises(UserError, match=f"answers requests at {hours} only"):
            policy.check_message({"kind": "train"}, {}, now)


def test_a_request_that_takes_too_long_is_ended(monkeypatch):
    worker = SiteProcess([], max_seconds=0.3)
    worker.command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(EngineFailure, match=r"allows 0.3 seconds for a request \(max_seconds\)"):
        worker.answer(b"train")
    worker.stop()


ECHO = """
import sys
while size := sys.stdin.buffer.read(8):
    sys.stdout.buffer.write(size + sys.stdin.buffer.read(int.from_bytes(size)))
    sys.stdout.flush()
"""


def test_a_worker_that_was_killed_is_replaced():
    worker = SiteProcess([])
    worker.command = [sys.executable, "-c", ECHO]
    assert worker.answer(b"keys") == b"keys"
    worker.stop()
    assert worker.answer(b"shares") == b"shares"
    first = worker.process
    first.kill()  # it may be gone when the request comes, or die over it
    assert worker.answer(b"train") == b"train"
    worker.stop()
    for process in (first, worker.process):
        assert process.stdin.closed and process.stdout.closed and process.returncode is not None
    worker.command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(EngineFailure, match=r"died twice over one request \(exit code 3\)"):
        worker.answer(b"train")
    worker.command = [sys.executable, "-c", "raise SystemExit(2)"]
    with pytest.raises(SystemExit, match="2"):  # such as a log that was changed: the site ends, too
        worker.answer(b"train")
    worker.stop()


LONG_WORK = """
import sys, time
from fedhelix.deploy import site_process
from fedhelix.deploy.site import Site
def answer(self, content):
    print(content.decode(), file=sys.stderr, flush=True)
    if content == b"short":
        return content
    time.sleep(300)
Site.answer = answer
site_process.main()
"""
NODE = """
import sys
from fedhelix.deploy.site_process import SiteProcess
worker = SiteProcess([])
worker.command = sys.argv[1:]
assert worker.answer(b"short") == b"short"
worker.answer(b"long")
"""


def test_a_worker_ends_with_its_node_in_the_middle_of_a_request(tmp_path):
    worker = [sys.executable, "-c", LONG_WORK, "--name", "ulm", "--data", "digits"]
    worker += ["--folder", str(tmp_path)]
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, *worker], stderr=subprocess.PIPE, text=True
    )
    assert [node.stderr.readline() for _ in range(2)] == ["short\n", "long\n"]
    node.kill()
    node.communicate(timeout=60)  # returns once the worker, too, has closed it


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs = 3", "unknown key of the policy"),
        ("max_epochs = -1", "max_epochs must be at least 0"),
        ("max_epsilon = 0", "max_epsilon must be greater than 0"),
        ('hours = "9-17"', "hours must be HH:MM-HH:MM"),
        ('hours = "20:00-20:00"', "hours = '20:00-20:00' are none; leave hours out"),
        ('methods = ["fedawg"]', "unknown method 'fedawg'"),
        ('options = ["mu"]', "options of a policy are KEY=VALUE"),
        ('options = ["noise_bye=clients"]', "unknown option of a policy 'noise_bye'; did you mean"),
        ('options = ["method.mue=1"]', "unknown option of a policy 'mue'"),
        ("max_epochs = ", "policy.toml"),
    ],
)
def test_a_policy_with_mistakes_is_refused(text, said, tmp_path):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        SitePolicy.read(tmp_path / "policy.toml")


def test_a_run_stops_with_the_sites_own_sentence(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    for site in deployment.sites:
        site.policy = SitePolicy(require_secure=True)
    with pytest.raises(
        EngineFailure, match="policy needs secure aggregation, which fedavg has not"
    ):
        deployment.fit(make_spec("fedavg", {**SMALL, "clients": 3}))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_run_whose_sites_report_no_metrics_trains_and_has_not_diverged(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    for site in deployment.sites:
        site.policy = SitePolicy(metrics=False)
    run = deployment.fit(make_spec("fedavg", {**SMALL, "clients": 3}))
    assert not any("train_loss" in record for record in run.records)
    assert run.summary["diverged"] is None
    assert run.records[-1]["missing"] == {} and set(run.records[-1]["unevaluated"]) == set("012")
    # They keep what they say nothing about.
    assert len(list(tmp_path.rglob(MODEL))) == 3


@pytest.mark.parametrize("method", ["private", "private+ancestors", "secure+private"])
def test_a_site_that_refuses_to_train_sends_no_scores_and_a_dry_run_says_so(method, tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    settings = {"method.noise_by": "clients", "method.noise": 0.5, "method.epsilon": 1e6}
    spec = make_spec(method, {**SMALL, **settings, "clients": 3, "rounds": 1})
    wary = deployment.sites[2]
    wary.policy = SitePolicy(min_noise=0.288)  # 0.5 / sqrt(3) is more
    assert list(reveals(wary, spec))
    wary.policy = SitePolicy(min_noise=0.5)
    with pytest.raises(UserError) as dry:
        list(reveals(wary, spec))
    (record,) = deployment.fit(spec).records
    assert "needs a noise of 0.5, not 0.288675 (min_noise)" in str(dry.value)
    for missing in (record["missing"], record["unevaluated"]):
        assert list(missing) == ["2"] and str(dry.value).rstrip(".") in missing["2"]
    assert len(list(tmp_path.rglob(MODEL))) == 3  # what it received, to use it


def test_a_run_that_another_run_leaves_no_budget_for_gets_no_scores(tmp_path):
    site = Site("north", "digits", tmp_path, policy=SitePolicy(total_epsilon=10))
    spec = make_spec("private", {**SMALL, "method.epsilon": 8})
    header = {"experiment": "0" * 32, "round": 0, "client": 0, "spec": json.dumps(_public(spec))}
    asked = messages.write({**header, "kind": "evaluate"}, {"payload": {}})
    assert "error" not in messages.read(site.answer(asked)).header
    site.budgets.reserve("1" * 32, spec.method)
    assert "all runs together" in messages.read(site.answer(asked)).header["error"]


def test_a_run_of_as_many_rounds_as_allowed_is_evaluated(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2)
    for site in deployment.sites:
        site.policy = SitePolicy(max_rounds=2)
    run = deployment.fit(make_spec("fedavg", {**SMALL, "clients": 2, "rounds": 2}))
    assert "unevaluated" not in run.records[-1] and len(list(tmp_path.rglob(MODEL))) == 2


def test_a_dry_run_says_what_would_leave(tmp_path, capsys, monkeypatch):
    site = Site("north", "digits", tmp_path)
    said = "\n".join(reveals(site, make_spec("fedavg", SMALL)))
    assert "650 values of 2 entries, which the server sees" in said and "training loss" in said
    assert "audit log" not in said
    said = "\n".join(reveals(site, make_spec("scaffold", SMALL)))
    assert "scaffold may pack them or add to them; the audit log names them all" in said
    assert "it has trained on, for how many seconds." in said
    said = "\n".join(reveals(site, make_spec("secure+private", SMALL)))
    assert "sum over all sites only" in said and "epsilon 8, delta 1e-05" in said
    assert "for how many seconds, and what is spent of its privacy budget." in said
    said = "\n".join(reveals(site, make_spec("clustered", SMALL)))
    assert "before the first round: print (64×5), computed from its samples; " in said
    at_night = Site("north", "digits", tmp_path, policy=SitePolicy(hours="20:00-06:00"))
    assert next(reveals(at_night, make_spec("fedavg", SMALL))).startswith("only at 20:00-06:00 by")
    silent = Site("north", "digits", tmp_path, policy=SitePolicy(hellos=False))
    with pytest.raises(UserError, match="sends nothing before the first round"):
        list(reveals(silent, make_spec("clustered", SMALL)))
    (tmp_path / "policy.toml").write_text("require_privacy = true\n")
    command = ["site", "--name", "north", "--data", "digits", "--folder", str(tmp_path)]
    command += ["--policy", str(tmp_path / "policy.toml"), "--dry-run"]
    for method, code in (("private", 0), ("fedavg", 2)):
        monkeypatch.setattr(sys, "argv", ["fedhelix", *command, method])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
    out, err = capsys.readouterr()
    assert "private may run at north" in out and "needs differential privacy" in err


@pytest.mark.parametrize("data", ["digits", "own"])
def test_a_dry_run_compares_noise_and_clip_as_the_server_will_send_them(data, tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((30, 5), np.float32), y=np.arange(30) % 3)
    source = str(tmp_path / "own.npz") if data == "own" else data
    options = {"noise_by": "clients", "noise": 2.0, "epsilon": 1e6, "clip": 3.0, "quantile": 0.5}
    settings = {**SMALL, "cohort": 2, **{f"method.{key}": options[key] for key in options}}
    config = make_spec("private", settings).as_dict()
    terms = {"deployment": {"experiment": "0" * 32, "extra": 1}}
    values = {key: value for key, value in (config | terms).items() if value is not None}
    (tmp_path / "config.toml").write_text(toml.dumps(values))
    spec, extra, experiment = asked_run(str(tmp_path), SiteCode())
    assert (extra, experiment) == (1, "0" * 32)
    with pytest.raises(UserError, match=r"there is no run folder '.*nothere'"):
        asked_run(str(tmp_path / "nothere"), SiteCode())

    def said(**rules):
        return list(reveals(Site("n", source, tmp_path, policy=SitePolicy(**rules)), spec, extra))

    assert "max_clip are refused" in str(said(min_noise=1.15, max_clip=3)) != str(said())
    with pytest.raises(UserError, match=r"needs a noise of 1.2, not 1.1547 \(min_noise\)"):
        said(min_noise=1.2)  # the noise is spread over the cohort of two and the extra client
    with pytest.raises(UserError, match=r"allows a clip of 2, not 3 \(max_clip\)"):
        said(max_clip=2)


def test_a_dry_run_counts_a_run_once_that_the_site_has_begun(tmp_path):
    run = submit.create(make_spec("private", {**SMALL, "method.epsilon": 8}), tmp_path / "run")
    site = Site("north", "digits", tmp_path, policy=SitePolicy(total_epsilon=10))
    asked = asked_run(str(run.path), SiteCode())
    assert list(reveals(site, *asked))
    site.budgets.reserve(run.config["deployment"]["experiment"], asked[0].method)
    assert list(reveals(site, *asked))
    with pytest.raises(UserError, match=r"allows 10\.0 as epsilon of all runs together, not 16"):
        list(reveals(site, asked[0]))  # another run
    with pytest.raises(UserError, match="and this one adds no noise"):
        list(reveals(site, make_spec("fedavg", SMALL)))
    begun_anew = asked_run(str(run.path / "config.toml"), SiteCode())  # with `deploy run --config`
    with pytest.raises(UserError, match=r"allows 10\.0 as epsilon of all runs together, not 16"):
        list(reveals(site, *begun_anew))


def test_the_documentation_names_every_rule():
    page = Path(__file__).parents[2] / "docs" / "deployment.md"
    if not page.exists():
        pytest.skip("not a source checkout")
    text = page.read_text()
    for field in dataclasses.fields(SitePolicy):
        assert f"| `{field.name}` | {field.metadata['meaning']} |" in text


@pytest.mark.parametrize("key", ["noise_by", "method.noise_by", "private.noise_by"])
def test_an_option_of_a_policy_may_be_written_as_the_server_writes_it(key):
    policy = SitePolicy(options=(f"{key}=clients",))
    with pytest.raises(UserError, match="needs noise_by = clients, not server"):
        policy.check_run(make_spec("private", SMALL), None)
    policy.check_run(make_spec("private", {**SMALL, "method.noise_by": "clients"}), None)


@pytest.mark.parametrize("rule", ["epsilon=8", "epsilon=8.0", "delta=0.00001", "noise=auto"])
def test_options_of_a_policy_are_compared_as_values(rule):
    SitePolicy(options=(rule,)).check_run(make_spec("private", SMALL), None)
    with pytest.raises(UserError, match="needs epsilon = 7"):
        SitePolicy(options=("epsilon=7",)).check_run(make_spec("private", SMALL), None)
