"""Where a release comes from: an in-toto statement with SLSA's provenance (v1), in a signed DSSE envelope.

Written and verified by in-toto's own library, securesystemslib, which is one of the tools of a release: run this file with
their Python. The key is the one that signs the sums.

    python provenance.py sign KEY STATEMENT ENVELOPE
    python provenance.py verify SIGNERS ENVELOPE        prints the statement

Sources: https://in-toto.io/Statement/v1, https://slsa.dev/spec/v1.0/provenance, DSSE 1.0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
PAYLOAD = "application/vnd.in-toto+json"
BUILD = "urn:xpyd:release:1"
"""What ``externalParameters`` and ``resolvedDependencies`` below mean."""


def statement(subjects: Mapping[str, str], *, version: str, commit: str, images: Mapping[str, str],
              materials: Mapping[str, str], builder: str) -> dict[str, Any]:
    """The statement about a release.

    ``subjects``: SHA-256 of each file by its path. ``images``: digests by reference. ``materials``: SHA-256 of what the
    tools are pinned by, by its path in the repository. ``builder``: a URI of who built.
    """
    return {
        "_type": STATEMENT, "predicateType": PREDICATE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(subjects.items())],
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD, "externalParameters": {"version": version, "images": dict(images)},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    *({"name": name, "digest": {"sha256": digest}} for name, digest in sorted(materials.items()))]},
            "runDetails": {"builder": {"id": builder}}}}


def sign(key: Path, path: Path, envelope: Path) -> None:
    """Put a statement into an envelope that a private key (ed25519, OpenSSH's form) signs."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key  # noqa: PLC0415
    from securesystemslib.dsse import Envelope  # noqa: PLC0415
    from securesystemslib.signer import CryptoSigner  # noqa: PLC0415

    made = Envelope(path.read_bytes(), PAYLOAD, {})
    made.sign(CryptoSigner(load_ssh_private_key(key.read_bytes(), None)))
    envelope.write_text(json.dumps(made.to_dict(), indent=1) + "\n")


def verify(signers: Path, envelope: Path) -> str:
    """The statement, once a key of ``signers`` has signed it.

    Raises:
        Exception: of the library, where none has.
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key  # noqa: PLC0415
    from securesystemslib.dsse import Envelope  # noqa: PLC0415
    from securesystemslib.signer import SSlibKey  # noqa: PLC0415

    keys = [SSlibKey.from_crypto(load_ssh_public_key(" ".join(line.split()[1:3]).encode()))
            for line in signers.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found = Envelope.from_dict(json.loads(envelope.read_text()))
    found.verify(keys, 1)
    if found.payload_type != PAYLOAD:
        raise ValueError(f"{envelope.name} holds {found.payload_type}, not {PAYLOAD}")
    return found.payload.decode()


if __name__ == "__main__":
    word, first, *rest = sys.argv[1:]
    if word == "sign":
        sign(Path(first), Path(rest[0]), Path(rest[1]))
    else:
        sys.stdout.write(verify(Path(first), Path(rest[0])))
