"""The campaign of gateways: what their files say, and a hundred streams through each while an engine is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from lab import extras
from scripts import load

campaign = load(Path(__file__).parents[2] / "lab" / "campaigns" / "gateways.py")


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    extras.install("gateways")


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
async def test_streams_are_whole_while_engines_are_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "KILL_S", 3600.0)  # by count here: a full machine has no seconds
    async with campaign.served(1, 3) as f, campaign.before(name, f) as gateway:
        sent = campaign.Killed(f, gateway.port, 100, 1)
        running = asyncio.create_task(sent.run())
        await f.wait(lambda: sent.streams >= 60 and any(engine.open for engine in f.d), "streams are under way", 240.0)
        await sent.kill_one()
        told = await running
    assert (told["streams"], told["failed"], told["wrong"], told["examples"]) == (100, 0, 0, [])
    assert told["kills"] == 1


async def test_a_route_of_two_services_shares_by_weight() -> None:
    told = await campaign.weights(200)
    assert {name: (each["requests"], each["failed"]) for name, each in told.items()} == {
        "nginx": (200, 0), "haproxy": (200, 0)}
    assert told["haproxy"]["off_percent"] == 0.0, "goes round, by weight"
    assert told["nginx"]["off_percent"] < 10.0, "draws"


def test_what_ends_early_or_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that cuts streams off is seen."""
    cut = campaign.Answer(200, {}, b"", complete=False)

    async def ask(_port: int, _data: bytes) -> Any:
        return cut

    monkeypatch.setattr(campaign, "ask", ask)

    async def run() -> dict[str, Any]:
        async with campaign.served(1, 1) as f:
            return dict(await campaign.Killed(f, 0, 5, 1).run())

    assert asyncio.run(run())["failed"] == 5


def test_a_gateway_that_does_not_begin_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "nginx.conf").write_text("nonsense;")
    with pytest.raises(AssertionError, match="unknown directive"):
        campaign._begun("nginx", 1, tmp_path, ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
