"""What ``usage`` says of cached prompt tokens: through prefill and decode the same as one plain engine says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster import Cluster
from engine_pair import UNHURRIED
from engines import HTTP_TIMEOUT_S, MODEL_NAME, Engine, post

pytestmark = pytest.mark.engines
ARGS = ("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "96", "--enable-prompt-tokens-details")
WORDS = ["token", "lease", "block", "router", "cache", "decode", "prefill", "request", "answer", "leg"]
LONG = " ".join(f"{WORDS[number % 10]} {number}" for number in range(40))
OTHER = " ".join(f"{WORDS[number % 7]} {number * 3}" for number in range(40))
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "what is a lease?"}]
OPTIONS = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**OPTIONS, "prompt": LONG, "max_tokens": 3}),
    ("/v1/completions", {**OPTIONS, "prompt": LONG, "max_tokens": 3}),
    ("/v1/completions", {**OPTIONS, "prompt": f"{LONG} and then {OTHER}", "max_tokens": 3}),
    ("/v1/completions", {**OPTIONS, "prompt": OTHER, "max_tokens": 3, "stream": True,
                         "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**OPTIONS, "prompt": OTHER, "max_tokens": 3, "stream": True,
                         "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**OPTIONS, "prompt": ["a b c", LONG], "max_tokens": 3}),  # decode's alone
    ("/v1/chat/completions", {**OPTIONS, "messages": CHAT, "max_tokens": 3}),
    ("/v1/chat/completions", {**OPTIONS, "messages": CHAT, "max_tokens": 3, "stream": True,
                              "stream_options": {"include_usage": True}}),
    ("/v1/messages", {"model": MODEL_NAME, "max_tokens": 3, "temperature": 0, "system": OTHER,
                      "messages": [{"role": "user", "content": "and a block?"}]}),
    ("/v1/messages", {"model": MODEL_NAME, "max_tokens": 3, "temperature": 0, "system": OTHER, "stream": True,
                      "messages": [{"role": "user", "content": "and a block?"}]}),
    ("/v1/responses", {"model": MODEL_NAME, "max_output_tokens": 16, "temperature": 0, "input": f"{OTHER} {LONG}"}),
    ("/v1/responses", {"model": MODEL_NAME, "max_output_tokens": 16, "temperature": 0, "input": f"{OTHER} {LONG}",
                       "stream": True}),
]
"""In this order: what comes again is cached."""
ALONE = 5
"""The one of them that decode does alone, with what it has itself."""


def usage(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What an answer says of its prompt."""
    if not body.get("stream"):
        return dict(post(f"{url}{path}", body)["usage"])
    found: list[dict[str, Any]] = []
    lines = httpx.post(f"{url}{path}", json=body, timeout=HTTP_TIMEOUT_S).raise_for_status().text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            inner = event.get("response") or event.get("message") or event
            if inner.get("usage"):
                found.append(inner["usage"])
    assert found, "no event says usage"
    return {name: value for one in found for name, value in one.items() if value is not None}


def cached(said: dict[str, Any]) -> int:
    """Cached tokens of the prompt, in whatever words."""
    details = said.get("prompt_tokens_details") or said.get("input_tokens_details") or {}
    return int(said.get("cache_read_input_tokens") or details.get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One engine alone, which ends before the others start."""
    with Engine("plain", tmp_path_factory.mktemp("plain"), connector=False, args=ARGS) as engine:
        engine.wait_ready()
        return [usage(engine.url, path, body) for path, body in ASKED]


@pytest.fixture(scope="module")
def details(plain: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1P1D whose engines show details."""
    assert plain
    with Cluster(tmp_path_factory.mktemp("details"), prefill=1, decode=1, engine_args=ARGS, options=UNHURRIED) as cluster:
        cluster.wait_ready()
        yield cluster


def test_usage_says_what_prefill_had_cached_as_one_engine_does(plain: list[dict[str, Any]], details: Cluster) -> None:
    """Without prefill's word, decode's own count is all but the whole prompt from the first time on."""
    assert cached(plain[0]) == 0 < cached(plain[1])
    for number, ((path, body), expected) in enumerate(zip(ASKED, plain, strict=True)):
        said = usage(details.url, path, body)
        if number != ALONE:
            assert (number, cached(said), said) == (number, cached(expected), expected)
    [decode] = details.decode
    assert decode.engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") > 0
    assert decode.engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute") < 1000


def test_without_prefill_usage_says_what_decode_had_cached(plain: list[dict[str, Any]], details: Cluster) -> None:
    assert plain
    [prefill] = details.prefill
    prefill.kill()
    prompt = "never asked before " * 30
    body = {**OPTIONS, "prompt": prompt, "max_tokens": 3}
    first, second = (usage(details.url, "/v1/completions", body) for _ in range(2))
    assert cached(first) == 0
    assert cached(second) > 0
