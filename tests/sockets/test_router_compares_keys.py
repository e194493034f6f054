"""Every key that a client brings is compared by ``hmac.compare_digest``, whose time tells nothing, and by nothing else.

A spy stands in its place. What it was given tells that digests are compared, once a request however many keys there are,
which nobody outside could make; and since what it answers is what the router does, nothing beside it lets a key in or keeps
one out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from router_fleet import KEY, RouterFleet, fleet

from xpyd_sidecar.contract import keys

LOOPS = ("uvloop",)
Ask = Callable[[RouterFleet, str], Awaitable[int]]
CLIENTS = ("the-first-key", "another-key")
ADMIN = keys.admin_token(KEY)
PRESENTED = {"right": CLIENTS[0], "the last": CLIENTS[1], "wrong": "x" * len(CLIENTS[0]), "short": "t",
             "a prefix": CLIENTS[0][:-1], "longer": CLIENTS[0] + "x", "none": ""}


class Spy:
    """Compares, or says what it is told to, and remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes]] = []
        self.says: bool | None = None
        self._right = hmac.compare_digest

    def __call__(self, one: bytes, other: bytes) -> bool:
        self.seen.append((one, other))
        return self._right(one, other) if self.says is None else self.says

    def pairs(self) -> list[tuple[bytes, bytes]]:
        """What was compared since the last call."""
        found, self.seen = self.seen, []
        return found


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(hmac, "compare_digest", spy)
    monkeypatch.setattr(secrets, "compare_digest", spy)
    return spy


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def generate(f: RouterFleet, key: str) -> int:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "stream": True}
    return (await f.post("/v1/completions", body, headers=headers(key))).status


async def models(f: RouterFleet, key: str) -> int:
    return (await f.get("/v1/models", headers=headers(key))).status


async def embed(f: RouterFleet, key: str) -> int:
    return 200 if (await f.post("/v1/embeddings", {"model": "tiny"}, headers=headers(key))).status != 401 else 401


async def metrics(f: RouterFleet, key: str) -> int:
    return (await f.get("/metrics", headers=headers(key))).status


async def admin(f: RouterFleet, key: str) -> int:
    return (await f.ask("/fleet", headers=headers(key))).status


async def dashboard(f: RouterFleet, key: str) -> int:
    return (await f.ask("/dashboard/data", headers=headers(key))).status


def check(pairs: list[tuple[bytes, bytes]], key: str, *, right: bool, most: int) -> None:
    """Digests of a key were compared, and neither the key nor what anybody could make of it. ``most``: admin and clients,
    and by the shortcut before.
    """
    digests = [pair for pair in pairs if not any(b"earer" in each for each in pair)]  # but a header with the one before
    assert 1 <= len(digests) <= len(pairs) <= most
    assert {len(each) for pair in digests for each in pair} == {32}
    plain = hashlib.sha256(key.encode()).digest()
    assert not [pair for pair in digests if plain in pair or key.encode() in pair]
    assert [pair for pair in digests if pair[0] == pair[1]] or not right


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text("\n".join(CLIENTS))
    return str(file)


@pytest.mark.parametrize("presented", PRESENTED)
@pytest.mark.parametrize("ask", [generate, models, embed, metrics])
async def test_a_clients_key_is_compared_by_its_digest_once_for_all_keys(ask: Ask, presented: str, key_file: str,
                                                                         spy: Spy) -> None:
    async with fleet(1, 1, api_key_file=key_file) as f:
        spy.pairs()
        key = PRESENTED[presented]
        assert await ask(f, key) == (200 if key in CLIENTS else 401)
        check(spy.pairs(), key, right=key in CLIENTS, most=3 if ask is generate else 2)


@pytest.mark.parametrize("presented", [ADMIN, ADMIN[:-1], "x" * len(ADMIN), "x", CLIENTS[0]])
@pytest.mark.parametrize("ask", [admin, dashboard])
async def test_the_admin_token_is_compared_likewise(ask: Ask, presented: str, key_file: str, spy: Spy) -> None:
    async with fleet(1, 1, api_key_file=key_file) as f:
        spy.pairs()
        allowed = presented == ADMIN
        assert await ask(f, presented) == (200 if allowed else 401)
        check(spy.pairs(), presented, right=allowed, most=2)


@pytest.mark.parametrize("ask", [generate, models, embed, metrics, admin, dashboard])
async def test_nothing_else_lets_a_key_in_or_keeps_one_out(ask: Ask, key_file: str, spy: Spy) -> None:
    right = ADMIN if ask in (admin, dashboard) else CLIENTS[0]
    async with fleet(1, 1, api_key_file=key_file) as f:
        for _ in range(5):  # of one form and with one key, so that what was known of the last request may be used
            spy.says = True
            assert await ask(f, right) == 200
            spy.says = False
            assert await ask(f, right) == 401, "let in by something else"
            spy.says = True
            assert await ask(f, "wrong") == 200, "kept out by something else"
            spy.says = None
            assert await ask(f, right) == 200
            assert await ask(f, "wrong") == 401
