"""An engine whose KV is to be encrypted does not start where it cannot be, and says why."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.worker.links_setup import check_encryption
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.transport.tcp import cipher

LACK = "there is nothing here to encrypt with"
TRANSPORTS = ["auto", "tcp", "shm", "rdma", "nccl"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_looked_for_where_kv_is_in_clear(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "lack", lambda: pytest.fail("nobody asked"))
    check_encryption(KvOptions(transport=transport))  # type: ignore[arg-type]


@pytest.mark.parametrize("lack", ["", LACK])
@pytest.mark.parametrize("transport", ["rdma", "nccl"])
def test_transports_that_do_not_encrypt_are_refused_by_name(transport: str, lack: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "lack", lambda: lack)
    with pytest.raises(ConfigError, match=f"encryption: {transport} does not encrypt; write kv.transport: auto"):
        check_encryption(KvOptions(transport=transport, encryption="enabled"))  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_without_a_library_an_engine_that_may_use_tcp_does_not_start(transport: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "lack", lambda: LACK)
    with pytest.raises(ConfigError, match=rf'"xpyd"\]\.encryption: {LACK}; mend that, or write kv.encryption: disabled'):
        check_encryption(KvOptions(transport=transport, encryption="enabled"))  # type: ignore[arg-type]


def test_who_takes_memory_of_its_host_alone_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "lack", lambda: LACK)
    check_encryption(KvOptions(transport="shm", encryption="enabled"))


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
def test_with_a_library_it_starts(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "lack", str)
    check_encryption(KvOptions(transport=transport, encryption="enabled"))  # type: ignore[arg-type]
