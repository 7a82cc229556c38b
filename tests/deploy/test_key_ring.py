"""Signed masking keys: whatever a server swaps, a site that knows its peers notices."""

import dataclasses

import pytest
import torch

from fedhelix import UserError
from fedhelix.components.secure_sum import KEY, SIGNATURE
from fedhelix.deploy import messages
from fedhelix.deploy.key_ring import KEYS, SIGNED, KeyRing
from fedhelix.deploy.keys import make_site_key
from fedhelix.deploy.masked import Masker
from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.runs.spec import make_spec
from in_process import InProcessDeployment


@pytest.fixture
def rings(tmp_path):
    """Four sites that know each other, and a stranger."""
    paths = [make_site_key(tmp_path / "peers", f"site-{i}") for i in range(4)]
    stranger = KeyRing(make_site_key(tmp_path / "other", "server"))
    return [KeyRing(path, tmp_path / "peers") for path in paths], stranger


def signed(rings):
    return {i: ring.signed(KEYS, "run 3", i, bytes([i]) * 2 * KEY) for i, ring in enumerate(rings)}


def test_honest_keys_pass(rings):
    ring, keys = rings[0][0], signed(rings[0])
    assert all(len(text) == SIGNED for text in keys.values())
    assert ring.checked(KEYS, "run 3", keys) == {i: bytes([i]) * 2 * KEY for i in range(4)}


@pytest.mark.parametrize("place", [0, KEY, 2 * KEY, SIGNED - 1])
def test_a_changed_byte_is_found(rings, place):
    keys = signed(rings[0])
    text = bytearray(keys[2])
    text[place] ^= 1
    with pytest.raises(UserError, match="no trusted site has signed the masking keys of client 2"):
        rings[0][0].checked(KEYS, "run 3", {**keys, 2: bytes(text)})


def test_keys_of_the_server_of_other_rounds_and_of_other_clients_are_found(rings):
    (first, *others), stranger = rings
    keys, plain = signed(rings[0]), bytes([2]) * 2 * KEY
    for wrong in (
        stranger.signed(KEYS, "run 3", 2, plain),
        others[1].signed(KEYS, "run 2", 2, plain),
        keys[1],
        plain + bytes(SIGNATURE),
    ):
        with pytest.raises(UserError, match="masking keys of client 2"):
            first.checked(KEYS, "run 3", {**keys, 2: wrong})


def test_a_site_without_the_key_of_another_one_says_which_file_goes_where(rings, tmp_path):
    (tmp_path / "peers/site-2.pub").unlink()
    lacking = KeyRing(None, tmp_path / "peers")
    remedy = (
        rf"of client 2; put the public key SITE\.pub of every site of the run into "
        rf"'{tmp_path}/peers' \(peers; there are site-0, site-1, site-3\) and start this site again"
    )
    with pytest.raises(UserError, match=remedy):
        lacking.checked(KEYS, "run 3", signed(rings[0]))


def test_a_key_of_another_site_that_may_be_outdated_is_named(rings):
    keys = {**signed(rings[0]), 2: rings[1].signed(KEYS, "run 3", 2, bytes([2]) * 2 * KEY)}
    with pytest.raises(UserError, match="site-3; nothing is signed with that of site-2, perhaps"):
        rings[0][0].checked(KEYS, "run 3", keys)


def test_a_site_that_signs_for_two_clients_is_found(rings):
    """One that colludes with the server could else stand for all others."""
    keys = signed(rings[0])
    twice = rings[0][1].signed(KEYS, "run 3", 2, bytes(2 * KEY))
    with pytest.raises(UserError, match="site-1 has signed the masking keys of clients 1 and 2"):
        rings[0][0].checked(KEYS, "run 3", {**keys, 2: twice})


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"no public keys SITE\.pub in"):
        KeyRing(None, tmp_path)
    (tmp_path / "x.pub").write_text("nonsense")
    with pytest.raises(UserError, match="cannot be read as a public key"):
        KeyRing(None, tmp_path)


def test_a_policy_names_the_folder_from_where_it_lies(tmp_path):
    (tmp_path / "policy.toml").write_text('peers = "peers"')
    assert SitePolicy.read(tmp_path / "policy.toml").peers == str(tmp_path / "peers")


def test_sites_with_peers_finish_a_round_and_notice_a_server_that_swaps_keys(tmp_path):
    deployment = InProcessDeployment(tmp_path, 4)
    for number, site in enumerate(deployment.sites):
        key = make_site_key(tmp_path / "peers", f"site-{number}")
        site.key = key
    for site in deployment.sites:
        site.policy = dataclasses.replace(site.policy, peers=str(tmp_path / "peers"))
        site._masker = Masker(KeyRing(site.key, site.policy.peers))
    settings = {"data": "digits", "clients": 4, "cohort": 4, "rounds": 1, "model": "linear"}
    spec = make_spec("secure", {**settings, "kernels": "onednn"})
    honest = deployment.fit(spec)
    assert honest.records[0]["missing"] == {}
    site = deployment.sites[0]

    def swapped(content):
        header, body = messages.read(content)
        if header["kind"] == "masking_shares":
            body["keys"]["2"] = torch.zeros(SIGNED, dtype=torch.uint8)
            content = messages.write(header, body)
        return site.answer(content)

    deployment.grid.answers[101] = swapped
    (record, _), *_ = deployment.federation(spec, "f" * 32).run_rounds(1)
    said = record["missing"]["0"]
    assert "no trusted site has signed the masking keys of client 2" in said
