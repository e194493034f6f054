"""Events are bounded, said once, and never waited for."""

from __future__ import annotations

import asyncio
from typing import Any

from kube_documents import document

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND, Entry
from xpyd_operator.kube.client.events import MESSAGE_MAX, QUEUE, Events, event
from xpyd_operator.kube.client.metrics import Metrics

LOOPS = ("virtual",)
ABOUT = Entry(OWNER_KIND, document())


class Server:
    def __init__(self, error: ApiError | None = None) -> None:
        self.made: list[dict[str, Any]] = []
        self.error = error

    async def create(self, kind: str, namespace: str, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        assert (kind, namespace, dry_run) == ("Event", "team-a", False)
        self.made.append(body)
        if self.error is not None:
            raise self.error
        return body


def dropped(metrics: Metrics) -> float:
    found = metrics.registry.get_sample_value("xpyd_operator_events_dropped_total")
    assert found is not None
    return found


def made(server: Server) -> tuple[Events, Metrics]:
    metrics = Metrics()
    return Events(server, metrics), metrics  # type: ignore[arg-type]


def test_an_event_names_the_very_object() -> None:
    body = event(ABOUT, "Warning", "Crashed", "x" * 2000, now="2026-01-01T00:00:00Z", suffix="abc")
    assert body["involvedObject"]["uid"] == ABOUT.uid
    assert (body["metadata"]["name"], body["type"], body["reason"]) == ("qwen.abc", "Warning", "Crashed")
    assert len(body["message"]) == MESSAGE_MAX


async def test_the_same_words_are_said_once() -> None:
    server = Server()
    events, _ = made(server)
    for reason in ("Created", "Created", "Gone"):
        events.emit(ABOUT, "Normal", reason, "qwen-e0")
    await events.flush()
    assert [each["reason"] for each in server.made] == ["Created", "Gone"]


async def test_too_many_are_dropped_and_counted() -> None:
    server = Server()
    events, metrics = made(server)
    for number in range(QUEUE + 5):
        events.emit(ABOUT, "Normal", "Created", f"qwen-e{number}")
    assert dropped(metrics) == 5
    await events.flush()
    assert len(server.made) == QUEUE


async def test_a_refusal_is_counted_and_the_sender_goes_on() -> None:
    server = Server(ApiError(403, "Forbidden", "no"))
    events, metrics = made(server)
    running = asyncio.create_task(events.run())
    for number in range(3):
        events.emit(ABOUT, "Normal", "Created", f"qwen-e{number}")
        async with asyncio.timeout(30):
            while dropped(metrics) <= number:  # noqa: ASYNC110 (the count is under test)
                await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (len(server.made), dropped(metrics)) == (3, 3)
