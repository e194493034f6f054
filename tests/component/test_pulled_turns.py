"""A conversation on two real engines: what decode has answered comes to prefill, which computes the new words alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster import Cluster
from turns import ARGS, BLOCK, WORDS, Conversation, pulled, pulls_for_anything, router_of

pytestmark = pytest.mark.engines
TURNS = 10
TEMPLATE = len("user: \nassistant: ") + len("\nassistant: ")
"""Tokens of it between an answer and the next one; and those that stand behind the answer where that is moved."""


@pytest.fixture
async def conversation(tmp_path: Path) -> AsyncIterator[Conversation]:
    with pulls_for_anything(), Cluster(tmp_path, engine_args=ARGS) as cluster:
        async with router_of(cluster) as router:
            yield Conversation(router, cluster, 7)


async def test_ten_turns_prefill_computes_the_new_words_alone(conversation: Conversation) -> None:
    first = await conversation.turn()
    assert first >= WORDS
    counts = [await conversation.turn() for _ in range(TURNS - 1)]
    assert conversation.last == await conversation.cold()
    assert pulled(conversation.router) == {"ok": TURNS - 1}
    assert max(counts) <= WORDS + TEMPLATE + 2 * BLOCK, counts
    assert sum(counts) <= (TURNS - 1) * (WORDS + TEMPLATE + BLOCK), counts


async def test_a_prefill_instance_that_dies_in_a_pull_costs_no_answer(conversation: Conversation) -> None:
    await conversation.turn(400)
    engine = conversation.cluster.prefill[0].engine
    conversation.say()
    asked = asyncio.ensure_future(conversation.go_on())
    async with asyncio.timeout(60):
        while not len(conversation.router.context.pulls):  # noqa: ASYNC110 (what is awaited has no event)
            await asyncio.sleep(0.001)
    engine.kill()
    await asked
    assert conversation.last == await conversation.cold()
