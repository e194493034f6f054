"""The HTTP side of the operator: health, readiness and metrics."""

from __future__ import annotations

import aiohttp
import pytest
from processes import free_port

from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.health import Health, PortTaken


async def ask(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_each_trouble_is_one_line_and_no_trouble_is_ok() -> None:
    unhealthy: list[str] = []
    unready = ["the Lease was not seen for 40 s", "not listed yet: Pod"]
    health = Health(Metrics(), lambda: unhealthy, lambda: unready)
    port = free_port()
    await health.start(port)
    try:
        assert await ask(port, "/healthz") == (200, "ok\n")
        assert await ask(port, "/readyz") == (503, "the Lease was not seen for 40 s\nnot listed yet: Pod\n")
        unhealthy.append("stuck")
        unready.clear()
        assert await ask(port, "/healthz") == (503, "stuck\n")
        assert await ask(port, "/readyz") == (200, "ok\n")
        assert (await ask(port, "/else"))[0] == 404
    finally:
        await health.close()


async def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    metrics.leader.set(1)
    health = Health(metrics, list, list)
    port = free_port()
    await health.start(port)
    try:
        status, text = await ask(port, "/metrics")
    finally:
        await health.close()
    assert status == 200
    assert "\nxpyd_operator_leader 1.0\n" in text


async def test_a_taken_port_names_the_flag_and_a_closed_one_is_free_again() -> None:
    first = Health(Metrics(), list, list)
    port = free_port()
    await first.start(port)
    with pytest.raises(PortTaken, match=f"--http-port {port}: "):
        await Health(Metrics(), list, list).start(port)
    await first.close()
    again = Health(Metrics(), list, list)
    await again.start(port)
    assert (await ask(port, "/healthz"))[0] == 200
    await again.close()
