"""Spans, as a collector gets them over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import certificates
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import HELD_S, Receiver, attributes, receiver
from router_fleet import RouterFleet, fleet
from scripted_engine import Play, ScriptedEngine
from socket_engines import MESSAGE, site, well

from xpyd_sidecar.contract.ids import InstanceName, Role, ServiceName
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.observing import observer, spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends may have no processor for a while."""
    monkeypatch.setattr(spans, "CLOSE_S", 60.0)


async def sent(r: Receiver, f: RouterFleet) -> list[Span]:
    """Every span, once the router has closed its tracing."""
    await f.wait_quiet()
    assert f.context.tracing is not None
    await f.context.tracing.close()
    return r.spans


def told(engine: ScriptedEngine) -> list[str]:
    return [seen.headers.get("traceparent", "") for seen in engine.seen]


async def test_a_request_is_a_server_span_with_a_child_for_each_leg() -> None:
    with receiver() as r:
        async with fleet(otlp_endpoint=r.endpoint) as f:
            before = time.time_ns()
            await f.complete(stream=True)
            found = {span.name: span for span in await sent(r, f)}
        assert r.paths == ["/v1/traces"]
        assert r.resources[0]["service.name"] == "xpyd-router"
        assert (r.resources[0]["service.namespace"], r.resources[0]["service.instance.id"]) == ("test", "r0")
        assert found.keys() == {"text_completion tiny", "prefill", "decode"}
        server = found["text_completion tiny"]
        assert server.kind == Span.SPAN_KIND_SERVER
        assert not server.parent_span_id
        assert before <= server.start_time_unix_nano < server.end_time_unix_nano <= time.time_ns()
        said = attributes(server)
        assert (said["xpyd.outcome"], said["http.response.status_code"]) == ("ok", 200)
        assert (said["xpyd.prefill"], said["xpyd.decode"]) == ("p0", "d0")
        assert 0 <= said["xpyd.handover_s"] <= said["xpyd.ttft_s"] < 60
        assert (said["gen_ai.operation.name"], said["gen_ai.provider.name"], said["gen_ai.request.model"]) == (
            "text_completion", "vllm", "tiny")
        assert (said["gen_ai.request.stream"], said["xpyd.api"]) == (True, "completions")
        assert said["gen_ai.response.time_to_first_chunk"] == said["xpyd.ttft_s"]
        assert "error.type" not in said
        for role, engine in (("prefill", f.p[0]), ("decode", f.d[0])):
            child = found[role]
            assert child.kind == Span.SPAN_KIND_CLIENT
            assert (child.trace_id, child.parent_span_id) == (server.trace_id, server.span_id)
            assert server.start_time_unix_nano <= child.start_time_unix_nano < child.end_time_unix_nano
            said = attributes(child)
            assert (said["xpyd.instance"], said["xpyd.attempt"], said["xpyd.result"]) == (engine.name, 1, "2xx")
            context = f"00-{child.trace_id.hex()}-{child.span_id.hex()}-"
            assert [(line[:-2], int(line[-2:], 16) & 1) for line in told(engine)] == [(context, 1)]


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_collector_with_a_certificate_of_the_house(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """As ``router.template`` says it: docs/kubernetes.md."""
    certificate = certificates.write(tmp_path, "house")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # go before it
        monkeypatch.delenv(name, raising=False)
    if trusted:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", certificate[0])
    with receiver(certificate) as r:
        async with fleet(otlp_endpoint=r.endpoint) as f:
            await f.complete(stream=True)
            assert len(await sent(r, f)) == (3 if trusted else 0)


async def test_the_clients_trace_goes_on_and_reaches_the_engines() -> None:
    with receiver() as r:
        async with fleet(otlp_endpoint=r.endpoint) as f:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
            await f.post("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}, headers=headers)
            found = {span.name: span for span in await sent(r, f)}
        assert {span.trace_id.hex() for span in found.values()} == {TRACE}
        assert found["text_completion tiny"].parent_span_id.hex() == PARENT
        for role, engine in (("prefill", f.p[0]), ("decode", f.d[0])):
            assert told(engine) == [f"00-{TRACE}-{found[role].span_id.hex()}-01"]
            assert engine.seen[0].headers["tracestate"] == "vendor=1"


async def test_generation_in_a_dialect_that_passes_has_spans_too() -> None:
    with receiver() as r:
        async with site((Role.PREFILL, well), (Role.DECODE, well), otlp_endpoint=r.endpoint) as (f, [prefill, decode]):
            await f.post("/v1/messages", MESSAGE, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
            await f.wait(lambda: bool(f.context.observer.recent), "its end")
            found = {span.name: span for span in await sent(r, f)}
        assert found.keys() == {"chat tiny", "prefill", "decode"}
        assert found["chat tiny"].parent_span_id.hex() == PARENT
        said = attributes(found["chat tiny"])
        assert (said["xpyd.outcome"], said["xpyd.prefill"], said["xpyd.decode"]) == ("ok", "e0", "e1")
        for role, engine in (("prefill", prefill), ("decode", decode)):
            lines = [line for line in engine.legs[0].head.split("\r\n") if line.startswith("traceparent:")]
            assert lines == [f"traceparent: 00-{TRACE}-{found[role].span_id.hex()}-01"]


async def test_what_the_client_does_not_sample_is_passed_on_and_not_sent() -> None:
    with receiver() as r:
        async with fleet(otlp_endpoint=r.endpoint) as f:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            await f.post("/v1/completions", {"model": "tiny", "prompt": "hi"}, headers=headers)
            assert await sent(r, f) == []
            assert all(line.startswith(f"00-{TRACE}-") and line.endswith("-00") for line in told(f.d[0]))


@pytest.mark.parametrize("bad", ["", "00-zz-b7ad6b7169203331-01", f"00-{'0' * 32}-{PARENT}-01", "ff" * 500])
async def test_a_malformed_trace_context_begins_a_new_trace(bad: str) -> None:
    with receiver() as r:
        async with fleet(otlp_endpoint=r.endpoint) as f:
            await f.post("/v1/completions", {"model": "tiny", "prompt": "hi"}, headers={"traceparent": bad})
            found = await sent(r, f)
        assert len(found) == 3
        assert len({span.trace_id for span in found}) == 1
        assert TRACE not in {span.trace_id.hex() for span in found}


async def test_every_attempt_has_its_span_and_failures_say_why() -> None:
    with receiver() as r:
        async with fleet(2, 1, otlp_endpoint=r.endpoint) as f:
            f.p[0].plays.append(Play(die_at="request"))
            f.d[0].default = Play(before=0.2)
            for _ in range(2):
                await f.complete(stream=True)
            f.d[0].default = Play(status=500)
            await f.complete(stream=True)
            found = await sent(r, f)
        legs = [attributes(span) for span in found if span.name == "prefill"]
        assert {(said["xpyd.attempt"], said["xpyd.result"]) for said in legs} >= {(1, "lost"), (2, "2xx")}
        lost = next(span for span in found if attributes(span).get("xpyd.result") == "lost")
        assert (lost.status.code, lost.status.message) == (Status.STATUS_CODE_ERROR, "lost")
        failed = [span for span in found if attributes(span).get("xpyd.outcome") == "failed"]
        assert len(failed) == 1
        assert "answered 500" in failed[0].status.message
        good = [span for span in found if attributes(span).get("xpyd.outcome") == "ok"]
        assert {span.status.code for span in good} == {Status.STATUS_CODE_UNSET}


async def test_without_an_endpoint_the_clients_context_is_passed_as_it_is() -> None:
    async with fleet() as f:
        assert f.context.tracing is None
        await f.post("/v1/completions", {"model": "tiny", "prompt": "hi"}, headers={"traceparent": "anything"})
        assert told(f.d[0]) == ["anything"]


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = "import sys, xpyd_sidecar.router.app; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_missing_packages_are_named_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xpyd_sidecar.router.observing.spans", None)
    with pytest.raises(ConfigError, match=r"xpyd-sidecar\[otel\] - at `\$\.router\.otlp_endpoint`"):
        observer.tracing_of("http://c:4318", ServiceName("s"), InstanceName("r"))


@pytest.mark.parametrize("trouble", ["slow", "down", "refuses"])
async def test_a_collector_in_trouble_delays_no_request_and_no_end(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "DELAY_MS", 50)
    monkeypatch.setattr(spans, "CLOSE_S", 0.5)
    monkeypatch.setattr(spans, "TIMEOUT_S", HELD_S)
    with receiver() as r:
        if trouble == "slow":
            r.answers.clear()
        else:
            r.status = 503
        endpoint = "http://127.0.0.1:1" if trouble == "down" else r.endpoint
        async with fleet(otlp_endpoint=endpoint) as f:
            loop = asyncio.get_running_loop()
            for _ in range(20):
                at = loop.time()
                assert (await f.complete(stream=True)).status == 200
                assert loop.time() - at < HELD_S / 3, "less than the collector takes"
            at = loop.time()
            await f.context.tracing.close()
            assert loop.time() - at < HELD_S / 3


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "QUEUE", 16)
    monkeypatch.setattr(spans, "BATCH", 16)
    with receiver() as r:
        r.answers.clear()
        async with fleet(otlp_endpoint=r.endpoint) as f:
            for _ in range(30):
                await f.complete()
            await f.wait_quiet()
            r.answers.set()
            await f.context.tracing.close()
        assert 0 < len(r.spans) <= 48, "what waited beyond the bound was dropped"


@pytest.mark.parametrize(("endpoint", "url"), [
    ("http://c:4318", "http://c:4318/v1/traces"), ("http://c:4318/", "http://c:4318/v1/traces"),
    ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces")])
def test_an_endpoint_without_a_path_gets_the_usual_one(endpoint: str, url: str) -> None:
    assert spans.url_of(endpoint) == url


async def test_span_attributes_hold_no_prompt_and_no_token() -> None:
    with receiver() as r:
        async with fleet(otlp_endpoint=r.endpoint) as f:
            await f.complete(stream=True, prompt="a secret prompt")
            found = await sent(r, f)
        words = json.dumps([{key: str(value) for key, value in attributes(span).items()} for span in found])
        assert "secret" not in words
