"""Secure aggregation: sums are exact under any drop-outs, and single uploads look like noise."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedhelix import UserError
from fedhelix.components.masking import (
    MaskingClient,
    Unmasking,
    common_view,
    join_shares,
    mask,
    neighbours,
    pair_mask,
    split_secret,
)
from fedhelix.components.secure_sum import (
    DIGEST,
    SHARE,
    SIGNATURE,
    from_words,
    protocol_bytes,
    shares_needed,
    sum_words,
    to_words,
    units,
)

COUNT = 50


def words(client, count=COUNT):
    draw = np.random.default_rng(client)
    return draw.integers(0, 1 << 32, count, dtype=np.uint32)


def secure_sum(number, silent, degree=None, threshold=2 / 3):
    """The protocol with clients that fall silent before a stage: keys, shares, upload, unmask."""
    clients = {i: MaskingClient(i, "round 7", threshold, degree) for i in range(number)}

    def there(stage):
        return [i for i in clients if silent.get(i, 9) > stage]

    keys = {i: clients[i].advertise() for i in there(0)}
    shares = {i: clients[i].share(keys) for i in there(1)}
    uploads = {}
    for i in there(2):
        received = {j: sent[i] for j, sent in shares.items() if i in sent}
        uploads[i] = clients[i].upload(words(i), received)
    revealed = {i: clients[i].reveal(uploads) for i in there(3)}
    whole = Unmasking("round 7", threshold, degree, keys, list(shares))
    weight = sum(len(key) + SIGNATURE for key in keys.values()) * (1 + len(keys))
    weight += 2 * sum(len(text) for sent in shares.values() for text in sent.values())
    weight += len(uploads) * (DIGEST + SIGNATURE) * (1 + len(uploads))
    weight += sum(len(text) for sent in revealed.values() for text in sent.values())
    return whole.total(uploads, revealed), uploads, weight


def plain_sum(clients):
    return np.sum([words(i) for i in clients], axis=0, dtype=np.uint32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_sum_is_exact_under_any_two_drop_outs_at_any_stage(stage):
    """Of six clients four are needed; those who drop out after their upload are in the sum."""
    for gone in itertools.chain([()], itertools.combinations(range(6), 2)):
        silent = dict.fromkeys(gone, stage)
        total, uploads, _ = secure_sum(6, silent, threshold=0.5)
        left = range(6) if stage == 3 else [i for i in range(6) if i not in gone]
        assert set(uploads) == set(left)
        assert np.array_equal(total, plain_sum(left))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_the_sum_is_exact_under_drop_outs_at_mixed_stages(data):
    number = data.draw(st.integers(3, 9))
    most = number - shares_needed(number, 0.6)
    gone = data.draw(st.lists(st.integers(0, number - 1), unique=True, max_size=most))
    silent = {i: data.draw(st.integers(0, 3)) for i in gone}
    total, uploads, _ = secure_sum(number, silent, threshold=0.6)
    assert np.array_equal(total, plain_sum(uploads))


def test_on_a_ring_of_neighbours_sums_are_exact_too():
    total, uploads, _ = secure_sum(12, {3: 2, 8: 3}, degree=6, threshold=0.6)
    assert len(uploads) == 11 and np.array_equal(total, plain_sum(uploads))
    rings = [neighbours(i, range(12), 6, "round 7") for i in range(12)]
    assert all(len(ring) == 6 and i not in ring for i, ring in enumerate(rings))
    assert all((j in rings[i]) == (i in rings[j]) for i in range(12) for j in range(12))
    assert rings != [neighbours(i, range(12), 6, "round 8") for i in range(12)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_below_the_threshold_there_is_no_sum(stage):
    with pytest.raises(UserError, match=r"needed|needs"):
        secure_sum(6, dict.fromkeys((0, 1, 4), stage))


def test_a_server_that_calls_most_clients_lost_gets_nothing():
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(3)}
    keys = {i: client.advertise() for i, client in clients.items()}
    shares = {i: client.share(keys) for i, client in clients.items()}
    for i, client in clients.items():
        client.upload(words(i), {j: sent[i] for j, sent in shares.items() if i in sent})
    with pytest.raises(UserError, match="a sum over 1 clients would say too much"):
        clients[0].reveal([0])
    with pytest.raises(UserError, match="says that this client has not answered"):
        clients[0].reveal([1, 2])  # it would give away its own key


def test_shares_that_were_changed_or_misdirected_are_refused():
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(3)}
    keys = {i: client.advertise() for i, client in clients.items()}
    shares = {i: client.share(keys) for i, client in clients.items()}
    changed = bytes([shares[1][0][0] ^ 1]) + shares[1][0][1:]
    for wrong in ({1: changed, 2: shares[2][0]}, {1: shares[1][2], 2: shares[2][0]}):
        with pytest.raises(UserError, match="shares of client 1 are damaged"):
            clients[0].upload(words(0), wrong)
    with pytest.raises(UserError, match="client 7 is no neighbour"):
        clients[0].upload(words(0), {7: changed})


def test_a_single_upload_is_uniform_whatever_is_in_it():
    """Chi-square over bytes at each position of a word, of an upload of zeros."""
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(3)}
    keys = {i: client.advertise() for i, client in clients.items()}
    shares = {i: client.share(keys) for i, client in clients.items()}
    received = {j: sent[0] for j, sent in shares.items() if 0 in sent}
    upload = clients[0].upload(np.zeros(60_000, np.uint32), received)
    for column in upload.view(np.uint8).reshape(-1, 4).T:
        assert stats.chisquare(np.bincount(column, minlength=256)).pvalue > 1e-4
    seen = np.bincount(words(0, 60_000).view(np.uint8) | 1, minlength=256)
    assert stats.chisquare(seen).pvalue < 1e-6  # the test would see one bit that is always set
    correlation = np.corrcoef(upload[:-1].astype(float), upload[1:].astype(float))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(len(upload))


def test_two_sites_that_collude_with_the_server_learn_nothing_of_a_third():
    """Of five, 0 and 1 tell the server all their secrets; 2's upload of zeros stays uniform."""
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(5)}
    keys = {i: client.advertise() for i, client in clients.items()}
    shares = {i: client.share(keys) for i, client in clients.items()}
    received = {
        i: {j: sent[i] for j, sent in shares.items() if i in sent} for i in clients
    }  # fmt: skip
    upload = clients[2].upload(np.zeros(60_000, np.uint32), received[2])
    for evil in (0, 1):  # take off the masks that they know
        secret = clients[evil]._mask_key
        view = common_view("round", keys)
        upload = upload + pair_mask(secret, keys[2][:32], evil, 2, view, upload)
        clients[evil].upload(np.zeros(1, np.uint32), received[evil])
    for column in upload.view(np.uint8).reshape(-1, 4).T:
        assert stats.chisquare(np.bincount(column, minlength=256)).pvalue > 1e-4
    held = {evil: clients[evil]._held[2] for evil in (0, 1)}
    for half in (slice(None, SHARE), slice(SHARE, None)):
        known = {evil: text[half] for evil, text in held.items()}
        with pytest.raises(UserError, match="4 shares are needed to unmask, and 2 are there"):
            join_shares(known, shares_needed(5, 2 / 3))


def test_masks_use_all_bits_of_the_key():
    key = bytes(range(32))
    row = np.zeros(8, np.uint32)
    plain = mask(key, row)
    for bit in range(256):
        changed = bytearray(key)
        changed[bit // 8] ^= 1 << bit % 8
        assert not np.array_equal(mask(bytes(changed), row), plain)


def test_a_mask_is_chacha20s_key_stream():
    """RFC 8439, A.1, test vector 1: key and nonce of zeros."""
    assert mask(bytes(32), np.zeros(2, np.uint32)).tobytes().hex() == "76b8e0ada0f13d90"


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.data())
def test_any_shares_up_to_the_threshold_give_the_secret(secret, threshold, data):
    shares = split_secret(secret, range(6), threshold)
    some = data.draw(st.permutations(range(6)))[:threshold]
    assert join_shares({i: shares[i] for i in some}, threshold) == secret
    with pytest.raises(UserError, match=f"{threshold} shares are needed"):
        join_shares({i: shares[i] for i in some[1:]}, threshold)


def test_shamirs_shares_by_hand(monkeypatch):
    """Secret 5 with the slope 3: 5 + 3 x at x = 1, 2, 3."""
    monkeypatch.setattr("secrets.randbelow", lambda _: 3)
    shares = split_secret((5).to_bytes(32, "big"), [0, 1, 2], 2)
    assert [int.from_bytes(share, "big") for share in shares.values()] == [8, 11, 14]
    with pytest.raises(UserError, match="4 of 3 shares"):
        split_secret(bytes(32), [0, 1, 2], 4)


def test_bytes_are_counted_as_they_travel():
    assert secure_sum(6, {})[2] == protocol_bytes(6, None, 6)
    assert secure_sum(9, {}, degree=4)[2] == protocol_bytes(9, 4, 9)


def test_words_by_hand():
    """At a bound of 2 a value of 1 is half of 2^30, of which a client sends its share."""
    values, draw = torch.tensor([1.0, -1.0, 5.0]), torch.Generator()
    for bits, most in ((8, 1 << 6), (16, 1 << 14), (32, 1 << 30)):
        row = to_words(values, 0.5, 2.0, bits, draw)
        assert row.element_size() == bits // 8
        assert row.tolist() == [most // 4, -most // 4, most // 2]
        assert from_words(row, 0.5, 2.0).tolist() == [1.0, -1.0, 2.0]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, math.nan])
def test_no_share_beyond_the_whole(share):
    with pytest.raises(UserError, match="above 0 and at most 1"):
        to_words(torch.ones(1), share, 1.0, 32, torch.Generator())


def test_masks_cancel_between_clients_of_one_task_and_one_set_of_keys_only():
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(3)}
    keys = {i: client.advertise() for i, client in clients.items()}
    views = {common_view("round", keys), common_view("round", keys, b"model"),
             common_view("round", {0: keys[0], 1: keys[1]}), common_view("next", keys)}  # fmt: skip
    assert len(views) == 4
    shares = {i: client.share(keys) for i, client in clients.items()}
    assert clients[0].share(keys) == shares[0]  # else one key would encrypt two messages
    with pytest.raises(UserError, match="made once"):
        clients[0].share({0: keys[0], 1: keys[1]})
    uploads = {}
    for i, client in clients.items():
        received = {j: sent[i] for j, sent in shares.items() if i in sent}
        uploads[i] = client.upload(words(i), received, b"model" if i else b"another")
    revealed = {i: client.reveal(uploads) for i, client in clients.items()}
    whole = Unmasking("round", 2 / 3, None, keys, list(shares), b"model")
    assert not (whole.total(uploads, revealed) == plain_sum(clients)).any()


def test_who_holds_few_shares_needs_as_many_answers_as_the_others():
    """A server that passes on six of nine shares would else unmask with four answers."""
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(9)}
    keys = {i: client.advertise() for i, client in clients.items()}
    shares = {i: client.share(keys) for i, client in clients.items()}
    clients[0].upload(words(0), {j: shares[j][0] for j in range(1, 6)})
    with pytest.raises(UserError, match="a sum over 5 clients would say too much of each; 6"):
        clients[0].reveal([0, 1, 2, 3, 4])


def test_rounding_is_right_in_the_mean():
    """A quarter of a step is rounded up once in four times: 25,000 of 100,000, give or take 5
    standard deviations.
    """
    values = torch.full((100_000,), 2.0**-8)
    row = to_words(values, 1.0, 1.0, 8, torch.Generator().manual_seed(0))
    assert set(row.tolist()) == {0, 1}
    assert abs(int(row.long().sum()) - 25_000) < 5 * math.sqrt(100_000 * 0.25 * 0.75)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 1000), st.sampled_from([8, 16, 32]))
def test_sums_of_words_are_means_up_to_rounding(clients, seed, bits):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(clients, 9, generator=draw)
    shares = torch.rand(clients, generator=draw).double() + 0.01
    shares /= shares.sum()

    def mean_of(rows):
        pairs = zip(rows, shares.tolist(), strict=True)
        words = [to_words(row, share, 8.0, bits, draw) for row, share in pairs]
        return from_words(sum_words(words), 1.0, 8.0)

    expected = (values.double() * shares[:, None]).sum(0)
    worst = clients * 8.0 / units(bits) + 1e-6
    assert (mean_of(values) - expected).abs().max() <= worst
    extreme = torch.tensor([99.0, -99.0]).expand(clients, 2)
    assert mean_of(extreme).tolist() == pytest.approx([8.0, -8.0], abs=worst)


@pytest.mark.parametrize("bits", [8, 16])
def test_short_words_are_summed_exactly_under_masks(bits):
    """The sum modulo 2^bits, with a client that drops out after sharing keys."""
    clients = {i: MaskingClient(i, "round", 2 / 3) for i in range(5)}
    plain = {i: words(i).astype(f"u{bits // 8}") for i in clients}
    keys = {i: client.advertise() for i, client in clients.items()}
    shares = {i: client.share(keys) for i, client in clients.items()}
    uploads = {
        i: clients[i].upload(plain[i], {j: sent[i] for j, sent in shares.items() if i in sent})
        for i in (0, 1, 3, 4)
    }
    assert all(row.dtype == plain[0].dtype for row in uploads.values())
    revealed = {i: clients[i].reveal(uploads) for i in uploads}
    total = Unmasking("round", 2 / 3, None, keys, list(shares)).total(uploads, revealed)
    expected = sum(plain[i].astype(int) for i in uploads) % (1 << bits)
    assert np.array_equal(total, expected)
