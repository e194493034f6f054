"""``xpyd trace``: where it asks, what it prints, and what Perfetto gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xpyd_operator.cli import main, routers, timeline, trace
from xpyd_operator.errors import NotFound, XpydError
from xpyd_operator.local import store
from xpyd_operator.local.paths import ServiceFolder
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, ServiceName, TransferId
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.contract.timeline import HEADER, Clock, Event, Timeline, Traces

EVENTS = (
    Event("router", "request", 0.0, 2.0, note="ok"), Event("router", "decode leg", 0.001, 1.9, note="to q-e1 2xx"),
    Event("router", "prefill leg", 0.001, 0.3, note="to q-e0 2xx"),
    Event("q-e0", "ANNOUNCE", 0.01), Event("q-e0", "prefill forward", 0.02, 0.25, 1024, "1024 tokens"),
    Event("q-e0", "push", 0.05, 0.01, 100, "100 bytes over tcp"),
    Event("q-e0", "push", 0.1, 0.02, 300, "300 bytes over tcp"),
    Event("q-e1", "committed", 0.28), Event("q-e1", "first decode forward", 0.29, 0.01, 1, "1 tokens"),
)
LINE = Timeline("r-1", TransferId("a" * 32), "ok", 1000.0, 0.305, 2.0, 1024, 200, EVENTS)
TRACES = Traces(ServiceName("q"), InstanceName("router"), 7, (LINE,), (Clock(InstanceName("q-e0"), 0.0002),),
                {"q-e1": "no answer within 2 s"})


def test_text_has_a_lane_for_each_thing_with_its_time_and_a_bar() -> None:
    lines = timeline.text(TRACES, 120).splitlines()
    assert "r-1" in lines[0]
    assert "TTFT 305.0 ms" in lines[0]
    assert "1024 tokens in, 200 out" in lines[0]
    by_name = {line[:28].strip(): line for line in lines[2:11]}
    assert by_name["q-e0  prefill forward"].split()[3:5] == ["20.00", "250.00"]
    assert by_name["q-e0  push"].endswith("2 of them, 400 bytes")
    assert by_name["q-e0  push"].count("█") < by_name["q-e0  prefill forward"].count("█")
    assert "◆" in by_name["q-e1  committed"]
    assert lines[-3:] == ["clocks beside the router's: q-e0 within 0.20 ms", "", "q-e1 tells nothing: no answer within 2 s"]


@pytest.mark.parametrize("width", [20, 80, 300])
def test_bars_fit_and_end_where_the_first_token_is(width: int) -> None:
    for line in timeline.text(TRACES, width).splitlines()[2:10]:
        assert set("█◆") & set(line.partition("│")[2]), line
    assert "305" not in timeline.text(TRACES, 80).splitlines()[1]
    assert "301.0 ms" in timeline.text(TRACES, 80).splitlines()[1], "the answer's own length does not stretch the picture"


def test_perfetto_gets_spans_instants_and_names() -> None:
    made = timeline.chrome(TRACES)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in made["traceEvents"] if event["ph"] == "M"}
    assert set(names.values()) >= {"router", "q-e0", "q-e1", "push"}
    spans = [event for event in made["traceEvents"] if event["ph"] == "X"]
    [forward] = [event for event in spans if event["name"] == "prefill forward"]
    assert (forward["ts"], forward["dur"], names[forward["pid"], 0]) == (20000.0, 250000.0, "q-e0")
    assert names[forward["pid"], forward["tid"]] == "prefill forward"
    assert {event["name"] for event in made["traceEvents"] if event["ph"] == "i"} == {"ANNOUNCE", "committed"}
    assert made["otherData"]["silent"] == TRACES.silent


def test_several_requests_stand_beside_each_other_by_their_arrival() -> None:
    later = msgspec.structs.replace(LINE, arrived_unix=1003.0, request="r-2")
    made = timeline.chrome(msgspec.structs.replace(TRACES, found=(later, LINE)))
    begun = {event["args"]["request"]: event["ts"] for event in made["traceEvents"]
             if (event["name"], event["ph"]) == ("request", "X")}
    assert begun == {"r-1": 0.0, "r-2": 3e6}


@contextmanager
def router(status: int, body: bytes) -> Iterator[tuple[str, list[dict[str, str]]]]:
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append({"path": self.path, **dict(self.headers)})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_router_by_its_url_is_asked_with_the_admin_token(monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(routers.TOKEN, "secret")
    with router(200, msgspec.json.encode(TRACES)) as (url, asked):
        assert main.main(["trace", f"{url}/", "--slowest", "3", "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["otherData"]["service"] == "q"
        assert main.main(["trace", url, "--id", "r-1"]) == 0
        assert "request r-1" in capsys.readouterr().out
    assert [(one["path"], one["Authorization"], one[HEADER]) for one in asked] == [
        ("/trace", "Bearer secret", "slowest 3"), ("/trace", "Bearer secret", "id r-1")]


def test_a_service_of_this_host_is_asked_by_its_name_with_the_token_of_its_key(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XPYD_HOME", str(tmp_path))
    folder = ServiceFolder("q")
    folder.make()
    folder.desired.write_text("{}")
    store.save(folder.settings, store.Settings("127.0.0.1", "127.0.0.1", str(tmp_path), "python"))
    key = store.service_key(folder)
    assert main.main(["trace", "q"]) == 2
    assert "no router of q runs" in capsys.readouterr().err
    with router(200, msgspec.json.encode(TRACES)) as (url, asked):
        config = SidecarConfig(service=ServiceName("q"), instance=InstanceName("router"), key_file=str(folder.key),
                               run_dir=str(tmp_path), router=RouterConfig(admin_port=int(url.rpartition(":")[2])))
        store.save(folder.router / "config.json", config)
        assert main.main(["trace"]) == 0
    assert [(one["Authorization"], one[HEADER]) for one in asked] == [(f"Bearer {keys.admin_token(key)}", "last 1")]
    assert "request r-1" in capsys.readouterr().out


def test_no_request_yet_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(routers.TOKEN, "secret")
    with router(200, msgspec.json.encode(msgspec.structs.replace(TRACES, found=(), clocks=(), silent={}))) as (url, _):
        assert main.main(["trace", url]) == 1
    assert "remembers no request" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "body", "error", "words"), [
    (404, b'{"error": {"message": "no request x among the last 3"}}', NotFound, "no request x among"),
    (401, b'{"error": {"message": "the API key is wrong"}}', XpydError, "401 the API key is wrong"),
    (200, b"<html>", XpydError, "not the answer of a router"),
    (200, b" " * (routers.ANSWER_MAX + 1), XpydError, "longer than"),
])
def test_what_a_router_refuses_is_said(status: int, body: bytes, error: type[XpydError], words: str) -> None:
    with router(status, body) as (url, _), pytest.raises(error, match=words):
        asyncio.run(trace.ask(url, "t", "last 1"))


def test_nobody_there_and_no_token_are_errors_with_what_to_do(monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(routers.TOKEN, raising=False)
    assert main.main(["trace", "http://127.0.0.1:1"]) == 2
    assert routers.TOKEN in capsys.readouterr().err
    monkeypatch.setenv(routers.TOKEN, "t")
    assert main.main(["trace", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1/trace" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--last", "0"], ["--slowest", "x"], ["--last", "1", "--id", "x"], ["--last", "33"]])
def test_wrong_usage_is_exit_code_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["trace", "http://x", *words])
    assert caught.value.code == 2
