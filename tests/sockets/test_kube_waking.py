"""Polls of the operator at routers that lie, are silent or are of a release before, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from kube_keys import key

from xpyd_operator.kube.routers import waking
from xpyd_operator.kube.routers.waking import WakeCaller
from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.waking import PATH, WakeAnswer, WakeCall

SECRET = keys.derive(key(), "admin call")
Handler = Callable[[web.Request], Awaitable[web.Response]]


def signed(request: web.Request, body: bytes) -> web.Response:
    mac = signing.sign_answer(SECRET, request.headers[signing.HEADER], body)
    return web.Response(body=body, headers={signing.HEADER: mac})


def answer(held: int) -> bytes:
    return msgspec.json.encode(WakeAnswer("r0", held))


@contextlib.asynccontextmanager
async def asking(handler: Handler, *, routers: int = 1) -> AsyncIterator[tuple[WakeCaller, list[Any], list[float]]]:
    """A caller and the routers that it is to ask; when each of its calls came."""
    calls: list[float] = []

    async def on(request: web.Request) -> web.Response:
        calls.append(asyncio.get_running_loop().time())
        return await handler(request)

    app = web.Application()
    app.add_routes([web.post(PATH, on)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    caller = WakeCaller(lambda: None, pace_s=0.02)
    pods = [SimpleNamespace(uid=f"u{number}", name=f"r{number}", instance=f"r{number}", ip="127.0.0.1", admin_port=port)
            for number in range(routers)]
    try:
        yield caller, pods, calls
    finally:
        await caller.close()
        await runner.cleanup()


async def wait(condition: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + 20.0
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


async def test_an_answer_without_the_signature_of_the_service_starts_nothing() -> None:
    async def lies(request: web.Request) -> web.Response:
        response = signed(request, answer(0))
        return web.Response(body=answer(7), headers=response.headers)

    async with asking(lies) as (caller, pods, calls):
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        await wait(lambda: len(calls) >= 3)
        assert caller.take() == 0


@pytest.mark.parametrize("body", [b"{", b'{"router": "r0", "held": "many"}', b'{"router": "r0", "held": -3}', b"x" * 9999])
async def test_an_answer_that_makes_no_sense_starts_nothing_and_the_router_is_asked_again(body: bytes) -> None:
    async def wrong(request: web.Request) -> web.Response:
        return signed(request, body)

    async with asking(wrong) as (caller, pods, calls):
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        await wait(lambda: len(calls) >= 3)
        assert caller.take() == 0


async def test_a_router_that_never_answers_is_given_up_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "POLL_S", 0.2)
    monkeypatch.setattr(waking, "BEYOND_S", 0.1)
    silent = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        if request.headers["Host"].startswith("127.0.0.1") and not silent.is_set():
            await asyncio.sleep(60.0)
        return signed(request, answer(2))

    async with asking(never) as (caller, pods, calls):
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        await wait(lambda: len(calls) >= 2)
        began = asyncio.get_running_loop().time()
        await caller.keep(pods, lambda _: key(), WakeCall(1))
        assert asyncio.get_running_loop().time() - began < 1.0, "a round does not wait for polls"
        silent.set()
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        await wait(lambda: caller._held)
        assert caller.take() == 2


async def test_a_router_of_the_release_before_is_asked_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "LONGEST_S", 0.15)

    async def unknown(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async with asking(unknown) as (caller, pods, calls):
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        await wait(lambda: len(calls) >= 11)
        assert calls[10] - calls[0] >= 0.8, "0.04 + 0.08 + 8 * 0.15 s, instead of 0.2 s"
        assert caller.take() == 0


async def test_what_is_told_while_somebody_is_wanted_already_starts_nobody_later() -> None:
    held = 5

    async def waits(request: web.Request) -> web.Response:
        return signed(request, answer(held))

    async with asking(waits) as (caller, pods, calls):
        await caller.keep(pods, lambda _: key(), WakeCall(1))
        await wait(lambda: len(calls) >= 3)
        held = 0
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        seen = len(calls)
        await wait(lambda: len(calls) >= seen + 3)
        assert caller.take() == 0


async def test_who_has_left_before_anybody_was_started_is_forgotten() -> None:
    held = 5

    async def leaves(request: web.Request) -> web.Response:
        return signed(request, answer(held))

    async with asking(leaves) as (caller, pods, _):
        await caller.keep(pods, lambda _: key(), WakeCall(0))
        await wait(lambda: caller._held)
        held = 0
        await wait(lambda: not caller._held)
        assert caller.take() == 0


async def test_a_router_has_one_poll_and_one_that_goes_takes_what_it_told_along() -> None:
    async def waits(request: web.Request) -> web.Response:
        return signed(request, answer(1))

    async with asking(waits, routers=3) as (caller, pods, _):
        for _ in range(4):
            await caller.keep(pods, lambda _: key(), WakeCall(0))
        assert len(caller) == 3
        await wait(lambda: len(caller._held) == 3)
        await caller.keep(pods[:1], lambda _: key(), WakeCall(0))
        assert len(caller) == 1
        assert caller.take() == 1
        await caller.keep(pods[:1], lambda _: key(), None)
        assert (len(caller), caller.take()) == (0, 0)
