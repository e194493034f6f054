"""What a follower makes of whoever answers it in the leader's place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from group_on_host import KEY, MemberOnHost, wait_for
from processes import free_port

from xpyd_sidecar.agent import rounds as rounds_module
from xpyd_sidecar.contract import group, keys, signing
from xpyd_sidecar.contract.group import MemberAnswer, MemberHello
from xpyd_sidecar.contract.ids import HostPort

CALL = "c" * 32


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "LOOK_S", 0.03)
    monkeypatch.setattr(rounds_module, "HELLO_S", 0.1)


async def follower_of(folder: Path, answer: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]) -> MemberOnHost:
    """A follower whose leader is ``answer``, which gets the request and the body of a fitting answer."""
    async def member(request: web.Request) -> web.StreamResponse:
        hello = msgspec.json.decode(await request.read(), type=MemberHello)
        life = CALL if hello.call == CALL else ""
        return await answer(request, msgspec.json.encode(MemberAnswer(1, CALL, life, "h", 1, problem="waits")))
    app = web.Application()
    app.add_routes([web.post(group.PATH, member)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made = MemberOnHost(folder, 1, 2, HostPort(f"127.0.0.1:{port}"))
    await made.start_agent()
    return made


def signed(request: web.Request, body: bytes, key: keys.ServiceKey = KEY) -> dict[str, str]:
    said = request.headers[signing.HEADER]
    return {signing.HEADER: signing.sign_answer(keys.derive(key, "agent call"), said, body)}


@pytest.mark.parametrize("how", ["nothing", "another key", "another call", "another body"])
def test_nobody_without_the_key_answers_in_the_leaders_place(tmp_path: Path, how: str) -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        said = request.headers[signing.HEADER]
        key = keys.derive(KEY, "agent call")
        headers = {
            "nothing": {},
            "another key": signed(request, body, keys.ServiceKey(bytes(32))),
            "another call": {signing.HEADER: signing.sign_answer(key, f"{said} ", body)},
            "another body": signed(request, body + b" "),
        }[how]
        return web.Response(body=body, headers=headers)

    async def body() -> None:
        member = await follower_of(tmp_path, answer)
        assert member.rounds is not None
        rounds = member.rounds
        await wait_for(lambda: "does not hold the service's key" in rounds.problem)
        member.launch()
        await asyncio.sleep(1.5)
        assert (member.answers, member.engines()) == ([], [])
        await member.close()
    asyncio.run(body())


def test_an_answer_counts_in_however_many_pieces_it_comes(tmp_path: Path) -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        out = web.StreamResponse(headers=signed(request, body))
        out.content_length = len(body)
        await out.prepare(request)
        for at in range(0, len(body), 40):
            await out.write(body[at:at + 40])
            await asyncio.sleep(0.005)
        return out

    async def body() -> None:
        member = await follower_of(tmp_path, answer)
        await wait_for(lambda: bool(member.answers))
        assert member.answers[0].problem == "waits"
        await member.close()
    asyncio.run(body())
