"""Programs of others, as their users run them, against the router before real engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import openai
import pytest
import schemathesis
from cluster import Cluster
from engines import MODEL_NAME, get, post
from hypothesis import strategies
from make_model import ensure_model

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.router.api import paths

pytestmark = pytest.mark.engines
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 16}
MESSAGES: list[Any] = [{"role": "user", "content": "What is a lease? ☃"}]
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
EXAMPLES = int(os.environ.get("EXAMPLES", "6"))
"""Requests that schemathesis makes of each operation; EXAMPLES=100 for long."""
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture
def api(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=240.0)


def test_openai_completions_whole_streamed_and_async_say_the_same(cluster: Cluster, api: openai.OpenAI) -> None:
    whole = api.completions.create(prompt="A block is", **GREEDY)
    usage: Any = {"include_usage": True}
    with api.completions.create(prompt="A block is", stream=True, stream_options=usage, **GREEDY) as stream:
        events = list(stream)
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    last = events[-1].usage
    assert last is not None
    assert whole.usage is not None
    assert (last.prompt_tokens, last.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)

    async def asked() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as many:
            answers = await asyncio.gather(*(many.completions.create(prompt="A block is", **GREEDY) for _ in range(8)))
        return [answer.choices[0].text for answer in answers]

    assert set(asyncio.run(asked())) == {whole.choices[0].text}


def test_openai_chat_with_logprobs_tools_and_a_shape(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    with api.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True, **GREEDY) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert whole.choices[0].logprobs is not None
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    tokens = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or ()]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content or ()]
    with_tools = api.chat.completions.create(messages=MESSAGES, tools=[TOOL], tool_choice="none", **GREEDY)
    assert with_tools.choices[0].message.content == whole.choices[0].message.content
    shape = {"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}
    shaped = api.chat.completions.create(messages=MESSAGES, extra_body=shape, **GREEDY)
    assert re.fullmatch("[a-f]{4}-[0-9]{2}", shaped.choices[0].message.content or "")


def test_openai_raises_the_error_that_fits(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.completions.create(**{**GREEDY, "model": "nobody"}, prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(prompt="x", extra_body={"kv_transfer_params": {}}, **GREEDY)
    assert caught.value.param == "kv_transfer_params"
    with pytest.raises(openai.BadRequestError, match=r"2048|maximum context"):
        api.completions.create(**{**GREEDY, "max_tokens": 5000}, prompt="x")
    with pytest.raises(openai.APIStatusError):
        api.chat.completions.create(messages=MESSAGES, tools=[TOOL], tool_choice={"type": "function", "function": {
            "name": "look"}}, **GREEDY)  # these engines have no parser for tool calls, and say so
    with pytest.raises(openai.APIStatusError):
        api.embeddings.create(model=MODEL_NAME, input="x")
    assert [model.id for model in api.models.list()] == [MODEL_NAME]


def test_vllm_bench_serve_completes_every_request(cluster: Cluster, tmp_path: Path) -> None:
    [decode] = cluster.decode
    before = decode.engine.metric(f"{metrics.TRANSFERS}_total", side="receive", outcome="ok")
    arguments = ["--backend", "openai", "--base-url", cluster.url, "--endpoint", "/v1/completions", "--model", MODEL_NAME,
                 "--tokenizer", str(ensure_model()), "--dataset-name", "random", "--random-input-len", "200",
                 "--random-output-len", "16", "--num-prompts", "24", "--max-concurrency", "8", "--ignore-eos",
                 "--seed", "7", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path),
                 "--result-filename", "result.json"]
    done = subprocess.run([sys.executable, "-c", BENCH, *arguments], check=False, text=True, timeout=600,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (24, 0, 24 * 16)
    assert decode.engine.metric(f"{metrics.TRANSFERS}_total", side="receive", outcome="ok") - before >= 24


def test_schemathesis_finds_no_server_error_of_the_routers_own(cluster: Cluster) -> None:
    """vLLM's own OpenAPI document, cut to the routed paths. A server error is right only if the engine gives it too."""
    document = json.loads(get(f"{cluster.plain_url}/openapi.json"))
    routed = {route.path for route in paths.TABLE if route.way in {paths.RouteKind.DISAGGREGATED, paths.RouteKind.PASSED}}
    document["paths"] = {path: row for path, row in document["paths"].items() if path in routed}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(document["paths"])
    sent: Counter[str] = Counter()
    found: list[str] = []

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                         phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(data=strategies.data())
    def ask(operation: Any, data: Any) -> None:
        case = data.draw(operation.as_strategy())
        _keep_short(case)
        answer = case.call(base_url=cluster.url, timeout=240)
        sent[f"{operation.method.upper()} {operation.path}"] += 1
        if answer.status_code < 500 or answer.status_code == 501:
            return
        engine = case.call(base_url=cluster.plain_url, timeout=240)
        if engine.status_code < 500:
            found.append(f"{case.as_curl_command()[:600]}: {answer.status_code} {answer.text[:300]}; "
                         f"the engine itself says {engine.status_code}")

    operations = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    for operation in operations:
        ask(operation)
    print(dict(sent))
    assert not found, found[:3]
    assert min(sent[f"{one.method.upper()} {one.path}"] for one in operations) >= 1
    assert sum(sent.values()) >= 3 * len(operations)
    assert post(f"{cluster.url}/v1/completions", {**GREEDY, "prompt": "x"})["choices"]


def _keep_short(case: Any) -> None:
    """What is asked for may be wrong in every way but not endless: 4 tokens, 2 answers."""
    if not isinstance(case.body, dict):
        return
    for name, most in {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 16, "n": 2, "best_of": 2}.items():
        value = case.body.get(name)
        if (value is None and name == "max_tokens") or (isinstance(value, int) and value > most):
            case.body[name] = most
