"""How a process with our connector waits for vLLM's messages; with vLLM's own class, without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import v032

ADDRESS = "inproc://notices"
LONG_MS = 10_000
BUSY_S = 600.0
"""In place of vLLM's second, of which a full machine may take all."""


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The one who waits and the one who tells it; ``SpinCondition`` is vLLM's again afterwards."""
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)
    with zmq.Context() as context:
        writer = SpinCondition(is_reader=False, context=context, notify_address=ADDRESS)
        reader = SpinCondition(is_reader=True, context=context, notify_address=ADDRESS)
        assert reader.busy_loop_s == 1.0
        reader.busy_loop_s = BUSY_S
        yield reader, writer
        for sock in (writer.local_notify_socket, reader.local_notify_socket, reader.write_cancel_socket,
                     reader.read_cancel_socket):
            sock.close(0)


def waited_s(reader: Any, timeout_ms: int | None) -> float:
    """How long a call takes."""
    began = time.monotonic()
    reader.wait(timeout_ms)
    return time.monotonic() - began


def test_who_may_not_rest_looks_again_at_once(sides: tuple[Any, Any]) -> None:
    reader, _ = sides
    compat.rest_while(lambda _: False)
    reader.record_read()
    assert min(waited_s(reader, LONG_MS) for _ in range(5)) < 0.001 * v032.REST_MS


def test_a_step_between_two_messages_is_no_time_in_which_one_was_looked_for(sides: tuple[Any, Any]) -> None:
    reader, _ = sides
    looked: list[float] = []
    compat.rest_while(lambda seconds: bool(looked.append(seconds)))
    for _ in range(2):
        reader.record_read()
        time.sleep(0.05)  # the step
        reader.wait(LONG_MS)
        time.sleep(0.02)
        reader.wait(LONG_MS)
    assert looked[0] == looked[2] == 0.0
    assert min(looked[1], looked[3]) >= 0.02


def test_who_rests_looks_again_soon_for_a_notice_may_be_lost(sides: tuple[Any, Any]) -> None:
    reader, _ = sides
    compat.rest_while(lambda _: True)
    for timeout_ms in (LONG_MS, None):
        reader.record_read()
        assert 0.0009 * v032.REST_MS <= waited_s(reader, timeout_ms) < 0.0005 * LONG_MS
    assert reader.busy_loop_s == BUSY_S


def test_a_notice_ends_a_rest(sides: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = sides
    monkeypatch.setattr(v032, "REST_MS", LONG_MS)
    compat.rest_while(lambda _: True)
    reader.record_read()
    teller = threading.Timer(0.1, writer.notify)
    teller.start()
    assert waited_s(reader, LONG_MS) < 0.0005 * LONG_MS
    teller.join()


def test_a_second_after_the_last_message_vllm_waits_as_it_would_without_us(sides: tuple[Any, Any]) -> None:
    reader, _ = sides
    compat.rest_while(lambda _: True)
    reader.busy_loop_s = 1.0
    reader.last_read = time.monotonic() - 1.5
    assert waited_s(reader, 20 * v032.REST_MS) >= 0.019 * v032.REST_MS
