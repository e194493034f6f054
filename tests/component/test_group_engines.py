"""`xpyd up` with an instance of two members and real engines: TP2 over two process sets as prefill, one as decode."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engines import complete, metric
from group_service import GroupService, groups
from service import wait

pytestmark = pytest.mark.engines
PROMPT = list(range(5, 400))
USED = "calls to 2 workers go through the broadcast queue, 1 of them on this host"


def ready(service: GroupService) -> bool:
    """Both instances serve."""
    return [each.state for role in ("prefill", "decode") for each in service.fleet(role)] == ["ready"] * 2


def handed_over(url: str, decode: str, prompt: list[int]) -> bool:
    """Whether decode computes none of a prompt but its last token, and answers as one engine does. Where prefill had no
    processor for five seconds it is given up, and decode computes.
    """
    before = metric(decode, "vllm:prompt_tokens_by_source_total", source="local_compute")
    given = complete(url, prompt, 16)["token_ids"]
    computed = metric(decode, "vllm:prompt_tokens_by_source_total", source="local_compute") - before
    assert given == complete(decode, prompt, 16)["token_ids"], "as one engine answers"
    return computed <= 1


def test_a_group_of_two_prefills_and_comes_back_by_itself_after_a_death(tmp_path: Path) -> None:
    with groups(tmp_path, "prefill", {"tensor": 2}) as service:
        (prefill,), (decode,) = service.fleet("prefill"), service.fleet("decode")
        plain, name = f"http://{decode.http[0]}", prefill.instance
        assert any(handed_over(service.url, plain, PROMPT[number:]) for number in range(3)), "decode computes no prompt"
        assert USED in service.log(name, 0), "a stranger could send calls"
        before = service.processes()
        os.kill(service.server(name, 1), signal.SIGKILL)
        wait(lambda: not ready(service), 120, "seen as not ready")
        wait(lambda: ready(service), 400, "back")
        assert service.fleet("prefill")[0].incarnation != prefill.incarnation
        assert {one: pid for one, pid in service.processes().items() if "/core" not in one} == {
            one: pid for one, pid in before.items() if "/core" not in one}, "launchers and agents stayed"
        assert complete(service.url, PROMPT[7:], 16)["token_ids"] == complete(plain, PROMPT[7:], 16)["token_ids"]
