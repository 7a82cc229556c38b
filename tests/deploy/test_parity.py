"""Every method gives the same server model across sites as in the simulation."""

import pytest

pytest.importorskip("flwr")

from fedhelix import METHODS
from fedhelix.deploy.post import Post
from fedhelix.deploy.roster import Roster
from fedhelix.deploy.server import deployed
from fedhelix.deploy.site import Site
from fedhelix.deploy.terms import Terms
from fedhelix.runs.config import make_plan
from helpers import close, timeless
from nearby import Nearby

SITES = 3


def test_probe(tmp_path):
    plan = make_plan("fedavg", {"clients": 3, "rounds": 3, "kernels": "onednn", "epochs": 1, "model": "linear"})
    sites = [Site(f"site-{n}", "digits", tmp_path / str(n)) for n in range(SITES)]
    post = Post(Nearby(*(site.answer for site in sites)), Terms(interval=0.001, deadline=60))
    post.gather(3)
    roster = Roster(None, 3)
    roster.enrol(post.cards, post.connected)
    fed = deployed(plan, post, roster, "x1")
    run = fed.fit(3, quiet=True)
    sim = plan.config.federation(plan.method).fit(3, quiet=True)
    print(run.records[-1], sim.records[-1])
    assert close(run.standing.server["model"], sim.standing.server["model"])
