"""Client keys are rotated under load: a router process goes on, and nobody whose key is in the file is refused."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from load import running
from recorded import load
from router_fleet import read_answer, request_bytes

ENOUGH = 15
"""Answers in each phase."""
DEADLINE_S = 60.0


class Client:
    """Asks again and again with the key that it has, every second answer as a stream, and keeps each status."""

    def __init__(self, port: int, key: str) -> None:
        self.key = key
        self.seen: list[tuple[str, int]] = []
        self._port, self._news = port, asyncio.Event()
        self._requests = itertools.cycle(one for one in load().requests if one.way != "error" and one.api == "completions")

    async def run(self) -> None:
        for number in itertools.count():
            key = self.key
            body = {"model": "tiny", **next(self._requests).body, "stream": number % 2 == 0}
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
            writer.write(request_bytes("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}))
            answer = await read_answer(reader, DEADLINE_S)
            writer.close()
            whole = answer.status != 200 or number % 2 or answer.events[-1:] == ["[DONE]"]
            self.seen.append((key, answer.status if whole else 0))
            self._news.set()

    async def wait(self, key: str, status: int, many: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.seen.count((key, status)) < many:
                await self._news.wait()
                self._news.clear()


async def test_keys_are_rotated_without_a_refused_request_or_a_new_process(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    async with running(tmp_path, 1, 1, api_key_file=str(file)) as (port, router):
        client, early = Client(port, "old"), Client(port, "new")
        asking = asyncio.create_task(client.run())
        await client.wait("old", 200, ENOUGH)
        file.write_text("old\nnew\n")
        probing = asyncio.create_task(early.run())
        await early.wait("new", 200, 1)
        probing.cancel()
        assert (await asyncio.gather(probing, return_exceptions=True))[0] is not None
        client.key = "new"
        await client.wait("new", 200, ENOUGH)
        file.write_text("new\n")
        late = Client(port, "old")
        probing = asyncio.create_task(late.run())
        await late.wait("old", 401, 1)
        await client.wait("new", 200, 2 * ENOUGH)
        for task in (asking, probing):
            task.cancel()
        ended = await asyncio.gather(asking, probing, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        assert router.returncode() is None
    assert {status for _, status in client.seen} == {200}, "the client that changed its key in time lost nothing"
