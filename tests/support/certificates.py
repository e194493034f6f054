"""Certificates for localhost that nobody else trusts."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write(folder: Path, name: str, passphrase: bytes | None = None) -> tuple[str, str]:
    """A certificate for localhost whose common name is ``name``, put in place as one who renews it does.

    Returns:
        The paths of certificate and key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    cert = (x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, hashes.SHA256()))
    locked = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    texts = {"tls.crt": cert.public_bytes(serialization.Encoding.PEM),
             "tls.key": key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)}
    for file, text in texts.items():
        (folder / f"{file}.new").write_bytes(text)
        os.replace(folder / f"{file}.new", folder / file)
    return str(folder / "tls.crt"), str(folder / "tls.key")
