"""A second router before the same real engines: HTTPS, and paths that are passed on."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certificates
import httpx
import msgspec
import openai
import pytest
from cluster import Cluster
from engines import MODEL_NAME, post
from fleets import serving
from processes import Group, free_port

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.router.endpoints.probes import RENDERED_S

pytestmark = pytest.mark.engines
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 24}
PROMPT = "Two routers, one fleet: "
STREAMS = 12


def _ready(url: str, trust: ssl.SSLContext) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5, context=trust) as answer:
            return bool(answer.status == 200)
    except (urllib.error.HTTPError, OSError):
        return False


def _knows(cluster: Cluster, url: str, trust: ssl.SSLContext) -> bool:
    """Whether a router would send requests to each instance: it is ready as soon as it can reach decode."""
    token = keys.admin_token(keys.read(cluster.key_file))
    asked = urllib.request.Request(f"{url}/fleet", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(asked, timeout=60, context=trust) as answer:
            fleet = msgspec.json.decode(answer.read(), type=Fleet)
    except (urllib.error.HTTPError, OSError):
        return False
    return serving(fleet).keys() == {one.name for one in cluster.instances}


STALE_S = RENDERED_S + 0.1
"""How old a page of metrics may be."""


def _counted(router: Group, http: httpx.Client) -> None:
    """Each API, whole and streamed, with the lengths that the engine tells; chats sampled, as most are."""
    asked = {"model": MODEL_NAME, "temperature": 0}
    message = {"role": "user", "content": PROMPT}
    for api, spent, body in (
            ("messages", "output_tokens", {**asked, "max_tokens": 8, "messages": [message]}),
            ("responses", "output_tokens", {**asked, "max_output_tokens": 8, "input": [message]}),
            ("chat", "completion_tokens", {**asked, "temperature": 1, "max_tokens": 8, "ignore_eos": True,
                                           "messages": [message]})):
        usage = _one(router, http, api, body)["usage"]
        before = _metrics(http)
        _one(router, http, api, {**body, "stream": True})
        assert usage[spent] > 1
        wanted = {"xpyd_router_tokens_total": usage[spent], f'xpyd_router_ttft_seconds_count{{api="{api}"}}': 1,
                  f'xpyd_router_tpot_seconds_count{{api="{api}"}}': 1, "xpyd_router_handover_seconds_count": 1}
        router.wait_until(lambda before=before, wanted=wanted: wanted == dict(
            zip(wanted, map(_grown(http, before), wanted), strict=True)), 120.0, f"what is counted of {api}", poll_s=0.1)


def _one(router: Group, http: httpx.Client, api: str, body: dict[str, Any]) -> Any:
    """An answer, once it is counted."""
    before = _metrics(http)
    answer = http.post("/v1/chat/completions" if api == "chat" else f"/v1/{api}", json=body)
    assert answer.status_code == 200
    name = f'xpyd_router_requests_total{{api="{api}",outcome="ok"}}'
    router.wait_until(lambda: _grown(http, before)(name) == 1, 120.0, f"a record of {api}", poll_s=0.1)
    return None if body.get("stream") else answer.json()


def _metrics(http: httpx.Client) -> dict[str, float]:
    time.sleep(STALE_S)
    answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def _grown(http: httpx.Client, before: dict[str, float]) -> Callable[[str], float]:
    now = _metrics(http)
    return lambda name: now.get(name, 0.0) - before.get(name, 0.0)


def test_https_and_passed_paths_before_real_engines(cluster: Cluster, tmp_path: Path) -> None:
    cert, key = certificates.write(tmp_path, "router")
    trust = ssl.create_default_context(cafile=cert)
    whole = post(f"{cluster.url}/v1/completions", {**GREEDY, "prompt": PROMPT})["choices"][0]["text"]
    admin = free_port()
    with cluster.other_router(tls_cert_file=cert, tls_key_file=key, admin_port=admin) as (router, port):
        url = f"https://localhost:{port}"
        router.wait_until(lambda: _ready(url, trust), 120.0, "ready over TLS", poll_s=0.2)
        told = f"https://localhost:{admin}"
        router.wait_until(lambda: _knows(cluster, told, trust), 120.0, "told of both instances", poll_s=0.2)

        def client() -> openai.OpenAI:
            """On a connection of its own."""
            return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=240.0,
                                 http_client=httpx.Client(verify=trust))

        def streamed() -> str:
            with client() as api, api.completions.create(prompt=PROMPT, stream=True, **GREEDY) as stream:
                return "".join(event.choices[0].text for event in stream if event.choices)

        assert Counter(streamed() for _ in range(STREAMS)) == {whole: STREAMS}

        with httpx.Client(verify=trust, base_url=url, timeout=240.0) as http:
            body = {"model": MODEL_NAME, "prompt": PROMPT}
            tokens = http.post("/tokenize", json=body)
            assert tokens.json() == post(f"{cluster.plain_url}/tokenize", body)
            said = http.post("/v1/responses", json={"model": MODEL_NAME, "input": PROMPT, "temperature": 0,
                                                    "max_output_tokens": 24}).json()
            message = {"role": "user", "content": PROMPT}
            chat = http.post("/v1/chat/completions", json={**GREEDY, "messages": [message]}).json()
            [part] = said["output"][-1]["content"]
            assert part["text"] == chat["choices"][0]["message"]["content"]
            _counted(router, http)
            refused = http.post("/v1/load_lora_adapter", json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "path_not_served")
