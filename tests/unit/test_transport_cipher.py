"""Where this machine has OpenSSL's library, it is found and taken; else what is lacking is named."""

from __future__ import annotations

import ctypes

import pytest

from xpyd_sidecar.transport import gates
from xpyd_sidecar.transport.tcp import cipher


def there(name: str) -> bool:
    """Whether the loader finds a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not gates.COMPILED, reason="the link tcp was not compiled here")
def test_a_library_that_is_there_gives_the_known_answer_and_is_taken() -> None:
    """Tests of encrypted stripes are left out where there is none; here it shows why."""
    assert bool(cipher.lack()) is not any(map(there, cipher.LIBRARIES))


@pytest.mark.skipif(not gates.COMPILED, reason="the link tcp was not compiled here")
def test_what_is_lacking_is_named() -> None:
    assert cipher.lack(("libnothing.so.3", "libnone.so")) == (
        "there is nothing here to encrypt with (libnothing.so.3 or libnone.so, of OpenSSL, is needed)")


def test_without_what_is_compiled_nothing_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "COMPILED", False)
    monkeypatch.setattr(gates, "REASON", "tcp: its loops were not compiled")
    assert cipher.lack() == "tcp: its loops were not compiled"
