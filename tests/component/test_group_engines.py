"""`xpyd up` with an instance of two members and real engines: TP2 over two process sets as prefill, one as decode."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from engines import complete, metric
from service import NAME, Service, wait

from xpyd_operator.local import procs

PROMPT = list(range(5, 400))
USED = "calls to 2 workers go through the broadcast queue, 1 of them on this host"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("group")) as one:
        one.spec = {"prefill": {"replicas": 1, "parallelism": {"tensor": 2, "pods": 2}}}
        one.up(1, 1)
        yield one


def address(service: Service, role: str) -> str:
    (found,) = [f"http://{one['address']}" for one in service.status()["instances"] if one["role"] == role]
    return found


def test_a_group_of_two_prefills_and_comes_back_by_itself_after_a_death(service: Service) -> None:
    decode, prefill = address(service, "decode"), address(service, "prefill")
    assert len(complete(prefill, PROMPT[:200], 2)["token_ids"]) == 2, "what torch compiles is there"
    assert metric(decode, "vllm:prompt_tokens_by_source_total", source="local_compute") == 0
    given = complete(service.url, PROMPT, 16)["token_ids"]
    assert metric(decode, "vllm:prompt_tokens_by_source_total", source="local_compute") <= 1, "decode computes no prompt"
    assert given == complete(decode, PROMPT, 16)["token_ids"], "as one engine answers"
    (name,) = [one["name"] for one in service.status()["instances"] if one["role"] == "prefill"]
    logs = service.home.glob(f"{NAME}/instances/{name}/**/*.log")
    assert any(USED in log.read_text() for log in logs), "a stranger could send calls"
    before = service.processes()
    launcher = before[f"{name}/engine-1"]
    (engine,) = [one.pid for one in procs.everyone() if one.parent == launcher]
    os.kill(engine, signal.SIGKILL)
    wait(lambda: not service.ready(), 30, "seen as not ready")
    wait(lambda: service.ready() == "1P1D", 240, "back")
    after = service.processes()
    assert len(complete(prefill, PROMPT[:200], 2)["token_ids"]) == 2
    assert {one: pid for one, pid in after.items() if "/core" not in one} == {
        one: pid for one, pid in before.items() if "/core" not in one}, "launchers and agents stayed"
    assert complete(service.url, PROMPT[7:], 16)["token_ids"] == complete(decode, PROMPT[7:], 16)["token_ids"]
