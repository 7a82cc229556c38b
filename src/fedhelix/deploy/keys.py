"""Certificates and keys: one authority, one server certificate, and a key pair for every site."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import NameOID

from fedhelix.core.errors import UserError
from fedhelix.core.files import writable, write_atomically
from fedhelix.deploy.schema import NAME

# What the SuperLink says to a site whose key is connected already, or was withdrawn.
KEY_IN_USE, KEY_WITHDRAWN = "key-in-use", "key-withdrawn"
DAYS = 825  # of validity: the longest that common software accepts
ISSUER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhelix deployment")])
SUBJECT = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhelix server")])


def make_certificates(folder: Path, hosts: Iterable[str]) -> None:
    """Make an authority (ca.pem) and the server's certificate (server.pem, server.key).

    Existing files are kept; a certificate that is not for all `hosts` is refused, and so is a
    site's folder.
    """
    names = [_subject_name(host) for host in hosts]
    if is_of_a_site(folder):
        raise UserError(
            f"'{folder / 'ca.pem'}' is there without server.key, as at a site: name a site to make "
            "its key pair, or another --folder for a server's certificate."
        )
    if (folder / "server.pem").exists():  # the file that is written last
        _check_certificate(folder, names)
        return
    writable(folder)
    _no_folders(folder / "ca.pem", folder / "server.key")
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    loopback = map(_subject_name, ("localhost", "127.0.0.1", "::1"))
    root = _authority_certificate(authority.public_key())
    leaf = _server_certificate(
        server.public_key(), authority.public_key(), list(dict.fromkeys([*loopback, *names]))
    )
    # The authority's own key is thrown away: nobody can make further certificates with it.
    pem = serialization.Encoding.PEM
    secret = server.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomically(folder / "server.key", secret, private=True)
    # From here on it is a server's folder, not a site's with the ca.pem of its server.
    write_atomically(folder / "ca.pem", root.sign(authority, hashes.SHA384()).public_bytes(pem))
    write_atomically(folder / "server.pem", leaf.sign(authority, hashes.SHA384()).public_bytes(pem))


def is_of_a_site(folder: Path) -> bool:
    """Whether a folder of keys is a site's: it has the ca.pem of a server, and no server's key."""
    server = folder / "server.key", folder / "server.pem"
    return (folder / "ca.pem").is_file() and not any(path.exists() for path in server)


def last_day(folder: Path) -> datetime.date:
    """The last day of the server's certificate."""
    return _server_pem(folder).not_valid_after_utc.date()


def validity(folder: Path) -> str:
    """Until when the certificates are valid, or what to do if they no longer are."""
    end = last_day(folder)
    if end >= datetime.date.today():
        return f"are valid until {end}"
    return (
        f"expired on {end}, so that no site connects: make new ones with `fedhelix deploy keys "
        "--host NAME --folder renewed`, and replace them as docs/deployment.md says"
    )


def who_gets_what(folder: Path) -> str:
    """Which of the files in a folder of keys go where, and until when certificates are valid."""
    if is_of_a_site(folder):
        return (
            f"SITE.pub goes to the server, whose {folder / 'ca.pem'} is kept; SITE.key stays here."
        )
    return (
        f"On the server: a new site gets its own SITE.key and {folder / 'ca.pem'}, and one whose "
        "key is replaced keeps the ca.pem that it has; server.key stays here. At a site: only "
        "SITE.pub goes to the server, and the ca.pem that counts is the server's, not this one. "
        f"The certificates {validity(folder)}."
    )


def _server_pem(folder: Path) -> x509.Certificate:
    path = folder / "server.pem"
    _no_folders(path)
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise UserError(
            f"'{path}' cannot be read as a certificate ({problem}); put the right one back, or "
            "delete it, make another one and give every site the new ca.pem."
        ) from None


def _no_folders(*paths: Path) -> None:
    """Refuse folders in the places of files."""
    for path in paths:
        if path.is_dir():
            raise UserError(f"'{path}' is a folder, and a file of that name is needed; move it.")


def _check_certificate(folder: Path, names: Iterable[x509.GeneralName]) -> None:
    known = (
        _server_pem(folder).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    )
    for name in names:
        if name not in list(known):
            raise UserError(
                f"the certificate in '{folder}' is not for {name.value}; make one in another "
                "folder, or delete server.pem, and give every site the new ca.pem."
            )


def _authority_certificate(key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        _certificate(ISSUER, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _server_certificate(
    key: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePublicKey,
    names: list[x509.GeneralName],
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    purpose = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        _certificate(SUBJECT, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(purpose, critical=False)
        .add_extension(issuer_key, critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def make_site_key(folder: Path, site: str) -> Path:
    """Make a site's key pair (SITE.key, SITE.pub) and return the path of the private key.

    Existing files are kept, and a public key alone is refused: its private key is elsewhere.
    """
    if not NAME.fullmatch(site):
        raise UserError(
            f"'{site}' is no name for a site; use letters, digits, dots, dashes and underscores."
        )
    private, public = folder / f"{site}.key", folder / f"{site}.pub"
    _no_folders(private, public)
    if public.exists() and not private.exists():
        raise UserError(
            f"'{public}' is there without {private.name}, which the site may have; delete it only "
            "to replace its key pair."
        )
    if not public.exists():
        writable(folder)
    if not private.exists():
        # A site signs every request, and P-384 would take five times as long as P-256.
        key = ec.generate_private_key(ec.SECP256R1())
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
        secret = key.private_bytes(pem, form, serialization.NoEncryption())
        write_atomically(private, secret, private=True)
    if not public.exists():
        known = read_private_key(private).public_key()
        openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        write_atomically(public, known.public_bytes(*openssh))
    return private


def read_certificate(path: Path, missing: str) -> bytes:
    """Read the certificate of the server's authority; `missing` says what to do without one."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read ({problem.strerror}); {missing}.") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ValueError, ssl.SSLError):
        raise UserError(f"'{path}' is no certificate in PEM format; {missing}.") from None
    return content


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key."""
    try:
        content = _key_file(path, "private key; give SITE.key")
        key = serialization.load_ssh_private_key(content, None)
    except UserError:
        raise
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, ValueError, UnsupportedAlgorithm) as problem:
        raise UserError(f"'{path}' cannot be read as a private key: {problem}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"'{path}' is no ECDSA key; make one with `fedhelix deploy keys`.")
    return key


def read_public_key(path: Path) -> bytes:
    """Read a public key into the form that Flower registers."""
    try:
        key = serialization.load_ssh_public_key(_key_file(path, "public key; give SITE.pub"))
    except UserError:
        raise
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, ValueError, UnsupportedAlgorithm) as problem:
        raise UserError(f"'{path}' cannot be read as a public key: {problem}.") from None
    return public_bytes(key)


def read_either_key(path: Path) -> bytes:
    """The public key of a pair, by either file of it, in the form of `read_public_key`."""
    try:
        content = _key_file(path, "key; give SITE.pub or SITE.key")
        is_private = content.startswith(b"-----BEGIN")
    except OSError:  # which `read_public_key` puts into words
        is_private = False
    if is_private:
        return public_bytes(read_private_key(path).public_key())
    return read_public_key(path)


def public_bytes(key: PublicKeyTypes) -> bytes:
    """A public key in the form that Flower registers."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _key_file(path: Path, wanted: str) -> bytes:
    """The content of a file that should hold a key; a certificate is refused."""
    content = path.read_bytes()
    if b"-----BEGIN CERTIFICATE-----" in content:
        raise UserError(f"'{path}' is a certificate and no {wanted}.")
    return content


def _missing(path: Path) -> UserError:
    return UserError(
        f"there is no key '{path}'; correct the path (a new pair of `fedhelix deploy keys` would "
        "be another key)."
    )


def _certificate(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ISSUER)
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
