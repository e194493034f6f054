"""CURVE helper: only holders of the service key talk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from xpyd_sidecar.contract import keys
from xpyd_sidecar.process import curve

KEY = keys.ServiceKey(bytes(range(32)))
OTHER = keys.ServiceKey(bytes(32))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)  # a socket that is collected before destroy() would linger for ever otherwise
    yield context
    context.destroy(linger=0)


def round_trip(context: zmq.Context[zmq.Socket[bytes]], server_key: keys.ServiceKey, client_key: keys.ServiceKey,
               purpose: keys.Purpose = "membership", deadline_ms: int = 3000) -> bool:
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    curve.serve(server, server_key, "membership")
    curve.connect(client, client_key, purpose)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"hello")
    if not server.poll(deadline_ms):
        return False
    peer, text = server.recv_multipart()
    assert text == b"hello"
    server.send_multipart([peer, b"welcome"])
    return bool(client.poll(deadline_ms)) and client.recv() == b"welcome"


def test_holders_of_one_key_talk(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    assert round_trip(context, KEY, KEY)


def test_another_service_key_is_not_heard(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    assert not round_trip(context, KEY, OTHER, deadline_ms=300)


def test_the_key_of_another_purpose_is_not_heard(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    assert not round_trip(context, KEY, KEY, purpose="control", deadline_ms=300)


def test_a_client_without_curve_is_not_heard(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    curve.serve(server, KEY, "membership")
    client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    client.send(b"hello")
    assert not server.poll(300)


def test_the_pair_is_stable_and_differs_by_purpose() -> None:
    assert curve.key_pair(KEY, "membership") == curve.key_pair(KEY, "membership")
    assert curve.key_pair(KEY, "membership") != curve.key_pair(KEY, "control")
    assert {len(part) for part in curve.key_pair(KEY, "data")} == {40}
