"""Requests that are held in one process: when they go on, alone or not, and what they were told to do meanwhile."""

from __future__ import annotations

import pytest
from poisons import Killer, code_of
from router_fleet import fleet

LOOPS = ("uvloop",)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_was_sent_on_an_idle_connection_was_there(stream: bool) -> None:
    """The engine closes without a byte, a fresh connection is refused: the engine may have seen the request, and died."""
    async with fleet(1, 5) as f:
        for engine in f.d:
            while not engine.seen:
                assert (await f.complete(prompt="warm", stream=stream)).status == 200
        await f.wait_quiet()
        killer = Killer(f.d)
        answers = [await f.complete(prompt="p", user="poison", stream=stream) for _ in range(3)]
        assert [code_of(answer) for answer in answers] == ["poison_request"] * 3
        assert len(killer.dead) == 2
        await f.wait_quiet()
