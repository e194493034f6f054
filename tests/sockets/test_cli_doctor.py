"""``xpyd doctor``: what it reads of routers and this host, what it prints, and its exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
from clinic import healthy, instance, packed, traffic

from xpyd_operator.cli import doctor, main, routers
from xpyd_operator.cli.host_facts import host_facts
from xpyd_operator.doctor.reading import HostReading, ServiceReading
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.intake import Disaggregation


@contextmanager
def router(service: ServiceReading) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A router that tells this; who asked for what, with which token."""
    asked: list[tuple[str, str]] = []
    answers = {"/fleet": msgspec.json.encode(service.fleet)}
    if service.sample is not None:
        answers["/sample"] = msgspec.json.encode(packed(service.sample))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b'{"error": {"message": "nothing there"}}')

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


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(routers.TOKEN, "secret")


def test_a_healthy_service_is_exit_code_0_and_compared_with_plain_engines(capsys: pytest.CaptureFixture[str]) -> None:
    with router(healthy(traffic(13_000, 0.8, output=300))) as (url, asked):
        assert main.main(["doctor", url]) == 0
    assert asked == [("/fleet", "Bearer secret"), ("/sample", "Bearer secret")]
    printed = capsys.readouterr().out
    assert "qwen: disaggregating: True, decode received all" in printed
    assert "nothing is wrong that can be seen from here" in printed
    assert "as 2 plain engines: keep P/D" in printed


def test_what_is_broken_comes_first_and_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    failing = Disaggregation("False", "LoadsFail", "9 of 10 loads failed (checksum: 9)", failed=(("checksum", 9),))
    sick = healthy(traffic(256, 6.0), disaggregation=failing)
    with router(sick) as (url, _):
        assert main.main(["doctor", url]) == 1
        printed = capsys.readouterr().out.splitlines()
        assert main.main(["doctor", url, "-o", "json"]) == 1
    assert [line for line in printed if line[:2] in {"1.", "2."}] == [
        "1. loads of KV fail, so that decode computes prompts that prefill has computed (broken: loads-fail)",
        "2. P/D cannot pay with this traffic: hand-overs take longer than the prompts (costly: no-payoff)"]
    told = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["level"]) for one in told["findings"]] == [("loads-fail", "broken"), ("no-payoff", "costly")]
    assert all(one["evidence"] and one["do"] for one in told["findings"])
    assert told["compared"]["engines"] == 2


def test_a_router_of_before_the_sample_is_read_without_it() -> None:
    whole = healthy()
    with router(ServiceReading(whole.fleet, None)) as (url, asked):
        assert main.main(["doctor", url]) == 0
    assert [path for path, _ in asked] == ["/fleet", "/sample"]


def test_nobody_there_and_no_token_are_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                   ) -> None:
    assert main.main(["doctor", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1/fleet" in capsys.readouterr().err
    monkeypatch.delenv(routers.TOKEN)
    assert main.main(["doctor", "http://127.0.0.1:1"]) == 2
    assert routers.TOKEN in capsys.readouterr().err


def test_this_host_is_examined_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "host_facts", lambda: HostReading(files=256))
    assert main.main(["doctor"]) == 0
    assert "1. a process of this host may have 256 files open (costly: files)" in capsys.readouterr().out


def test_what_is_read_of_this_host_is_plausible() -> None:
    facts = host_facts()
    assert facts.files > 0
    assert 0 < facts.memory_free <= facts.memory
    assert 0 <= facts.shm_free <= facts.shm


def test_a_fleet_without_decode_is_broken() -> None:
    with router(healthy(instances=(instance("p0", Role.PREFILL),))) as (url, _):
        assert main.main(["doctor", url]) == 1
