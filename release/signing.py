"""Signatures by ``ssh-keygen -Y``: over the sums of a release, with a key that is kept elsewhere.

A verifier needs a file of one line, ``IDENTITY ssh-ed25519 KEY``, and OpenSSH 8.1 or later.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from images.tools import ImageError, need, run

NAMESPACE = "xpyd-release"
IDENTITY = "release"
LIMIT_S = 60.0


def sign(key: Path, path: Path) -> Path:
    """Write PATH.sig; its path.

    ``key``: a private key in OpenSSH's form, without a passphrase or with its agent.

    Raises:
        ImageError: the key cannot be read or used.
    """
    need("ssh-keygen", "openssh-client")
    target = path.with_name(f"{path.name}.sig")
    target.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(path)], timeout_s=LIMIT_S)
    return target


def verify(signers: Path, path: Path) -> None:
    """Whether PATH.sig is a signature of PATH by a key of ``signers``.

    Raises:
        ImageError: it is not, or is missing.
    """
    need("ssh-keygen", "openssh-client")
    signature = path.with_name(f"{path.name}.sig")
    try:
        with path.open("rb") as file:
            done = subprocess.run(["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", IDENTITY, "-n", NAMESPACE, "-s",
                                   str(signature)], stdin=file, capture_output=True, text=True, check=False,
                                  timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"{path.name}: its signature cannot be verified: {error}") from None
    if done.returncode:
        raise ImageError(f"{path.name}: {signature.name} is no signature of it by {IDENTITY}: "
                         f"{(done.stdout + done.stderr).strip()[-500:]}")


def throwaway(folder: Path) -> Path:
    """Make a key for a rehearsal; the private one's path, the public one lies beside it."""
    need("ssh-keygen", "openssh-client")
    key = folder / "rehearsal"
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rehearsal", "-f", str(key)], timeout_s=LIMIT_S)
    return key


def signers_of(key: Path) -> str:
    """The line that a verifier needs, from a private key.

    Raises:
        ImageError: the key cannot be read, or is not of the kind ed25519.
    """
    public = run(["ssh-keygen", "-y", "-f", str(key)], timeout_s=LIMIT_S).split()
    if public[:1] != ["ssh-ed25519"]:
        raise ImageError(f"{key}: releases are signed with a key of the kind ed25519")
    return f"{IDENTITY} {' '.join(public[:2])}\n"
