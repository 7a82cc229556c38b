"""A short run of the fuzzers; `benchmarks/fuzz.py` is the long one."""

import contextlib
import random
from pathlib import Path
from urllib.parse import quote

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

CORPUS = Path(__file__).parent / "corpus"
MESSAGES = 250  # for each target and method


@pytest.fixture(params=["scaffold", "compact+fedavg", "clustered+feddbe"])
def targets(request, tmp_path):
    pytest.importorskip("flwr")
    from fuzz.targets import ServerTarget, SiteTarget

    server = ServerTarget(tmp_path / "server", request.param)
    return {"server": server, "site": SiteTarget(tmp_path / "site", request.param)}


@pytest.mark.filterwarnings("ignore")
def test_bad_messages_are_refused_and_nothing_else(targets):
    for name, target in targets.items():
        for number in range(MESSAGES):
            draw = random.Random(number)
            kind = draw.choice([*target.honest, "train", "train"])
            target.send(kind, mutated(target.example(kind), draw))
        for path in CORPUS.glob(f"{name}-*.bin"):  # what once crashed does so no more
            kind = path.stem.split("-")[1]
            if kind in target.honest:
                target.send(kind, path.read_bytes())
        for kind in target.honest:  # it is still as good as before
            assert target.send(kind, target.example(kind)), kind


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
        with contextlib.suppress(UserError):
            read()


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_settings_from_a_stranger_are_a_run_or_a_sentence(tmp_path_factory, draw):
    spec = make_spec("genfed", {"rounds": 3, "clients": 4, "model": "linear"})
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(changed_file(toml.dumps(spec.as_dict()).encode(), draw))
    with contextlib.suppress(UserError):
        read_spec(toml.read(path), path)


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_arrays_from_a_stranger_are_data_or_a_sentence(tmp_path_factory, draw):
    path = tmp_path_factory.getbasetemp() / "data.npz"
    np.savez(path, x=np.ones((6, 2), np.float32), y=np.arange(6) % 2)
    path.write_bytes(changed_file(path.read_bytes(), draw))
    with contextlib.suppress(UserError):
        from_npz(path)


odd = st.text(max_size=8) | st.sampled_from(["..", "../run", "%2e%2e", "a/b", "\x00", "x" * 5000])


@pytest.fixture(scope="module")
def visitor(tmp_path_factory):
    """A visitor of a dashboard whose folder lies beside a secret."""
    testclient = pytest.importorskip("starlette.testclient")
    from fedhelix.report.server import dashboard

    root = tmp_path_factory.mktemp("dashboard") / "runs"
    root.mkdir()
    (root.parent / "secret.txt").write_text("secret")
    return testclient.TestClient(dashboard(root), base_url="http://localhost")


paths = st.sampled_from(["/api/runs", "/api/run", "/api/client", "/api/compare", "/static/", "/"])


@settings(max_examples=150)
@given(paths, odd, odd)
def test_requests_to_the_dashboard_are_answered(visitor, path, part, value):
    place = f"{path}{quote(part)}" if path.endswith("/") else path
    answer = visitor.get(place, params={"run": value, "client": part, "runs": value})
    assert answer.status_code < 500 and "secret" not in answer.text


@pytest.mark.parametrize("host", ["localhost:x", "[", "[::1", "evil.example", "127.0.0.1.evil", ""])
def test_other_hosts_are_refused_in_peace(visitor, host):
    assert visitor.get("/", headers={"host": host}).status_code in (400, 403)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "["])
def test_pages_of_others_are_refused(visitor, origin):
    assert visitor.get("/api/runs", headers={"origin": origin}).status_code == 403
    assert visitor.get("/api/runs", headers={"origin": "http://localhost"}).status_code == 200
