"""A short run of the fuzzers; `benchmarks/fuzz.py` is the long one."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.tree import decode, encode, flatten, load, unflatten
from fedhelix.data import from_npz
from fedhelix.runs.spec import make_spec, read_spec
from fuzz.mutations import changed_file, mutated
from helpers import same

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
MESSAGES = 250  # for each target and method


@pytest.fixture(params=["scaffold", "compact+fedavg", "clustered+feddbe"])
def targets(request, tmp_path):
    pytest.importorskip("flwr")
    from fuzz.targets import ServerTarget, SiteTarget

    server = ServerTarget(tmp_path / "server", request.param)
    return {"server": server, "site": SiteTarget(tmp_path / "site", request.param)}


@pytest.mark.filterwarnings("ignore")
def test_bad_messages_are_refused_and_nothing_else(targets):
    for target in targets.values():
        for number in range(MESSAGES):
            draw = random.Random(number)
            kind = draw.choice([*target.honest, "train", "train"])
            target.send(kind, mutated(target.example(kind), draw))
        for kind in target.honest:  # it is still as good as before
            assert target.send(kind, target.example(kind)), kind


@pytest.mark.filterwarnings("ignore")
def test_what_once_crashed_does_so_no_more(targets):
    for path in CORPUS:
        name, kind, _ = path.stem.split("-")
        if kind in targets[name].honest:
            targets[name].send(kind, path.read_bytes())


names = st.text(st.characters(exclude_characters="/", exclude_categories=("Cs",)), max_size=4)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans() | st.none()
trees = st.recursive(
    st.dictionaries(names.filter(bool), numbers, max_size=3),
    lambda inner: st.dictionaries(names.filter(bool), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@given(trees)
def test_trees_arrive_as_they_were(tree):
    assert same(decode(encode(tree)), tree) and unflatten(flatten(tree)) == tree


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_bytes_from_a_stranger_are_a_tree_or_a_sentence(tmp_path_factory, draw):
    honest = encode({"model": {"w": torch.ones(3, 2), "n": torch.tensor(3)}, "rho": 0.5})
    content = changed_file(honest, draw)
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    path.write_bytes(content)
    for read in (lambda: decode(content), lambda: load(path)):
        try:
            read()
        except UserError:
            pass


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_settings_from_a_stranger_are_a_run_or_a_sentence(tmp_path_factory, draw):
    spec = make_spec("genfed", {"rounds": 3, "clients": 4, "model": "linear"})
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(changed_file(toml.dumps(spec.as_dict()).encode(), draw))
    try:
        read_spec(toml.read(path), path)
    except UserError:
        pass


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_arrays_from_a_stranger_are_data_or_a_sentence(tmp_path_factory, draw):
    path = tmp_path_factory.getbasetemp() / "data.npz"
    np.savez(path, x=np.ones((6, 2), np.float32), y=np.arange(6) % 2)
    path.write_bytes(changed_file(path.read_bytes(), draw))
    try:
        from_npz(path)
    except UserError:
        pass


odd = st.text(max_size=8) | st.sampled_from(["..", "../run", "%2e%2e", "a/b", "\x00", "x" * 5000])


@settings(max_examples=60)
@given(st.sampled_from(["/api/runs", "/api/run", "/", "/static/", "/api/"]), odd, odd)
def test_requests_to_the_dashboard_are_answered(tmp_path_factory, path, part, value):
    testclient = pytest.importorskip("starlette.testclient")
    from fedhelix.report.server import dashboard

    root = tmp_path_factory.getbasetemp() / "runs"
    root.mkdir(exist_ok=True)
    (root.parent / "secret.txt").write_text("secret")
    client = testclient.TestClient(dashboard(root), base_url="http://localhost")
    answer = client.get(f"{path}{part}" if path.endswith("/") else path, params={"run": value})
    assert answer.status_code < 500 and "secret" not in answer.text
    assert json.dumps(answer.text)
