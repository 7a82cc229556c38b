"""Certificates and keys: one authority and one server certificate, and a key pair for every site."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.deploy.messages import NAME

DAYS = 825  # the longest that common software accepts


def make_certificates(folder: Path, hosts: Iterable[str]) -> None:
    """An authority (ca.pem) and a certificate for the server (server.pem, server.key); what is
    there stays.
    """
    wanted = [_subject_name(host) for host in hosts]
    if (folder / "server.pem").exists():  # it is written last
        certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
        known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for name in wanted:
            if name not in list(known):
                raise UserError(
                    f"the certificate in '{folder}' is not for {name.value}; make one in another folder, or delete "
                    "server.pem, and give every site the new ca.pem."
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhelix deployment")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhelix server")])
    names = list(dict.fromkeys([*map(_subject_name, ("localhost", "127.0.0.1", "::1")), *wanted]))
    usage = {"digital_signature": True, "content_commitment": False, "key_encipherment": False}
    usage |= {
        "data_encipherment": False,
        "key_agreement": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    leaf = (
        _certificate(subject, issuer, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage, key_cert_sign=False, crl_sign=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
    )
    # The authority's own key is thrown away: nobody can make further certificates with it.
    pem = serialization.Encoding.PEM
    write_atomically(folder / "ca.pem", root.sign(authority, hashes.SHA384()).public_bytes(pem))
    secret = server.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomically(folder / "server.key", secret, private=True)
    write_atomically(folder / "server.pem", leaf.sign(authority, hashes.SHA384()).public_bytes(pem))


def make_site_key(folder: Path, site: str) -> Path:
    """A site's private key (SITE.key) and its public one (SITE.pub); what is there stays. Returns
    the private one.
    """
    if not NAME.fullmatch(site):
        raise UserError(
            f"'{site}' is no name for a site; use letters, digits, dots, dashes and underscores."
        )
    private, public = folder / f"{site}.key", folder / f"{site}.pub"
    if not private.exists():
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(
            ec.SECP256R1()
        )  # a site signs every request: P-384 takes five times as long
        openssh = serialization.PrivateFormat.OpenSSH
        secret = key.private_bytes(
            serialization.Encoding.PEM, openssh, serialization.NoEncryption()
        )
        write_atomically(private, secret, private=True)
    if not public.exists():
        known = serialization.load_ssh_private_key(private.read_bytes(), None)
        kind = serialization.PublicFormat.OpenSSH
        write_atomically(
            public, known.public_key().public_bytes(serialization.Encoding.OpenSSH, kind)
        )
    return private


def read_public_key(path: Path) -> bytes:
    """A public key as Flower registers it."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise UserError(f"'{path}' cannot be read as a public key: {problem}.") from None
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _subject_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise UserError(
            f"'{host}' is no address or name of a machine that a certificate could be for."
        ) from None
