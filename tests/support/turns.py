"""Conversations over a router in this process, before real engines: a pull is worth it there for anything.

    with pulls_for_anything(), Cluster(folder, engine_args=ARGS) as cluster:
        async with router_of(cluster) as router:
            one = Conversation(router, cluster, seed=7)
            await one.turn()
            assert await one.cold() == one.last
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
from cluster import HEARTBEAT_S, RESOLVE_S, SERVICE, Cluster
from engines import HTTP_TIMEOUT_S, MODEL_NAME, metric
from processes import free_port
from tokenizers import pre_tokenizers

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.router.app import RouterProcess
from xpyd_sidecar.router.serving import pulls

BLOCK = 32
ARGS = ("--block-size", str(BLOCK), "--max-model-len", "4096", "--max-num-batched-tokens", "4096")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = [at + 2 for at, char in enumerate(ALPHABET) if char.isascii() and char.isalpha()]
"""Tokens of which answers are made: their text is the same tokens again."""
ANSWER, WORDS = 96, 160
"""Tokens of an answer, and of a user's words."""
TOLD_S = 2 * HEARTBEAT_S + 1.0
"""In which routers hear of what engines hold."""


@contextmanager
def pulls_for_anything() -> Iterator[None]:
    """With tiny engines and short answers none would be worth it."""
    before = pulls.LEAST_TOKENS, pulls.GAIN, pulls.PAUSE_S
    pulls.LEAST_TOKENS, pulls.GAIN, pulls.PAUSE_S = BLOCK, 0.0, 0.0  # type: ignore[misc]  # for this purpose alone
    try:
        yield
    finally:
        pulls.LEAST_TOKENS, pulls.GAIN, pulls.PAUSE_S = before  # type: ignore[misc]


@asynccontextmanager
async def router_of(cluster: Cluster) -> AsyncIterator[RouterProcess]:
    """One more router before a cluster's engines, which it has heard of."""
    port = int(cluster.other_address.rpartition(":")[2])
    settings = RouterConfig(host="127.0.0.1", port=free_port(), members_port=port, admin_port=free_port(),
                            heartbeat_s=HEARTBEAT_S, resolve_s=RESOLVE_S)
    config = SidecarConfig(service=SERVICE, instance=InstanceName("here"), key_file=str(cluster.key_file), run_dir="",
                           router=settings)
    router = RouterProcess(config, keys.read(cluster.key_file))
    await router.start()
    try:
        await asyncio.to_thread(cluster.wait_ready)
        await wait_pickable(router)
        yield router
    finally:
        await router.end()


async def wait_pickable(router: RouterProcess) -> None:
    """Until somebody of each role can be picked."""
    async with asyncio.timeout(120):
        while not all(router.context.roster.pickable(role) for role in Role):  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.1)


class Conversation:
    """Turns of one client."""

    def __init__(self, router: RouterProcess, cluster: Cluster, seed: int) -> None:
        self.router, self.cluster = router, cluster
        self.url = f"http://127.0.0.1:{router.port}"
        self.messages: list[dict[str, str]] = []
        self.client = httpx.AsyncClient(timeout=HTTP_TIMEOUT_S)
        self._draw = random.Random(seed)

    @property
    def last(self) -> str:
        """The last answer."""
        return self.messages[-1]["content"]

    def say(self, words: int = WORDS) -> None:
        """The user's next words."""
        text = "".join(self._draw.choice("abcdefghij ") for _ in range(words))
        self.messages.append({"role": "user", "content": text})

    async def answer(self, messages: list[dict[str, str]], url: str = "", **fields: Any) -> str:
        """What is answered to these messages."""
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
                "allowed_token_ids": LETTERS, **fields}
        answer = await self.client.post(f"{url or self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def go_on(self) -> None:
        """The answer to what was said last."""
        self.messages.append({"role": "assistant", "content": await self.answer(self.messages)})

    async def turn(self, words: int = WORDS) -> float:
        """One turn, and the seconds in which all hear of it. Returns the tokens that prefill has computed."""
        before = self.computed()
        self.say(words)
        await self.go_on()
        await asyncio.sleep(TOLD_S)
        return self.computed() - before

    async def cold(self) -> str:
        """The last answer, of an engine that has nothing of it in its cache."""
        return await self.answer(self.messages[:-1], self.cluster.decode[0].engine.url, cache_salt=f"{random.random()}")

    def computed(self) -> float:
        """Tokens of prompts that prefill has computed in its life."""
        return metric(self.cluster.prefill[0].engine.url, "vllm:prompt_tokens_by_source_total", source="local_compute")


def pulled(router: RouterProcess) -> dict[str, float]:
    """Pulls of a router, by how they ended."""
    counts = router.context.observer.metrics._counts["xpyd_router_pulls"]
    return {result: count for (result,), count in counts.items()}
