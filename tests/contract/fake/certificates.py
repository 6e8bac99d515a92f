"""A certificate authority of our own, a server's certificate, and a service account's key."""

from __future__ import annotations

import atexit
import datetime
import functools
import ipaddress
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from tests.contract.fake.api import LOCATION

#: The platform's names, which the fakes have.
HOSTS = (
    *(f"{LOCATION}-aiplatform.googleapis.com", f"{LOCATION}-kfp.pkg.dev"),
    *(
        f"{service}.googleapis.com"
        for service in (
            *("artifactregistry", "cloudresourcemanager", "iam", "iamcredentials", "logging", "oauth2"),
            *("secretmanager", "serviceusage", "bigquery", "bigquerystorage"),
        )
    ),
)


@dataclass(frozen=True)
class Certificates:
    """Files (PEM) of a server that clients believe who trust `authority`."""

    authority: Path
    certificate: Path
    key: Path


@functools.cache
def certificates() -> Certificates:
    """Returns those of all fakes of a process: gRPC reads its roots once."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    return write_certificates(Path(directory.name), HOSTS)


def write_certificates(directory: Path, hosts: Sequence[str]) -> Certificates:
    """Writes a certificate for these host names and 127.0.0.1, and the authority that signed it."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("contract tests")
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
    names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    certificate = (
        _builder(_name(hosts[0]), authority_name, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    files = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(_private(key))
    return files


def write_service_account(path: Path, token_uri: str) -> Path:
    """Writes the key of a service account that exists nowhere; tokens come from `token_uri`."""
    account = {
        "type": "service_account",
        "project_id": "acme-vision",
        "private_key_id": "1",
        "private_key": _account_key(),
        "client_email": "tests@acme-vision.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_uri,
    }
    path.write_text(json.dumps(account))
    return path


@functools.cache  # a key takes longer than a test; each client loads it, and a longer one takes longer
def _account_key() -> str:
    return _private(rsa.generate_private_key(65537, 1024)).decode()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
