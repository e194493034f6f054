"""Certificates and kubeconfigs of one cluster. Everything is made once per folder and lies in ``pki/``.

    ca                 signs the servers and every client that the API server knows by certificate
    front-proxy-ca     signs the API server itself, as extension API servers and webhooks see it
    service-accounts   key pair that signs service account tokens
"""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=365)
BACKDATED = timedelta(hours=1)
"""A clock that is set back a little does not end the cluster."""


class Pki:
    """The keys below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def certificate(self, name: str) -> Path:
        """PEM file of a certificate."""
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        """PEM file of a private key."""
        return self.folder / f"{name}.key"

    @property
    def token_keys(self) -> Path:
        """PEM file of the public key that checks service account tokens."""
        return self.folder / "service-accounts.pub"

    def authority(self, name: str) -> None:
        """A self-signed authority."""
        if self._made(name):
            return
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name, ())
        usage = x509.KeyUsage(digital_signature=True, content_commitment=False, key_encipherment=False,
                              data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
                              encipher_only=False, decipher_only=False)
        signed = (_builder(subject, subject, key)
                  .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                  .add_extension(usage, critical=True)
                  .sign(key, hashes.SHA256()))
        self._write(name, key, signed)

    def client(self, name: str, user: str, groups: Iterable[str] = (), authority: str = "ca") -> None:
        """A certificate that the API server takes for ``user`` in ``groups``."""
        self._issue(name, _subject(user, groups), (), ExtendedKeyUsageOID.CLIENT_AUTH, authority)

    def server(self, name: str, names: Iterable[str], authority: str = "ca") -> None:
        """A certificate for a server that is reached by these DNS names and IP addresses."""
        self._issue(name, _subject(name, ()), tuple(names), ExtendedKeyUsageOID.SERVER_AUTH, authority)

    def token_key(self) -> None:
        """The key pair of service account tokens."""
        if self.token_keys.exists():
            return
        key = ec.generate_private_key(ec.SECP256R1())
        _put(self.key("service-accounts"), _pem(key))
        public = serialization.PublicFormat.SubjectPublicKeyInfo
        _put(self.token_keys, key.public_key().public_bytes(serialization.Encoding.PEM, public))

    def kubeconfig(self, path: Path, server: str, client: str) -> Path:
        """A kubeconfig of a client certificate; it names no other file, so it can be copied anywhere."""
        user = {"client-certificate-data": _base64(self.certificate(client)), "client-key-data": _base64(self.key(client))}
        return self._kubeconfig(path, server, client, user)

    def token_kubeconfig(self, path: Path, server: str, user: str, token: str, namespace: str) -> Path:
        """A kubeconfig of a bearer token."""
        return self._kubeconfig(path, server, user, {"token": token}, namespace)

    def _kubeconfig(self, path: Path, server: str, user: str, login: dict[str, str], namespace: str = "default") -> Path:
        cluster = {"server": server, "certificate-authority-data": _base64(self.certificate("ca"))}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": login}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
            "current-context": "test",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        _put(path, yaml.safe_dump(content, sort_keys=False).encode())
        return path

    def _issue(self, name: str, subject: x509.Name, names: tuple[str, ...], use: x509.ObjectIdentifier,
               authority: str) -> None:
        if self._made(name):
            return
        issuer = x509.load_pem_x509_certificate(self.certificate(authority).read_bytes())
        signer = serialization.load_pem_private_key(self.key(authority).read_bytes(), password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (_builder(subject, issuer.subject, key)
                   .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                   .add_extension(x509.ExtendedKeyUsage([use]), critical=False))
        if names:
            alternatives = x509.SubjectAlternativeName([_alternative(each) for each in names])
            builder = builder.add_extension(alternatives, critical=False)
        self._write(name, key, builder.sign(signer, hashes.SHA256()))

    def _made(self, name: str) -> bool:
        return self.certificate(name).exists()

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, signed: x509.Certificate) -> None:
        """The certificate comes last: where it is, the key is too."""
        _put(self.key(name), _pem(key))
        _put(self.certificate(name), signed.public_bytes(serialization.Encoding.PEM))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - BACKDATED).not_valid_after(now + LIFE))


def _subject(common: str, groups: Iterable[str]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")


def _put(path: Path, content: bytes) -> None:
    """Written whole or not at all, and for the owner alone."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.rename(path)
