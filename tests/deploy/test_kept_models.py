"""Who keeps which model: every site, when its rounds are over."""

import pytest
import torch
from safetensors.torch import load_file

from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.deploy.site_state import MODEL, SiteState
from fedhelix.runs.spec import make_spec
from in_process import EXPERIMENT, InProcessDeployment, small_images

SMALL = {
    "clients": 3, "rounds": 4, "epochs": 1, "batch_size": 32, "kernels": "onednn",
    "model": "digits-cnn", "partition": "iid",
}  # fmt: skip
NEW = {"clients": 2, "newcomers": 1, "newcomers_after": 3, "eval_every": 2}


def in_simulation(spec, rounds):
    """Every client's model when its rounds are over."""
    fed = spec.config.federation(spec.method, engine="serial")
    models = {}
    for _, state in fed.run_rounds(spec.config.rounds):
        if state.round in rounds:
            ctx = fed.context(state.round - 1, state.round)
            tasks = fed.tasks(state, ctx.present, ctx)
            personal = fed.engine.personal(tasks)
            models |= {t.client: p.state for t, p in zip(tasks, personal, strict=True)}
    return models


@pytest.mark.parametrize("method", ["fedper", "finish"])
def test_known_sites_keep_the_model_of_their_last_round(method, tmp_path, capfd):
    """Also where that round is not evaluated, and with what they make of it in the end."""
    data = small_images(tmp_path)
    spec = make_spec(method, {**SMALL, **NEW, "data": data})
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    deployment.sites[1].policy = SitePolicy(metrics=False)
    deployment.fit(spec)
    expected = in_simulation(spec, (3, 4))
    for client in range(3):
        place, rounds = tmp_path / "kept" / EXPERIMENT / f"site-{client}", 4 if client == 2 else 3
        kept = load_file(place / MODEL)
        assert kept.keys() == expected[client].keys()
        assert all(torch.equal(kept[name], value) for name, value in expected[client].items())
        assert SiteState(place).used()[0]["round"] == rounds
    said = capfd.readouterr().err
    assert said.count("after round 3: the site keeps its model of this run") == 2
    assert said.count("after round 4: the site keeps its model of this run") == 1


@pytest.mark.parametrize("count", [0, 1])
def test_sites_that_are_not_evaluated_keep_their_models_too(count, tmp_path):
    data = small_images(tmp_path)
    spec = make_spec("fedavg", {**SMALL, "rounds": 2, "data": data, "eval_clients": count})
    run = InProcessDeployment(tmp_path, 3, data, common=True).fit(spec)
    assert len(run.records[-1].get("personal", [])) == count
    for client in range(3):
        kept = load_file(tmp_path / "kept" / EXPERIMENT / f"site-{client}" / MODEL)
        assert all(torch.equal(kept[n], v) for n, v in run.model().state_dict().items())


@pytest.mark.filterwarnings("ignore:the budget epsilon")
def test_sites_keep_their_models_of_a_run_that_ends_with_its_budget(tmp_path, capfd):
    pytest.importorskip("dp_accounting")
    data = small_images(tmp_path)
    spec = make_spec("secure+private", {**SMALL, "data": data, "method.noise": 1.0})
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    with pytest.warns(UserWarning, match="the run ends after round 2: the budget epsilon = 8"):
        run = deployment.fit(spec)
    assert len(run.records) == 2
    assert capfd.readouterr().err.count("after round 2: the site keeps its model of this run") == 3
    for client in range(3):
        kept = load_file(tmp_path / "kept" / EXPERIMENT / f"site-{client}" / MODEL)
        assert all(torch.equal(kept[n], v) for n, v in run.model().state_dict().items())
