from __future__ import annotations

from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract import p2p
from xpyd_sidecar.contract.ids import HostPort, Role
from xpyd_sidecar.contract.p2p import P2pBeat

PLAIN = {"type": "P", "http_address": "10.0.0.1:20001", "zmq_address": "10.0.0.1:21001"}
MORIIO = {"type": "D", "http_address": "10.0.0.1:20001", "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005",
          "dp_size": 1, "tp_size": 8, "transfer_mode": "WRITE"}
OTHER = {"type": "register", "role": "D", "request_address": "http://10.0.0.1:20001/v1/completions",
         "zmq_address": "10.0.0.1:21001"}


def read(fields: Any) -> P2pBeat:
    return p2p.decode(msgspec.msgpack.encode(fields))


def test_the_three_variants_are_read() -> None:
    http = HostPort("10.0.0.1:20001")
    assert read(PLAIN) == P2pBeat(Role.PREFILL, http, "10.0.0.1:21001")
    assert read(MORIIO) == P2pBeat(Role.DECODE, http, MORIIO["zmq_address"], 8, "WRITE")  # type: ignore[arg-type]
    assert read(OTHER) == P2pBeat(Role.DECODE, http, "10.0.0.1:21001")


def test_fields_that_are_not_known_are_ignored_and_numbers_may_be_text() -> None:
    assert read(PLAIN | {"index": 3, "metrics": {"a": [1]}, "tp_size": "2"}) == read(PLAIN | {"tp_size": 2})


@pytest.mark.parametrize(("fields", "words"), [
    (PLAIN | {"type": "X"}, "type: 'X' is neither"), ({"http_address": "a:1", "zmq_address": "a:1"}, "type: ''"),
    (PLAIN | {"http_address": "10.0.0.1"}, "http_address: '10.0.0.1' is not host:port"),
    (PLAIN | {"http_address": ""}, "request_address: '' is not host:port"),
    (OTHER | {"request_address": "http://10.0.0.1:99999/v1"}, "request_address: "),
    (PLAIN | {"zmq_address": ""}, "zmq_address: ''"), (PLAIN | {"zmq_address": "a:1\r\nX-Evil: 1"}, "zmq_address: "),
    (PLAIN | {"zmq_address": "a:1___decode_addr_b:1"}, "zmq_address: "),
    (PLAIN | {"zmq_address": "a" * 257}, "zmq_address: "),
    (MORIIO | {"transfer_mode": "PUSH"}, "transfer_mode: 'PUSH'"), (MORIIO | {"tp_size": 0}, "tp_size: "),
    (MORIIO | {"dp_size": 2}, "dp_size: 2 ranks"), (PLAIN | {"http_address": 5}, "http_address"),
    ([1, 2], "not a heartbeat known here"), ("P", "not a heartbeat known here"), (PLAIN | {"tp_size": "x"}, "tp_size"),
])
def test_what_cannot_be_used_is_refused_with_the_field(fields: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(fields)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\xff" * 100, b"\x81\xa4type\xd9\x02\xff\xff"])
def test_bytes_that_are_no_message_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a heartbeat known here"):
        p2p.decode(raw)


def test_engines_pair_within_sizes_and_modes_that_they_state() -> None:
    assert read(PLAIN).fingerprint == read(OTHER).fingerprint == "p2p"
    kinds = {read(MORIIO | fields).fingerprint for fields in ({}, {"tp_size": 4}, {"transfer_mode": "READ"})}
    assert len(kinds) == 3
    assert all(p2p.is_p2p(kind) and p2p.wants_params(kind) for kind in kinds)
    assert not p2p.wants_params(p2p.FINGERPRINT)
    assert not p2p.is_p2p(p2p.Fingerprint("f" * 32))
