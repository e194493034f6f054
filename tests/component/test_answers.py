"""Whatever is asked through the router is answered token for token as one plain engine answers it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from cluster import Cluster
from corpus import BLOCK, Case, lengths, mixed, prefixes
from engines import MODEL_NAME, Engine, get, post, samples
from traffic import References, client, plain_answers, send

from xpyd_sidecar.contract import metrics

pytestmark = pytest.mark.engines
PROMPTS = lengths() + prefixes()
TRAFFIC = mixed(200)
CHATS = tuple(
    [{"role": "system", "content": "Answer briefly. " * repeat}, {"role": "user", "content": f"What is {word}? ☃"}]
    for repeat in (1, 20, 60)
    for word in ("a block", "a lease")
)


def chat(messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}


def in_dialects(messages: list[dict[str, str]]) -> list[tuple[str, dict[str, Any]]]:
    """A chat as other APIs ask for it."""
    system, user = (one["content"] for one in messages)
    return [("/v1/messages", {"model": MODEL_NAME, "max_tokens": 16, "temperature": 0, "system": system,
                              "messages": messages[1:]}),
            ("/v1/responses", {"model": MODEL_NAME, "max_output_tokens": 16, "temperature": 0, "instructions": system,
                               "input": user})]


IN_DIALECTS = [asked for messages in CHATS for asked in in_dialects(messages)]


def said(path: str, answer: dict[str, Any]) -> str:
    """The text of an answer."""
    parts = answer["content"] if path == "/v1/messages" else [part for item in answer["output"] for part in item["content"]]
    return "".join(part.get("text", "") for part in parts)


class Plain(NamedTuple):
    """What an engine without connector, router or agents answers."""

    prompts: References
    chats: list[str]
    dialects: list[str]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """It runs alone and ends before the others start."""
    with Engine("plain", tmp_path_factory.mktemp("plain"), connector=False) as engine:
        engine.wait_ready()
        references = asyncio.run(plain_answers(engine.url, PROMPTS + TRAFFIC))
        chats = [post(f"{engine.url}/v1/chat/completions", chat(messages)) for messages in CHATS]
        dialects = [said(path, post(f"{engine.url}{path}", body)) for path, body in IN_DIALECTS]
        return Plain(references, [answer["choices"][0]["message"]["content"] for answer in chats], dialects)


def computed(cluster: Cluster) -> dict[str, float]:
    """What decode counts: prompt tokens it computed, tokens through its model, tokens generated, failed loads."""
    [decode] = cluster.decode
    page = get(f"{decode.engine.url}/metrics")  # of one moment: between two pages it counts on
    counted = {
        "prompt": samples(page, "vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
        "steps": samples(page, "vllm:iteration_tokens_total_sum", {}),
        "generated": samples(page, "vllm:generation_tokens_total", {}),
        "received": samples(page, f"{metrics.TRANSFERS}_total", {"side": "receive", "outcome": "ok"}),
        "unused": samples(page, f"{metrics.TRANSFERS}_total", {"side": "receive", "outcome": "unused"}),
        "transfers": samples(page, f"{metrics.TRANSFERS}_total", {"side": "receive"}),
    }
    return {name: sum(values) for name, values in counted.items()}


def counted(cluster: Cluster, before: dict[str, float], **least: float) -> dict[str, float]:
    """What decode has counted since ``before``, once that is at least so much: a page may be a step behind an answer."""
    deadline = time.monotonic() + 60
    while True:
        after = computed(cluster)
        change = {name: after[name] - before[name] for name in after}
        if all(change[name] >= count for name, count in least.items()) or time.monotonic() > deadline:
            return change
        time.sleep(0.2)


def check_decode_computed_nothing(cluster: Cluster, before: dict[str, float], cases: Sequence[Case]) -> None:
    """Decode runs its model once for each token it generates, and once for the last token of each prompt.

    A prompt of one token is that token alone: nothing is taken from elsewhere. Nor is anything of a prompt of which decode
    has all but that token in its own cache: its transfer ends unused.
    """
    expected = sum(case.max_tokens for case in cases)
    single = sum(len(case.prompt) == 1 for case in cases)
    change = counted(cluster, before, generated=expected, transfers=len(cases) - single)
    assert change["generated"] == expected
    assert change["prompt"] == len(cases), change
    assert change["steps"] == change["generated"] + len(cases), change
    assert change["received"] + change["unused"] == change["transfers"] == len(cases) - single, change
    assert change["unused"] <= sum(len(case.prompt) % BLOCK == 1 for case in cases), change


@pytest.mark.smoke
def test_every_prompt_equals_one_plain_engine_and_decode_computes_none_of_it(
        plain: Plain, cluster: Cluster) -> None:
    before = computed(cluster)
    report = asyncio.run(send(cluster.url, PROMPTS, plain.prompts, at_once=1))
    report.check()
    assert report.total == len(PROMPTS) >= 30
    check_decode_computed_nothing(cluster, before, PROMPTS)


def test_200_requests_16_at_a_time_half_streaming_are_all_equal(
        plain: Plain, cluster: Cluster) -> None:
    before = computed(cluster)
    report = asyncio.run(send(cluster.url, TRAFFIC, plain.prompts, at_once=16))
    report.check()
    assert report.total == 200
    check_decode_computed_nothing(cluster, before, TRAFFIC)


def test_chats_streamed_and_whole_equal_one_plain_engine(plain: Plain, cluster: Cluster) -> None:
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
    assert answers == [(text, text) for text in plain.chats]
    assert len(set(answers)) == len(CHATS)


def streamed(url: str, path: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer, which ends as its API says."""
    ended, text = "", ""
    with httpx.Client(timeout=240) as http, http.stream("POST", url + path, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                ended = event["type"]
                if ended == "content_block_delta":
                    text += event["delta"].get("text", "")
                elif ended == "response.output_text.delta":
                    text += event["delta"]
    assert ended in {"message_stop", "response.completed", "response.incomplete"}
    return text


def test_prompts_of_other_dialects_are_prefilled_and_answers_are_one_plain_engines(plain: Plain, cluster: Cluster) -> None:
    before = computed(cluster)
    whole = [said(path, post(cluster.url + path, body)) for path, body in IN_DIALECTS]
    streams = [streamed(cluster.url, path, body) for path, body in IN_DIALECTS]
    assert whole == streams == plain.dialects
    assert len(set(whole)) == len(CHATS), "each says its own, in both dialects the same"
    asked = 2 * len(IN_DIALECTS)
    change = counted(cluster, before, received=asked, prompt=asked)
    assert change["prompt"] == asked, change
    assert change["steps"] == change["generated"] + asked > 2 * asked, change
    assert change["received"] == change["transfers"] == asked, change


def test_usage_counts_the_whole_prompt_and_the_answer(plain: Plain, cluster: Cluster) -> None:
    case = PROMPTS[-1]
    answer = post(f"{cluster.url}/v1/completions", case.body(MODEL_NAME))
    assert answer["usage"]["prompt_tokens"] == len(case.prompt)
    assert answer["usage"]["completion_tokens"] == case.max_tokens
    assert tuple(answer["choices"][0]["token_ids"]) == plain.prompts[case].tokens


def test_the_models_list_names_the_served_model(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == [MODEL_NAME]
