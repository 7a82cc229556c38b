"""Secure aggregation after SecAgg+ (Bell et al. 2020): masks that cancel, and shares of their keys.

Every two neighbours agree on a mask that one adds and the other subtracts, and every client adds
one of its own. Shares of both secrets lie with its neighbours: of a client that dropped out they
give the key, of one that answered its own mask, never both.

Masks cancel only between clients that know the same keys and worked on the same task: a server
that tells them different things gets noise.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedhelix.components.secure_sum import KEY, SHARE, shares_needed
from fedhelix.core.errors import UserError

PRIME = (1 << 521) - 1  # a Mersenne prime, far above a secret of 256 bits
ONCE = bytes(12)  # the nonce: every key encrypts one message only

Shares = dict[int, bytes]  # by the client that holds them
Words = np.ndarray  # unsigned, of 8, 16 or 32 bits


def neighbours(client: int, members: Iterable[int], degree: int | None, purpose: str) -> list[int]:
    """A client's neighbours on a ring that each round orders anew; None: everybody else."""
    ring = sorted(members, key=lambda i: hashlib.sha256(f"{purpose} {i}".encode()).digest())
    if degree is None or degree >= len(ring) - 1:
        return sorted(other for other in ring if other != client)
    place = ring.index(client)
    steps = [step for half in range(1, degree // 2 + 1) for step in (-half, half)]
    return sorted(ring[(place + step) % len(ring)] for step in steps)


# Secrets in shares ------------------------------------------------------------------------------


def split_secret(secret: bytes, holders: Sequence[int], threshold: int) -> Shares:
    """Shamir's shares: so many of them give the secret, fewer say nothing about it."""
    if not 1 <= threshold <= len(holders):
        raise UserError(f"{threshold} of {len(holders)} shares cannot be needed.")
    first = int.from_bytes(secret, "big")
    terms = [first, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {
        holder: _polynomial(terms, holder + 1).to_bytes(SHARE, "big")
        for holder in holders
    }  # fmt: skip


def _polynomial(terms: Sequence[int], place: int) -> int:
    value = 0
    for term in reversed(terms):
        value = (value * place + term) % PRIME
    return value


def join_shares(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret behind shares; UserError if they are too few."""
    if len(shares) < threshold:
        raise UserError(f"{threshold} shares are needed to unmask, and {len(shares)} are there.")
    points = [
        (holder + 1, int.from_bytes(share, "big"))
        for holder, share in sorted(shares.items())[:threshold]
    ]
    secret = 0
    for place, value in points:
        others = [other for other, _ in points if other != place]
        above = math.prod(others) % PRIME
        below = math.prod(other - place for other in others) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    if secret >= 1 << 8 * KEY:
        raise UserError("the shares do not belong together.")
    return secret.to_bytes(KEY, "big")


# Keys and masks ---------------------------------------------------------------------------------


def agreed_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """The 256-bit key that two clients have for a purpose; everything in it comes from both."""
    exchanged = X25519PrivateKey.from_private_bytes(private).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    return HKDF(SHA256(), KEY, salt=None, info=purpose.encode()).derive(exchanged)


def public_key(private: bytes) -> bytes:
    """The public half of a key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def mask(key: bytes, like: Words) -> Words:
    """Uniform words like the given ones in number and size, the key stream of ChaCha20."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(like.nbytes)), dtype=like.dtype.newbyteorder("<"))


def pair_mask(
    private: bytes, public: bytes, mine: int, other: int, purpose: str, like: Words
) -> Words:
    """The mask between two clients as the first one adds it; the other adds its negative."""
    words = mask(agreed_key(private, public, f"mask {purpose}"), like)
    return words if mine < other else np.negative(words)


def common_view(purpose: str, keys: Mapping[int, bytes], task: bytes = b"") -> str:
    """What clients have in common whose masks cancel: the round, all keys, and their task."""
    told = hashlib.sha256()
    for client, key in sorted(keys.items()):
        told.update(client.to_bytes(8, "big") + key)
    return f"{purpose} {told.hexdigest()} {task.hex()}"


# A client's part --------------------------------------------------------------------------------


@dataclass
class MaskingClient:
    """A client's secrets in one round; `purpose` names the round, for keys that fit no other."""

    client: int
    purpose: str
    threshold: float  # share of those who hold shares of a secret that must answer
    degree: int | None = None  # neighbours of a client; None: everybody
    _mask_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY), repr=False)
    _share_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY), repr=False)
    _own: bytes = field(default_factory=lambda: secrets.token_bytes(KEY), repr=False)
    _keys: dict[int, bytes] = field(default_factory=dict)
    _sent: Shares = field(default_factory=dict, repr=False)
    _held: dict[int, bytes] = field(default_factory=dict, repr=False)

    def advertise(self) -> bytes:
        """Its two public keys: for masks, and for shares."""
        return public_key(self._mask_key) + public_key(self._share_key)

    def share(self, keys: Mapping[int, bytes]) -> Shares:
        """Encrypted shares of its secrets for its neighbours, given everybody's keys; asked again,
        it sends the same, and for other keys none.
        """
        if self._sent and keys == self._keys:
            return self._sent
        if self._sent:
            raise UserError("shares of a round are made once, and were made for other keys.")
        self._keys = dict(keys)
        parts = [
            split_secret(secret, self._holders, self.needed)
            for secret in (self._mask_key, self._own)
        ]
        plain = {holder: parts[0][holder] + parts[1][holder] for holder in self._holders}
        self._held = {self.client: plain.pop(self.client)}
        self._sent = {
            other: ChaCha20Poly1305(self._key_for(self.client, other)).encrypt(ONCE, text, None)
            for other, text in plain.items()
        }
        return self._sent

    @property
    def _holders(self) -> list[int]:
        """Who holds shares of its secrets: its neighbours, and itself."""
        return [*neighbours(self.client, self._keys, self.degree, self.purpose), self.client]

    @property
    def needed(self) -> int:
        """How many of them must stay."""
        return shares_needed(len(self._holders), self.threshold)

    @property
    def view(self) -> str:
        """What it was told about the round."""
        return common_view(self.purpose, self._keys)

    def upload(self, words: Words, received: Mapping[int, bytes], task: bytes = b"") -> Words:
        """Words under the masks with all neighbours whose shares came, and its own; `task` stands
        for all that the words were computed from, besides a client's own samples.
        """
        self.receive(received)
        total, view = words + mask(self._own, words), common_view(self.purpose, self._keys, task)
        for other in received:
            public = self._keys[other][:KEY]
            total += pair_mask(self._mask_key, public, self.client, other, view, words)
        return total

    def receive(self, received: Mapping[int, bytes]) -> None:
        """Open the shares of its neighbours; UserError if too few have come for a sum."""
        if strange := set(received) - set(self._holders[:-1]):
            raise UserError(f"client {min(strange)} is no neighbour whose shares could come.")
        if len(received) + 1 < self.needed:
            raise UserError(
                f"secure aggregation needs {self.needed} clients that share keys, and "
                f"{len(received) + 1} are there."
            )
        for other, text in received.items():
            try:
                key = self._key_for(other, self.client)
                self._held[other] = ChaCha20Poly1305(key).decrypt(ONCE, text, None)
            except InvalidTag:
                raise UserError(f"the shares of client {other} are damaged.") from None

    def reveal(self, survivors: Iterable[int]) -> Shares:
        """Of everybody whose shares it holds one: of its own mask if it answered, else of its
        key.
        """
        answered = set(survivors)
        if self.client not in answered:
            raise UserError("the server says that this client has not answered, and it has.")
        if (there := len(answered & self._held.keys())) < self.needed:
            raise UserError(
                f"a sum over {there} clients would say too much of each; {self.needed} are needed."
            )
        return {
            other: shares[SHARE:] if other in answered else shares[:SHARE]
            for other, shares in self._held.items()
        }

    def _key_for(self, sender: int, receiver: int) -> bytes:
        other = receiver if sender == self.client else sender
        purpose = f"shares {self.view} {sender} {receiver}"
        return agreed_key(self._share_key, self._keys[other][KEY:], purpose)


# The server's part ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unmasking:
    """What the server knows of a round: keys, and who shared them."""

    purpose: str
    threshold: float
    degree: int | None
    keys: Mapping[int, bytes]  # of all who advertised theirs
    sharing: Sequence[int]  # of those, who sent shares
    task: bytes = b""  # as clients have it

    def total(self, uploads: Mapping[int, Words], revealed: Mapping[int, Shares]) -> Words:
        """The sum of the words behind the uploads; `revealed` is by who answered, then by whose
        secret it is.
        """
        rows = np.stack(list(uploads.values()))
        total: Words = rows.sum(0, dtype=rows.dtype)
        view = common_view(self.purpose, self.keys, self.task)
        for client in self.sharing:
            around = neighbours(client, self.keys, self.degree, self.purpose)
            masked = {other for other in around if other in uploads}
            if client not in uploads and not masked:
                continue  # nobody added a mask with it
            shares = {
                holder: revealed[holder][client]
                for holder in (*around, client)
                if client in revealed.get(holder, {})
            }
            secret = join_shares(shares, shares_needed(len(around) + 1, self.threshold))
            if client in uploads:
                total -= mask(secret, total)
                continue
            if public_key(secret) != self.keys[client][:KEY]:
                raise UserError(f"the shares of client {client}'s key do not fit it.")
            for other in masked:  # what it would have added cancels what the other one did
                public = self.keys[other][:KEY]
                total += pair_mask(secret, public, client, other, view, total)
        return total
