"""Whatever is asked through the router is answered token for token as one plain engine answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from cluster import Cluster
from corpus import Case, lengths, mixed, prefixes
from engines import MODEL_NAME, Engine, post
from traffic import References, client, plain_answers, send

from xpyd_sidecar.contract import metrics

PROMPTS = lengths() + prefixes()
TRAFFIC = mixed(200)
CHATS = tuple(
    [{"role": "system", "content": "Answer briefly. " * repeat}, {"role": "user", "content": f"What is {word}? ☃"}]
    for repeat in (1, 20, 60)
    for word in ("a block", "a lease")
)


def chat(messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[References, list[str]]:
    """What an engine without connector, router or agents answers. It runs alone and ends before the others start."""
    with Engine("plain", tmp_path_factory.mktemp("plain"), connector=False) as engine:
        engine.wait_ready()
        references = asyncio.run(plain_answers(engine.url, PROMPTS + TRAFFIC))
        chats = [post(f"{engine.url}/v1/chat/completions", chat(messages)) for messages in CHATS]
        return references, [answer["choices"][0]["message"]["content"] for answer in chats]


def computed(cluster: Cluster) -> dict[str, float]:
    """What decode counts: prompt tokens it computed, tokens through its model, tokens generated, failed loads."""
    [decode] = cluster.decode
    return {
        "prompt": decode.engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute"),
        "steps": decode.engine.metric("vllm:iteration_tokens_total_sum"),
        "generated": decode.engine.metric("vllm:generation_tokens_total"),
        "received": decode.engine.metric(f"{metrics.TRANSFERS}_total", side="receive", outcome="ok"),
        "transfers": decode.engine.metric(f"{metrics.TRANSFERS}_total", side="receive"),
    }


def check_decode_computed_nothing(cluster: Cluster, before: dict[str, float], cases: Sequence[Case]) -> None:
    """Decode runs its model once for each token it generates and not once more.

    A prompt of one token is the exception: the engine has no prompt left of it to take from elsewhere, and computes it.
    """
    expected = sum(case.max_tokens for case in cases)
    deadline = time.monotonic() + 10
    while (after := computed(cluster))["generated"] - before["generated"] < expected and time.monotonic() < deadline:
        time.sleep(0.2)  # statistics lag by a step
    change = {name: after[name] - before[name] for name in after}
    single = sum(len(case.prompt) == 1 for case in cases)
    assert change["generated"] == expected
    assert change["prompt"] == single, change
    assert change["steps"] == change["generated"] + single, change
    assert change["received"] == change["transfers"] == len(cases), change


def test_every_prompt_equals_one_plain_engine_and_decode_computes_none_of_it(
        plain: tuple[References, list[str]], cluster: Cluster) -> None:
    before = computed(cluster)
    report = asyncio.run(send(cluster.url, PROMPTS, plain[0], at_once=1))
    report.check()
    assert report.total == len(PROMPTS) >= 30
    check_decode_computed_nothing(cluster, before, PROMPTS)


def test_200_requests_16_at_a_time_half_streaming_are_all_equal(
        plain: tuple[References, list[str]], cluster: Cluster) -> None:
    before = computed(cluster)
    report = asyncio.run(send(cluster.url, TRAFFIC, plain[0], at_once=16))
    report.check()
    assert report.total == 200
    check_decode_computed_nothing(cluster, before, TRAFFIC)


def test_chats_streamed_and_whole_equal_one_plain_engine(plain: tuple[References, list[str]], cluster: Cluster) -> None:
    async def ask(api: openai.AsyncOpenAI, messages: list[dict[str, str]]) -> tuple[str, str]:
        arguments: dict[str, Any] = chat(messages)
        arguments["extra_body"] = {"ignore_eos": arguments.pop("ignore_eos")}
        whole = await api.chat.completions.create(**arguments)
        text = ""
        async for event in await api.chat.completions.create(**arguments, stream=True):
            text += (event.choices[0].delta.content or "") if event.choices else ""
        return whole.choices[0].message.content or "", text

    async def all_of_them() -> list[tuple[str, str]]:
        async with client(cluster.url) as api:
            return [await ask(api, messages) for messages in CHATS]

    answers = asyncio.run(all_of_them())
    assert answers == [(text, text) for text in plain[1]]
    assert len(set(answers)) == len(CHATS)


def test_usage_counts_the_whole_prompt_and_the_answer(plain: tuple[References, list[str]], cluster: Cluster) -> None:
    case = PROMPTS[-1]
    answer = post(f"{cluster.url}/v1/completions", case.body(MODEL_NAME))
    assert answer["usage"]["prompt_tokens"] == len(case.prompt)
    assert answer["usage"]["completion_tokens"] == case.max_tokens
    assert tuple(answer["choices"][0]["token_ids"]) == plain[0][case].tokens


def test_the_models_list_names_the_served_model(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == [MODEL_NAME]
