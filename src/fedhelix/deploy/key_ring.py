"""What sites sign for each other, so that a server cannot tell them different things: their masking
keys, and who has answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from fedhelix.components.secure_sum import KEY, SIGNATURE
from fedhelix.core.errors import UserError
from fedhelix.deploy.keys import read_private_key, read_public_key

ALGORITHM = ec.ECDSA(SHA256())
HALF = SIGNATURE // 2
SIGNED = 2 * KEY + SIGNATURE  # bytes of a client's masking keys as they travel
KEYS, ANSWERS = "masking keys", "list of answers"  # what is signed


class KeyRing:
    """A site's own key, and the public keys of the sites whose masks it trusts.

    Without public keys whatever the server passes on is taken; without an own key nothing is
    signed.
    """

    def __init__(self, key: Path | None = None, peers: Path | str | None = None):
        self._own = None if key is None else read_private_key(key)
        self._folder = peers
        self._peers: dict[str, ec.EllipticCurvePublicKey] | None = None
        if peers is not None:
            self._peers = read_peers(Path(peers))

    def signed(self, what: str, purpose: str, client: int, content: bytes) -> bytes:
        """What a client tells the others, with its site's signature; zeros where it has no key."""
        if self._own is None:
            return content + bytes(SIGNATURE)
        signature = self._own.sign(_statement(what, purpose, client, content), ALGORITHM)
        return content + b"".join(
            part.to_bytes(HALF, "big") for part in decode_dss_signature(signature)
        )

    def checked(self, what: str, purpose: str, signed: Mapping[int, bytes]) -> dict[int, bytes]:
        """What the clients told, each signed by another trusted site."""
        plain = {client: text[:-SIGNATURE] for client, text in signed.items()}
        if self._peers is None:
            return plain
        found = {
            client: self._signer(
                _statement(what, purpose, client, plain[client]), text[-SIGNATURE:]
            )
            for client, text in signed.items()
        }
        silent = ", ".join(site for site in self._peers if site not in found.values())
        signers: dict[str, int] = {}
        for client, site in found.items():
            if site is None:
                old = (
                    f"; nothing is signed with that of {silent}, perhaps an old one"
                    if silent
                    else ""
                )
                raise UserError(
                    f"no trusted site has signed the {what} of client {client}; put the public key "
                    f"SITE.pub of every site of the run into '{self._folder}' (peers; there are "
                    f"{', '.join(self._peers)}{old}) and start this site again."
                )
            if site in signers:
                raise UserError(
                    f"{site} has signed the {what} of clients {signers[site]} and {client}."
                )
            signers[site] = client
        return plain

    def _signer(self, statement: bytes, signature: bytes) -> str | None:
        halves = (signature[:HALF], signature[HALF:])
        encoded = encode_dss_signature(*(int.from_bytes(half, "big") for half in halves))
        for site, key in (self._peers or {}).items():
            try:
                key.verify(encoded, statement, ALGORITHM)
            except InvalidSignature:
                continue
            return site
        return None


def read_peers(folder: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """The public keys SITE.pub in a folder, by site."""
    found = {}
    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}' (peers).")
    for path in sorted(folder.glob("*.pub")):
        key = load_pem_public_key(read_public_key(path))
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.key_size != 8 * HALF:
            raise UserError(f"'{path}' is no key of a site; they come from `fedhelix deploy keys`.")
        found[path.stem] = key
    if not found:
        raise UserError(f"there are no public keys SITE.pub in '{folder}' (peers).")
    return found


def _statement(what: str, purpose: str, client: int, content: bytes) -> bytes:
    """What is signed: it is good for one client in one round."""
    return f"fedhelix {what}, {purpose}, client {client}: ".encode() + content
