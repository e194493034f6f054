"""A conversation on two real engines: what decode has answered comes to prefill, which computes the new words alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import HEARTBEAT_S, RESOLVE_S, SERVICE, Cluster
from engines import HTTP_TIMEOUT_S, MODEL_NAME, metric
from processes import free_port
from tokenizers import pre_tokenizers

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.router.app import RouterProcess
from xpyd_sidecar.router.serving import pulls

pytestmark = pytest.mark.engines
BLOCK = 32
ARGS = ("--block-size", str(BLOCK), "--max-model-len", "4096", "--max-num-batched-tokens", "4096")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = [at + 2 for at, char in enumerate(ALPHABET) if char.isascii() and char.isalpha()]
"""Tokens of which answers are made: their text is the same tokens again."""
TURNS, ANSWER, WORDS = 10, 96, 160
TEMPLATE = len("user: \nassistant: ") + len("\nassistant: ")
"""Tokens of it between an answer and the next one; and those that stand behind the answer where that is moved."""


class Conversation:
    """Turns of one client, over a router in this process."""

    def __init__(self, router: RouterProcess, cluster: Cluster) -> None:
        self.url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
        self.router, self.cluster = router, cluster
        self.messages: list[dict[str, str]] = []
        self.client = httpx.AsyncClient(timeout=HTTP_TIMEOUT_S)
        self._draw = random.Random(7)

    def say(self, words: int) -> None:
        text = "".join(self._draw.choice("abcdefghij ") for _ in range(words))
        self.messages.append({"role": "user", "content": text})

    async def answer(self, url: str = "", **fields: Any) -> str:
        body = {"model": MODEL_NAME, "messages": self.messages, "max_tokens": ANSWER, "temperature": 0,
                "ignore_eos": True, "allowed_token_ids": LETTERS, **fields}
        answer = await self.client.post(url or self.url, json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def turn(self, words: int = WORDS) -> float:
        """One turn, and the seconds in which all hear of it. Returns the tokens that prefill has computed."""
        before = self.computed()
        self.say(words)
        self.messages.append({"role": "assistant", "content": await self.answer()})
        await asyncio.sleep(2 * HEARTBEAT_S + 1.0)
        return self.computed() - before

    async def check(self) -> None:
        """The last answer is that of an engine that has nothing in its cache."""
        *self.messages, last = self.messages
        engine = self.cluster.decode[0].engine
        cold = await self.answer(f"{engine.url}/v1/chat/completions", cache_salt=f"{random.random()}")
        self.messages.append(last)
        assert last["content"] == cold

    def computed(self) -> float:
        return metric(self.cluster.prefill[0].engine.url, "vllm:prompt_tokens_by_source_total", source="local_compute")

    @property
    def pulled(self) -> dict[str, float]:
        counts = self.router.context.observer.metrics._counts["xpyd_router_pulls"]
        return {result: count for (result,), count in counts.items()}


@pytest.fixture
async def conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Conversation]:
    """With tiny engines and short answers a pull is worth it for anything."""
    monkeypatch.setattr(pulls, "LEAST_TOKENS", BLOCK)
    monkeypatch.setattr(pulls, "GAIN", 0.0)
    monkeypatch.setattr(pulls, "LIMIT_S", 30.0)
    with Cluster(tmp_path, engine_args=ARGS) as cluster:
        port = int(cluster.other_address.rpartition(":")[2])
        config = SidecarConfig(service=SERVICE, instance=InstanceName("here"), key_file=str(cluster.key_file), run_dir="",
                               router=RouterConfig(host="127.0.0.1", port=free_port(), members_port=port,
                                                   admin_port=free_port(), heartbeat_s=HEARTBEAT_S, resolve_s=RESOLVE_S))
        router = RouterProcess(config, keys.read(cluster.key_file))
        await router.start()
        try:
            await asyncio.to_thread(cluster.wait_ready)
            async with asyncio.timeout(60):
                while not all(router.context.roster.pickable(role) for role in Role):  # noqa: ASYNC110 (has no event)
                    await asyncio.sleep(0.1)
            made = Conversation(router, cluster)
            yield made
            await made.client.aclose()
        finally:
            await router.end()


async def test_ten_turns_prefill_computes_the_new_words_alone(conversation: Conversation) -> None:
    first = await conversation.turn()
    assert first >= WORDS
    counts = [await conversation.turn() for _ in range(TURNS - 1)]
    await conversation.check()
    assert conversation.pulled == {"ok": TURNS - 1}
    assert max(counts) <= WORDS + TEMPLATE + 2 * BLOCK, counts
    assert sum(counts) <= (TURNS - 1) * (WORDS + TEMPLATE + BLOCK), counts


async def test_a_prefill_instance_that_dies_in_a_pull_costs_no_answer(conversation: Conversation) -> None:
    await conversation.turn(400)
    engine = conversation.cluster.prefill[0].engine
    conversation.say(WORDS)
    asked = asyncio.ensure_future(conversation.answer())
    async with asyncio.timeout(60):
        while not len(conversation.router.context.pulls):  # noqa: ASYNC110 (what is awaited has no event)
            await asyncio.sleep(0.001)
    engine.kill()
    conversation.messages.append({"role": "assistant", "content": await asked})
    await conversation.check()
