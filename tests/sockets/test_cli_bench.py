"""``xpyd bench`` against a scripted endpoint, its measures by hand, and ``xpyd simulate``."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from processes import free_port

from xpyd_operator.cli import report
from xpyd_operator.cli.main import main
from xpyd_operator.cli.plot import panels
from xpyd_operator.errors import XpydError
from xpyd_operator.plan.planner.figures import Goals
from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.rules import RouterRules
from xpyd_operator.simulation.statics import point
from xpyd_operator.simulation.trace import Arrival
from xpyd_operator.simulation.world import World
from xpyd_operator.traffic.drive import TrafficTarget, body_of
from xpyd_operator.traffic.measures import RequestOutcome, measure, percentile


def outcome(started: float, first: float, ended: float, tokens: int, **more: object) -> RequestOutcome:
    return RequestOutcome(planned=started, started=started, prompt_tokens=10, output_tokens=tokens, first=first,
                          ended=ended, gaps=[(ended - first) / max(1, tokens - 1)] * (tokens - 1), **more)  # type: ignore[arg-type]


def test_measures_are_those_of_vllm_bench_serve() -> None:
    found = measure([outcome(0, 0.5, 1.5, 11), outcome(1, 1.1, 3.1, 21), outcome(2, 2.5, 2.5, 1)], ttft_s=0.3, tpot_s=0.2)
    assert found.ttft_ms.p50 == pytest.approx(500)
    assert found.tpot_ms.mean == pytest.approx(100)  # of the two with more than one token
    assert found.e2el_ms.p99 == pytest.approx(1500 + 0.98 * 600)
    assert found.itl_ms.p50 == pytest.approx(100)
    assert (found.duration_s, found.output_tokens, found.request_throughput) == pytest.approx((3.1, 33, 3 / 3.1))
    assert found.goodput == pytest.approx(1 / 3)


def test_what_failed_is_counted_and_said_but_not_measured() -> None:
    refused = RequestOutcome(planned=0.0, started=0.1, error="status 500: no")
    found = measure([outcome(0, 0.5, 1.5, 11), refused], ttft_s=1.0)
    assert (found.completed, found.failed, found.goodput, found.errors) == (1, 1, 0.5, (("status 500: no", 1),))
    assert measure([]).completed == 0


def test_percentiles_lie_between_values() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([7.0], 99) == 7.0


def test_a_request_has_exactly_its_lengths() -> None:
    body = body_of(TrafficTarget("u", "m", vocabulary=100), Arrival(0.0, 5, 7), lambda: 0.999)
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (5, 7, True)
    assert all(10 <= token < 100 for token in body["prompt"])


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Answers with as many tokens as asked for; a prompt of 13 tokens gets a 503."""
    port, ready, loop = free_port(), threading.Event(), asyncio.new_event_loop()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if len(body["prompt"]) == 13:
            return web.Response(status=503, text="no decode")
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(body["max_tokens"]):
            await answer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(0.002)
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": len(body["prompt"])}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    runners: list[web.AppRunner] = []

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_an_endpoint_is_driven_and_measured(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, plot = tmp_path / "r.json", tmp_path / "p.svg"
    code = main(["bench", endpoint, "--rate", "200", "--requests", "20", "--input-len", "12", "--output-len", "6",
                 "--ttft", "30s", "--json", str(result), "--plot", str(plot)])
    printed = capsys.readouterr().out
    assert code == 0
    found = json.loads(result.read_text())
    assert (found["result"]["completed"], found["result"]["output_tokens"]) == (20, 120)
    assert found["result"]["input_tokens"] == 240
    assert found["result"]["goodput"] == 1.0
    assert all(len(each["gaps"]) == 5 for each in found["requests"])
    assert "TTFT" in printed
    assert plot.read_text().startswith("<svg")


def test_failures_are_told_by_the_exit_code(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", endpoint, "--rate", "500", "--requests", "3", "--input-len", "13", "--output-len", "2"]) == 1
    assert "3 x status 503: no decode" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "words"), [
    (["--model", "other"], "serves demo"), (["--requests", "0"], "--requests must be at least 1"),
    (["--ttft", "soon"], "'soon' is not a duration"), (["--trace", "missing.csv"], "missing.csv: No such file"),
])
def test_bad_arguments_are_named(
    endpoint: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", endpoint, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"http://127.0.0.1:{free_port()}"]) == 2
    assert "Cannot connect" in capsys.readouterr().err


TRACE = "time,prompt,output\n" + "".join(f"{index * 0.5},{2000 + 500 * (index % 7)},60\n" for index in range(240))
SERVICE = """apiVersion: xpyd.dev/v1beta1
kind: DisaggService
metadata: {name: qwen}
spec:
  model: {source: Qwen/Qwen3-8B}
  prefill: {scaling: {min: 1, max: 2}}
  decode: {scaling: {min: 1, max: 2}}
  planner: {mode: auto, slo: {ttftP95: 2s, tpotP95: 50ms}}
"""


def test_a_trace_is_simulated_against_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, document, plot = tmp_path / "t.csv", tmp_path / "s.yaml", tmp_path / "p.svg"
    trace.write_text(TRACE)
    document.write_text(SERVICE)
    assert main(["simulate", str(trace), "-f", str(document), "--plot", str(plot), "--cold-start", "5s..7s"]) == 0
    printed = capsys.readouterr().out
    assert "240 requests" in printed
    assert "Qwen/Qwen3-8B, h200 (assumed; --gpu), 200 Gb/s (assumed; --link)" in printed
    for choice in ("planner", "hpa", "law", "threshold", "static", "foresight", "from 2P2D"):
        assert choice in printed
    assert "1P1D: the fewest GPUs with both goals met" in printed
    assert "2 plain: " in printed
    assert "TTFT <= 2 s and TPOT <= 50 ms" in printed
    assert plot.read_text().startswith("<svg")
    again = ["simulate", str(trace), "-f", str(document), "-o", "json", "--cold-start", "6s", "--tp", "2,1"]
    assert main([*again, "--link", "100Gb"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["choices"]) == {"planner", "hpa", "hpa+switch", "law", "threshold", "static", "foresight"}
    assert "2 GPUs (prefill), 1 (decode)" in found["instances"]
    assert "12.5 GB/s" in found["instances"]
    first = found["frontier"][0]
    assert (first["choice"], first["gpus"], first["plain"]) == ("1P1D", 3, "3 plain")
    assert first["link"] > 0
    hours = found["choices"]["planner"]["hours"]
    assert all(each is None or each["hours"] <= hours * 1.001 for each in found["choices"].values())


@pytest.mark.parametrize(("arguments", "words"), [
    (["--engine", "h300"], "no engine model h300"), (["--max", "0"], "--max must be at least 1"),
    (["--tpot", "1"], "'1' is not a duration"), (["--gpu", "h300"], "no GPU h300; there are a100, h100"),
    (["--model", "gpt-9"], "--model: no model gpt-9; there are"), (["--tp", "x"], "--tp x: write a size, or two"),
    (["--link", "10"], "--link 10: write bits or bytes a second"), (["--engine", "h200-8b", "--tp", "2"], "--tp cannot"),
    (["--cold-start", "5m..2m"], "--cold-start 5m..2m: write a duration above 0, or two, the shorter one first"),
    ([], "240 requests in 2.0 minutes are too short for a planner, whose first removal takes 10.0"),
    ([], "a start 3.0: give at least 26.0 minutes"),
])
def test_bad_simulations_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE)
    assert main(["simulate", str(trace), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_share_of_a_trace_that_leaves_no_request_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE)
    assert main(["simulate", str(trace), "--load", "0.000001"]) == 2
    assert "0 requests in 0.0 minutes are too short for a planner" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [
    ("sqare", "sqare: no such file and no such family; there are flat, agents"),
    ("square:perod=3m", "no field perod"), ("gone.csv", "gone.csv: No such file"),
])
def test_traffic_that_there_is_not_is_named(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", name]) == 2
    assert words in capsys.readouterr().err


def test_who_was_never_answered_has_no_percentile() -> None:
    trace = [Arrival(index * 0.01, 4000, 10) for index in range(300)]
    model = EngineModel(prefill_rate=10_000, step_base=0.01, kv_tokens=50_000)
    lost = World(trace, model, (1, 1), Static(), rules=RouterRules(queue_timeout_s=1.0)).play()
    line = report._line(point("planner", lost, Goals(ttft_s=3.0, tpot_s=0.06)))
    assert line.split()[3:5] == ["never", "never"]


def _written(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{index}.yaml" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def test_what_a_document_says_of_an_instance_is_simulated_or_refused(tmp_path: Path) -> None:
    from xpyd_operator.api.rule import Target
    from xpyd_operator.cli.documents import load_service
    from xpyd_operator.cli.instances import instances, rules_of
    from xpyd_operator.plan.planner.run import goals_of

    def of(text: str, **given: str) -> Any:
        document = tmp_path / "s.yaml"
        document.write_text(text)
        arguments = {"engine": None, "model": None, "gpu": None, "tp": None, "link": None, "cold_start": None} | given
        return instances(Namespace(**arguments), load_service(str(document), Target.KUBERNETES))

    four = SERVICE.replace("prefill: {", "prefill: {parallelism: {tensor: 4, pods: 2}, "
                           "template: {spec: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}}, ")
    found = of(four)
    assert (found.pools.prefill.gpus, found.pools.prefill.pods, found.pools.decode.gpus) == (4, 2, 1)
    assert "h100 and h200 (assumed; --gpu)" in found.words
    assert not found.pools.are_alike
    services = [load_service(str(document), Target.KUBERNETES) for document in _written(tmp_path, four, SERVICE)]
    assert [goals_of(each, 60.0).switching for each in services] == [False, True]
    with pytest.raises(XpydError, match=r"decode.parallelism.data is 2, which is not simulated; write 1, and so many"):
        of(SERVICE.replace("decode: {", "decode: {parallelism: {data: 2}, "))
    with pytest.raises(XpydError, match=r"those of prefill .4 devices. and decode .1. differ"):
        of(four, engine="h200-8b")
    with pytest.raises(XpydError, match=r"spec.model.source: no model"):
        of(SERVICE.replace("Qwen/Qwen3-8B", "acme/one-7b"))
    assert of(SERVICE, link="100Gb").pools.decode.link == 12.5e9
    path = tmp_path / "r.yaml"
    router = "{maxInFlight: 28, hold: 5s, onNoPrefill: reject, skipPrefill: {belowTokens: 100}}"
    path.write_text(f"{SERVICE}  router: {router}\n")
    rules = rules_of(load_service(str(path), Target.KUBERNETES))
    assert (rules.queue_size, rules.queue_timeout_s, rules.skip_below, rules.onto_decode) == (7, 5.0, 100, False)


def test_a_model_comes_from_a_file_too(tmp_path: Path) -> None:
    from xpyd_operator.cli.traces import load_model

    path = tmp_path / "m.json"
    path.write_text('{"prefill_rate": 5000, "step_base": 0.01, "kv_tokens": 1000}')
    assert load_model(str(path)).prefill_rate == 5000
    path.write_text('{"prefill_rate": 5000, "speed": 1}')
    with pytest.raises(XpydError, match="speed"):
        load_model(str(path))


def test_pictures_hold_their_lines_and_escape_their_words() -> None:
    text = panels("a < b", [("counts", {"x": [(0, 0), (60, 3)], "late": [(0, math.inf)]})])
    assert "a &lt; b" in text
    assert text.count("<polyline") == 2
    assert "inf" not in text
