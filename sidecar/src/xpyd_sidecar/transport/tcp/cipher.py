"""What stripes are encrypted with: the libcrypto of this machine, which is opened when somebody wants to encrypt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xpyd_sidecar.transport import gates

if gates.COMPILED:
    from xpyd_sidecar.transport._stripes import open_libcrypto

LIBRARIES: Final = ("libcrypto.so.3", "libcrypto.so.1.1")
"""OpenSSL's, as the loader knows it; the first that is there and gives a known answer is taken, for good."""


def lack(libraries: Sequence[str] = LIBRARIES) -> str:
    """Why nothing can be encrypted here, in words; empty: it can."""
    if not gates.COMPILED:
        return gates.REASON
    if any(open_libcrypto(name) for name in libraries):
        return ""
    return f"there is nothing here to encrypt with ({' or '.join(libraries)}, of OpenSSL, is needed)"
